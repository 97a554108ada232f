# SPDX-License-Identifier: Apache-2.0
"""The layout that the printers expect; `python -m wire.describe KIND` prints it."""

import zlib

KINDS = ("item", "total")
_WORDS = ("name", "count", "price", "till", "check")


def layout(kind):
    """Return [(field, width, side)]; the printers' firmware fixes it, so it is derived, never edited."""
    rows = []
    for word in _WORDS:
        number = zlib.crc32(f"{kind}/{word}/7".encode())
        if number % 5 or word == "check":
            rows.append((word, 4 + number % 9, "left" if number % 2 else "right"))
    return sorted(rows, key=lambda row: zlib.crc32(f"{kind}:{row[0]}".encode()))
