# SPDX-License-Identifier: Apache-2.0
"""Plain patterns."""

import unittest

from patterns.path import path_matches


class PathTest(unittest.TestCase):
    """Paths without `**`."""

    def test_star_stays_in_its_folder(self):
        """A star does not cross a slash."""
        self.assertTrue(path_matches("src/*.py", "src/main.py"))
        self.assertFalse(path_matches("src/*.py", "src/deep/main.py"))

    def test_question_mark(self):
        """It is exactly one character."""
        self.assertFalse(path_matches("a?", "a"))
