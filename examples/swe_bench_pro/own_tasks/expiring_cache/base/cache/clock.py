# SPDX-License-Identifier: Apache-2.0
"""Where the time comes from."""

import time


class Clock:
    """Seconds of a monotonic clock."""

    def now(self):
        """Return the present time."""
        return time.monotonic()


class ManualClock(Clock):
    """A clock that a test moves."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        """Return the time that was set."""
        return self.time
