# SPDX-License-Identifier: Apache-2.0
"""Simple changes."""

import unittest

from settings.changes import changes


class ChangesTest(unittest.TestCase):
    """Values of one section."""

    def test_changed(self):
        """A changed value shows both."""
        self.assertEqual(changes("[a]\nx = 1\n", "[a]\nx = 2\n"), ["~ a.x = 1 -> 2"])
