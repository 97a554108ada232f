# SPDX-License-Identifier: Apache-2.0
"""Size and use."""

import unittest

from cache.clock import ManualClock
from cache.store import Cache


class StoreTest(unittest.TestCase):
    """The size limit."""

    def test_least_recently_used_leaves(self):
        """A look-up keeps an entry."""
        cache = Cache(2, 10, ManualClock())
        cache.put("a", 1)
        cache.put("b", 2)
        cache.get("a")
        cache.put("c", 3)
        self.assertEqual((cache.get("a"), cache.get("b"), cache.get("c")), (1, None, 3))
