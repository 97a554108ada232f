# SPDX-License-Identifier: Apache-2.0
"""Find a value by a dotted path."""


def lookup(values, path):
    """Return the value at `path`; each name is a key."""
    for name in path.split("."):
        values = values[name]
    return values
