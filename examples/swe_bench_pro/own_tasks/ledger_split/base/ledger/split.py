# SPDX-License-Identifier: Apache-2.0
"""Share a cost among people."""


def shares(cents, people):
    """Return what each person owes."""
    each = cents // len(people)
    return {person: each for person in people}
