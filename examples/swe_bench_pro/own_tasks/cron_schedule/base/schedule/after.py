# SPDX-License-Identifier: Apache-2.0
"""When a rule is due next."""

from datetime import timedelta


def after(rule, moment, *, limit_days=366):
    """Return the first due minute after `moment`, or None within the limit."""
    moment = moment.replace(second=0, microsecond=0)
    for _ in range(limit_days * 24 * 60):
        if rule.due(moment):
            return moment
        moment += timedelta(minutes=1)
    return None
