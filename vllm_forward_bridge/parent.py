# SPDX-License-Identifier: Apache-2.0
"""End a process with its parent, which may be killed at any moment. Imports no torch."""

import os
import threading
import time

_SECONDS = 1.0


def end_with(parent: int) -> None:
    """Watch the parent from a thread and end this process when it is gone.

    Args:
        parent: process id, from the parent itself, so that one that died before this call is noticed too.
    """
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os._exit(1)
