# SPDX-License-Identifier: Apache-2.0
"""Amounts in whole cents."""


def parse(text):
    """Read an amount such as `12.34` or `-0.5` as whole cents."""
    sign = -1 if text.startswith("-") else 1
    whole, _, part = text.lstrip("-").partition(".")
    return sign * (int(whole or "0") * 100 + int(part.ljust(2, "0")))


def show(cents):
    """Write whole cents as an amount with two decimals."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}"
