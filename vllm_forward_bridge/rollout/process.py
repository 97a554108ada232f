# SPDX-License-Identifier: Apache-2.0
"""A rollout in a process of its own, on this machine: any engine behind the same protocol, also on another GPU.

Calls travel over a socket pair as pickles. Weights travel as one block of bytes: by a CUDA handle where both processes
see the same GPUs, else through shared host memory. The engine checks their digest where they arrive.
"""

import os
import pickle
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from vllm_forward_bridge.parent import end_with
from vllm_forward_bridge.rollout.protocol import Completion, Request, Rollout, SamplingParams

_ALIGNMENT = 256
"""Bytes; a tensor's place in the block suits every dtype and kernel."""
_PATIENCE = 20.0
"""Seconds that a process whose socket was closed may take to end."""
_GONE = (EOFError, OSError)
_OF_A_TRAINER = ("MASTER_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_")
"""Environment of a launcher: an engine that is alone would wait for the trainer's other ranks."""


class ProcessRollout:
    """A `protocol.Rollout` whose engine lives in another process.

    Args:
        make: returns the engine in the other process; pickled by name, so a function of an importable module or a
            `functools.partial` of one.
        visible_devices: `CUDA_VISIBLE_DEVICES` of the other process; empty: the same as here.

    Raises:
        Exception: what `make` raised, with the other process's traceback in its notes.
    """

    def __init__(self, make: Callable[[], Rollout], *, visible_devices: str = "") -> None:
        # A CUDA handle names a GPU by its number, which means another one where others are visible.
        self._by_handle = not visible_devices
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_TRAINER)}
        if visible_devices:
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()}, {os.getpid()})"]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self.close = weakref.finalize(self, _end, self._process, self._socket, self._connection)
        """Ends the process; called by itself when this object or the interpreter goes."""
        try:
            self._exchange("starting", make)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Return the version of the weights that it samples with."""
        return self._call("version")

    def add(self, request: Request) -> None:
        """Queue a request; see `protocol.Rollout.add`."""
        self._call("add", request)

    def step(self) -> list[Completion]:
        """Run one forward and return what finished."""
        return self._call("step")

    def abort(self, request_id: str) -> None:
        """End a request; see `protocol.Rollout.abort`."""
        self._call("abort", request_id)

    def has_unfinished(self) -> bool:
        """Tell whether a step would do or deliver anything."""
        return self._call("has_unfinished")

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Run requests to their end; completions come in the order of `requests`."""
        return self._call("generate", list(requests))

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int, digest: str) -> None:
        """Replace all weights, or none; see `protocol.Rollout.update_weights`."""
        with _packed(named_tensors, by_handle=self._by_handle) as packed:
            self._call("update_weights", packed, version=version, digest=digest)

    def record(self) -> dict[str, str]:
        """Name the kernel that serves each op in the other process."""
        return self._call("record")

    def score(self, sequences: Sequence[tuple[int, ...]], sampling: SamplingParams) -> list[Tensor]:
        """Score given tokens by prefill; see `protocol.Rollout.score`."""
        return self._call("score", list(sequences), sampling)

    def _call(self, name: str, *args: Any, **keywords: Any) -> Any:
        return self._exchange(name, (name, args, keywords))

    def _exchange(self, what: str, message: Any) -> Any:
        if not self.close.alive:
            raise RuntimeError(f"{what} was called, but the rollout process has ended: make a new engine")
        # What cannot be pickled is refused here, before the other side hears of it.
        content = pickle.dumps(message)
        try:
            self._connection.send_bytes(content)
            answer = self._connection.recv_bytes()
        except _GONE as error:
            self.close()
            raise RuntimeError(
                f"the rollout process ended with exit code {self._process.returncode} during {what}; its output says "
                "why. Its unfinished requests and its weights are gone: make a new engine"
            ) from error
        except BaseException:
            # An answer that was not read would be taken for the next one's.
            self.close()
            raise
        fault, value = _opened(answer)
        if fault is not None:
            raise fault
        return value


