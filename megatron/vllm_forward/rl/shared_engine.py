# SPDX-License-Identifier: Apache-2.0
"""Many coroutines over one engine: each awaits its own completion, one thread steps the engine."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from vllm_forward_bridge.rollout.protocol import Completion, Request, Rollout


class SharedEngine:
    """Serve requests of many episodes from one engine, batched as they come.

    The engine is touched by one thread only, so that sandboxes are served while a step computes.

    Args:
        engine: must be idle.
        prepare_thread: called first in that thread; sets its CUDA device, where there is one.
    """

    def __init__(self, engine: Rollout, prepare_thread: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._prepare_thread = prepare_thread
        self._new: list[Request] = []
        self._given_up: list[str] = []
        self._waiting: dict[str, asyncio.Future[Completion]] = {}

    async def __aenter__(self) -> "SharedEngine":
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine", initializer=self._prepare_thread)
        self._wake = asyncio.Event()
        self._server = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._server.cancel()
            (ended,) = await asyncio.gather(self._server, return_exceptions=True)
            failure = None if isinstance(ended, asyncio.CancelledError) else ended
            if failure is None:
                # A step in flight ends before the engine is left alone. One that failed is not stepped again.
                self._thread.submit(self._abandon).result()
        finally:
            self._thread.shutdown()
        if failure is not None and error is None:
            raise failure

    async def sample(self, request: Request) -> Completion:
        """Return the completion of a request; a cancelled wait takes the request out of the engine.

        Raises:
            ValueError: the engine can never serve it.
            RuntimeError: the engine failed.
        """
        if self._server.done():
            raise RuntimeError("the engine's thread has ended; no request can be served") from self._server.exception()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        self._new.append(request)
        self._wake.set()
        try:
            return await future
        finally:
            if self._waiting.pop(request.request_id, None) is not None and future.cancelled():
                self._give_up(request)

    def _give_up(self, request: Request) -> None:
        if request in self._new:
            self._new.remove(request)
        else:
            self._given_up.append(request.request_id)
            self._wake.set()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._waiting and not self._given_up:
                    self._wake.clear()
                    await self._wake.wait()
                new, self._new = self._new, []
                given_up, self._given_up = self._given_up, []
                refused, completions = await loop.run_in_executor(self._thread, self._advance, new, given_up)
                for request_id, error in refused:
                    self._deliver(request_id, lambda future, error=error: future.set_exception(error))
                for completion in completions:
                    self._deliver(completion.request_id, lambda future, done=completion: future.set_result(done))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            for future in self._waiting.values():
                if not future.done():
                    failed = RuntimeError(f"the engine failed: {error}")
                    failed.__cause__ = error
                    future.set_exception(failed)
            raise

    def _deliver(self, request_id: str, give: Callable[[asyncio.Future], None]) -> None:
        future = self._waiting.get(request_id)
        if future is not None and not future.done():
            give(future)

    def _advance(
        self, new: Sequence[Request], given_up: Sequence[str]
    ) -> tuple[list[tuple[str, ValueError]], list[Completion]]:
        refused = []
        for request in new:
            try:
                self._engine.add(request)
            except ValueError as error:
                refused.append((request.request_id, error))
        for request_id in given_up:
            try:
                self._engine.abort(request_id)
            except KeyError:
                continue  # it finished in the step during which it was given up
        return refused, self._engine.step() if self._engine.has_unfinished() else []

    def _abandon(self) -> None:
        for request_id in self._given_up:
            try:
                self._engine.abort(request_id)
            except KeyError:
                continue
        while self._engine.has_unfinished():
            self._engine.step()
