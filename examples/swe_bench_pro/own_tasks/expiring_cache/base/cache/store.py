# SPDX-License-Identifier: Apache-2.0
"""The cache."""

from collections import OrderedDict

from cache.clock import Clock


class Cache:
    """Keep at most `size` entries, each for `seconds`; the least recently used one leaves first."""

    def __init__(self, size, seconds, clock=None):
        self.size = size
        self.seconds = seconds
        self.clock = clock or Clock()
        self._entries = OrderedDict()

    def put(self, key, value):
        """Store a value."""
        if len(self._entries) >= self.size:
            self._entries.popitem(last=False)
        self._entries[key] = (value, self.clock.now() + self.seconds)

    def get(self, key, default=None):
        """Return a stored value and mark it as used."""
        if key not in self._entries:
            return default
        value, expires = self._entries[key]
        if expires < self.clock.now():
            return default
        self._entries.move_to_end(key)
        return value

    def __len__(self):
        return len(self._entries)
