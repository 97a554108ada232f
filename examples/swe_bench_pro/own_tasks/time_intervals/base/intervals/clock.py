# SPDX-License-Identifier: Apache-2.0
"""Minutes of a day as text."""


def parse(text):
    """Read `09:30-11:00` as (start, end) in minutes."""
    return tuple(int(part[:2]) * 60 + int(part[3:]) for part in text.split("-"))


def show(interval):
    """Write (start, end) as `09:30-11:00`."""
    return "-".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in interval)
