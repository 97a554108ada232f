# SPDX-License-Identifier: Apache-2.0
"""Print the layout of a kind of record."""

import sys

from wire.layout import KINDS, layout


def main(arguments):
    """Print one line a field: name, width, side."""
    if not arguments or arguments[0] not in KINDS:
        print("usage: python -m wire.describe", "|".join(KINDS))
        return 2
    for name, width, side in layout(arguments[0]):
        print(f"{name:8} width {width:2} {side}-aligned")
    print("check    is the sum of the bytes of all other fields as written, modulo 997")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
