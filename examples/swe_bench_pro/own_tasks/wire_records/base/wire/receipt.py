# SPDX-License-Identifier: Apache-2.0
"""A whole receipt."""

from wire.item import record


def receipt(items, till):
    """Return one line an item; an item is (name, count, price)."""
    return "\n".join(record(name, count, price, till) for name, count, price in items)
