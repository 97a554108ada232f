# SPDX-License-Identifier: Apache-2.0
"""A whole rule."""

from schedule.field import values

LIMITS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))


class Rule:
    """Minute, hour, day of month, month, day of week (0 is Sunday)."""

    def __init__(self, text):
        fields = text.split()
        self.minutes, self.hours, self.days, self.months, self.weekdays = (
            values(field, low, high) for field, (low, high) in zip(fields, LIMITS)
        )

    def due(self, moment):
        """Tell whether the rule is due in the minute of `moment`."""
        return (
            moment.minute in self.minutes
            and moment.hour in self.hours
            and moment.day in self.days
            and moment.month in self.months
            and moment.weekday() in self.weekdays
        )
