# SPDX-License-Identifier: Apache-2.0
"""Amounts are read and written."""

import unittest

from ledger.money import parse, show


class MoneyTest(unittest.TestCase):
    """Both directions."""

    def test_parse(self):
        """Decimals are padded, not scaled."""
        self.assertEqual(parse("12.34"), 1234)
        self.assertEqual(parse("-0.5"), -50)

    def test_show(self):
        """The sign stands in front."""
        self.assertEqual(show(-1205), "-12.05")
