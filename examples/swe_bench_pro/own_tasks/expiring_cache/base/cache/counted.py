# SPDX-License-Identifier: Apache-2.0
"""A cache that counts how it is used."""

from cache.store import Cache


class CountedCache(Cache):
    """Count hits and misses."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.hits = 0
        self.misses = 0

    def get(self, key, default=None):
        """Return a stored value and count the look-up."""
        value = super().get(key, default)
        if value is default:
            self.misses += 1
        else:
            self.hits += 1
        return value
