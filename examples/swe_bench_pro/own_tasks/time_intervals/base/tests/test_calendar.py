# SPDX-License-Identifier: Apache-2.0
"""Free time of a day."""

import unittest

from intervals.calendar import free


class CalendarTest(unittest.TestCase):
    """Meetings inside the day."""

    def test_one_meeting(self):
        """Both sides are free."""
        self.assertEqual(free("09:00-17:00", ["12:00-13:00"]), ["09:00-12:00", "13:00-17:00"])