def serve(descriptor: int, trainer: int) -> None:
    """Make the engine that comes first over the socket, then answer calls until the other end closes.

    Args:
        descriptor: of the socket.
        trainer: process at the other end; if it is killed, so is this one, in the middle of a step too.
    """
    # The socket alone would not tell: a process that the trainer forked may hold it open.
    end_with(trainer)
    connection = Connection(descriptor)
    engine = None
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
            engine, answer = _answer(engine, message)
            # What the message holds may be the sender's memory.
            del message
            connection.send_bytes(answer)
        except _GONE:
            return


def _answer(engine: Rollout | None, message: Any) -> tuple[Rollout | None, bytes]:
    try:
        if engine is None:
            return message(), pickle.dumps((None, None))
        name, args, keywords = message
        args = tuple(arg.tensors().items() if isinstance(arg, _Packed) else arg for arg in args)
        found = getattr(engine, name)
        return engine, pickle.dumps((None, found(*args, **keywords) if callable(found) else found))
    except Exception as fault:
        fault.add_note(f"In the rollout process:\n{traceback.format_exc()}")
        return engine, _pickled_fault(fault)


def _pickled_fault(fault: Exception) -> bytes:
    """Return the fault, and beside it what can be read where its class is unknown."""
    plain = RuntimeError(f"{type(fault).__name__}: {fault}")
    plain.__notes__ = fault.__notes__
    try:
        own = pickle.dumps(fault)
    except Exception:
        own = b""
    return pickle.dumps((_Fault(own, plain), None))


@dataclass(frozen=True)
class _Fault:
    own: bytes
    plain: RuntimeError


def _opened(answer: bytes) -> tuple[BaseException | None, Any]:
    fault, value = pickle.loads(answer)
    if fault is None:
        return None, value
    try:
        return pickle.loads(fault.own), None
    except Exception:
        return fault.plain, None


def _end(process: subprocess.Popen, ours: socket.socket, connection: Connection) -> None:
    # Closing alone would not end it: a process that the trainer forked may hold the socket open.
    with suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)
    ours.close()
    connection.close()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class _Packed:
    """Named tensors in one block of bytes, as they travel: how to open the block, and where each tensor lies."""

    open: Callable[..., Tensor]
    arguments: tuple
    places: tuple[tuple[str, torch.dtype, tuple[int, ...], int, int], ...]
    """(name, dtype, shape, first byte, bytes)."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return views of the block by name."""
        block = self.open(*self.arguments)
        return {
            name: block[start : start + size].view(dtype).view(shape)
            for name, dtype, shape, start, size in self.places
        }


@contextmanager
def _packed(named_tensors: Iterable[tuple[str, Tensor]], *, by_handle: bool) -> Iterator[_Packed]:
    """Hold tensors in one block of bytes while the receiver reads it."""
    tensors = list(named_tensors)
    places, size = [], 0
    for name, tensor in tensors:
        length = tensor.numel() * tensor.element_size()
        places.append((name, tensor.dtype, tuple(tensor.shape), size, length))
        size += -(-length // _ALIGNMENT) * _ALIGNMENT
    size = max(size, 1)
    if by_handle and tensors and all(tensor.is_cuda for _, tensor in tensors):
        block = torch.empty(size, dtype=torch.uint8, device=tensors[0][1].device)
        _fill(block, tensors, places)
        torch.cuda.synchronize(block.device)
        yield _Packed(*reduce_tensor(block), tuple(places))
        return
    file = os.memfd_create("weights")
    try:
        os.truncate(file, size)
        _fill(_mapped(f"/proc/self/fd/{file}", size), tensors, places)
        yield _Packed(_mapped, (f"/proc/{os.getpid()}/fd/{file}", size), tuple(places))
    finally:
        os.close(file)


def _fill(block: Tensor, tensors: Sequence[tuple[str, Tensor]], places: Sequence[tuple]) -> None:
    for (_, tensor), (*_, start, length) in zip(tensors, places, strict=True):
        block[start : start + length].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))


def _mapped(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
