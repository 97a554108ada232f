# SPDX-License-Identifier: Apache-2.0
"""Single values."""

import unittest
from datetime import datetime

from schedule.rule import Rule


class RuleTest(unittest.TestCase):
    """Rules that name no range end."""

    def test_not_due(self):
        """Another hour is not due."""
        self.assertFalse(Rule("0 9 * * *").due(datetime(2026, 3, 2, 10, 0)))
