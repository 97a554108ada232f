# SPDX-License-Identifier: Apache-2.0
"""Costs that divide evenly."""

import unittest

from ledger.split import shares


class SplitTest(unittest.TestCase):
    """Shares of a cost."""

    def test_even(self):
        """Nothing is left over."""
        self.assertEqual(shares(900, ["ann", "bo", "cy"]), {"ann": 300, "bo": 300, "cy": 300})
