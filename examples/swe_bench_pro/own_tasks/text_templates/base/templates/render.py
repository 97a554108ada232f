# SPDX-License-Identifier: Apache-2.0
"""Fill a template."""

from templates.lookup import lookup
from templates.scan import scan


def render(source, values):
    """Return `source` with its fields filled."""
    return "".join(words if kind == "text" else str(lookup(values, words)) for kind, words in scan(source))
