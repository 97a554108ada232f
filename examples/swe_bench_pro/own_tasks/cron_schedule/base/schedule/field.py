# SPDX-License-Identifier: Apache-2.0
"""One field of a schedule."""


def values(text, low, high):
    """Return the set of values that `text` names: `*`, `3`, `1-5`, `1,4`, `*/15`."""
    chosen = set()
    for part in text.split(","):
        part, _, step = part.partition("/")
        if part == "*":
            first, last = low, high
        else:
            first, _, last = part.partition("-")
            last = last or first
        chosen.update(range(int(first), int(last), int(step or 1)))
    return chosen
