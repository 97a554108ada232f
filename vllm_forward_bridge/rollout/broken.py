# SPDX-License-Identifier: Apache-2.0
"""What an engine remembers of a step that failed."""

from collections.abc import Iterator
from contextlib import contextmanager


class Broken:
    """Refuses every step after one that raised.

    The rows of that step count as scheduled but were never computed: their requests would wait for ever, and a loop
    that steps until all are finished would never end.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround one step.

        Raises:
            RuntimeError: an earlier step failed.
        """
        if self._error is not None:
            raise RuntimeError(
                f"a step of this engine failed ({type(self._error).__name__}: {self._error}), so its unfinished "
                "requests can never end: make a new engine"
            ) from self._error
        try:
            yield
        except BaseException as error:
            self._error = error
            raise
