# SPDX-License-Identifier: Apache-2.0
"""Fields that fit."""

import unittest

from wire.fields import write


class FieldTest(unittest.TestCase):
    """One field."""

    def test_left(self):
        """Left-aligned text is padded behind."""
        self.assertEqual(write("ab", 4, "left"), "ab  ")
