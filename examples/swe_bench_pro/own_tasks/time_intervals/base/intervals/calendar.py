# SPDX-License-Identifier: Apache-2.0
"""Find free time."""

from intervals.algebra import difference
from intervals.clock import parse, show


def free(day, meetings, *, at_least=0):
    """Return the free times of a day as text, longest meetings of `at_least` minutes only."""
    slots = difference([parse(day)], [parse(meeting) for meeting in meetings])
    return [show(slot) for slot in slots if slot[1] - slot[0] > at_least]
