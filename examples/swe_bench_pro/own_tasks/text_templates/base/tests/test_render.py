# SPDX-License-Identifier: Apache-2.0
"""Fields are filled."""

import unittest

from templates.render import render


class RenderTest(unittest.TestCase):
    """Plain fields."""

    def test_path(self):
        """A dotted path goes down."""
        self.assertEqual(render("Hi {{ user.name }}!", {"user": {"name": "Ann"}}), "Hi Ann!")
