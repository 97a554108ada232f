# SPDX-License-Identifier: Apache-2.0
"""Write one field."""


def write(value, width, side):
    """Return `value` in `width` characters."""
    return str(value).ljust(width)
