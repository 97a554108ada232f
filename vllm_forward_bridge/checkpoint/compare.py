# SPDX-License-Identifier: Apache-2.0
"""Compare two checkpoints tensor by tensor: bytes first, then what the differing bytes mean."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vllm_forward_bridge.checkpoint.megatron_checkpoint import MegatronCheckpoint
from vllm_forward_bridge.checkpoint.repository import Repository, open_repository
from vllm_forward_bridge.checkpoint.safetensors_file import TensorSpec, byte_view
from vllm_forward_bridge.checkpoint.to_megatron import build_block
from vllm_forward_bridge.checkpoint.transfer import Progress
from vllm_forward_bridge.quantization.nvfp4 import code_values, unpack_codes

Source = Repository | MegatronCheckpoint


@dataclass(frozen=True)
class Difference:
    """One tensor or file that is not the same on both sides."""

    name: str
    kind: str
    """`missing` on the right, `unexpected` there, `dtype`, `shape`, `bytes`, `file` or `master`."""
    text: str


@dataclass(frozen=True)
class Comparison:
    """What was compared and what differs."""

    tensors: int
    num_bytes: int
    differences: list[Difference] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Tell whether nothing differs."""
        return not self.differences

    def text(self, shown: int) -> str:
        """Say it to people, with the first `shown` differences."""
        lines = [f"{'same' if self.same else 'different'}: {self.tensors} tensors, {self.num_bytes} bytes compared"]
        lines += [f"  {d.kind}: {d.name}: {d.text}" for d in self.differences[:shown]]
        if len(self.differences) > shown:
            lines.append(f"  and {len(self.differences) - shown} more; --json lists all")
        return "\n".join(lines)


def open_source(path: str | Path, base: str | Path | None = None) -> Source:
    """Open a Hugging Face repository or a Megatron checkpoint, whichever the folder holds."""
    if (Path(path) / "config.json").exists():
        return open_repository(path)
    return MegatronCheckpoint(path, base)


def compare(left: Source, right: Source, *, workers: int = 2, on_progress: Progress | None = None) -> Comparison:
    """Compare names, dtypes, shapes, bytes and the other files.

    Args:
        left: what is expected.
        right: what is checked.
        workers: tensors compared at a time.
        on_progress: called as bytes are compared.
    """
    differences = [
        Difference(name, kind, f"{side.table[name].text} is only on the {where}")
        for kind, where, side, other in (("missing", "left", left, right), ("unexpected", "right", right, left))
        for name in side.table
        if name not in other.table
    ]
    common = [name for name in left.table if name in right.table]
    total = sum(left.table[name].num_bytes for name in common)

    def one(name: str) -> Difference | None:
        difference = _tensor_difference(name, left, right)
        if on_progress:
            on_progress(left.table[name].num_bytes, total)
        return difference

    with ThreadPoolExecutor(workers) as pool:
        differences += [found for found in pool.map(one, common) if found]
    differences += _file_differences(left, right)
    return Comparison(len(common), total, differences)


def changed_masters(checkpoint: MegatronCheckpoint, original: Repository) -> Iterator[Difference]:
    """Yield each weight whose bf16 master is no longer the value of the original's bytes: what training changed."""
    changed: dict[str, list[int]] = {}
    for name, chunk in checkpoint.masters():
        stored = checkpoint.read_block(chunk)
        if stored is not None:
            count = int((stored.view(torch.int16) != build_block(original, chunk).view(torch.int16)).sum())
            total = changed.setdefault(name, [0, 0])
            total[0], total[1] = total[0] + count, total[1] + stored.numel()
    for name, (count, total) in changed.items():
        if count:
            yield Difference(
                name, "master", f"{count} of {total} elements of the bf16 master are not the original's value"
            )


def _tensor_difference(name: str, left: Source, right: Source) -> Difference | None:
    want, got = left.table[name], right.table[name]
    if want.dtype != got.dtype:
        return Difference(name, "dtype", f"{want.text} on the left, {got.text} on the right")
    if want.shape != got.shape:
        same = want.num_bytes == got.num_bytes and _same_bytes(left, right, name)
        note = (
            "with equal bytes: the rank of a scalar differs by exporter, keep the source's"
            if same
            else "with other bytes"
        )
        return Difference(name, "shape", f"{want.text} on the left, {got.text} on the right, {note}")
    if _same_bytes(left, right, name):
        return None
    return Difference(name, "bytes", _meaning(want, left.fetch(name), right.fetch(name)))


def _same_bytes(left: Source, right: Source, name: str) -> bool:
    return all(torch.equal(a, b) for a, b in _aligned(left.blocks(name), right.blocks(name)))


def _aligned(left: Iterator[Tensor], right: Iterator[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut two streams of blocks with equal totals into pairs of equal length."""
    a = b = torch.empty(0, dtype=torch.uint8)
    while True:
        a, b = (
            byte_view(next(left, a[:0])) if not a.numel() else a,
            byte_view(next(right, b[:0])) if not b.numel() else b,
        )
        count = min(a.numel(), b.numel())
        if not count:
            return
        yield a[:count], b[:count]
        a, b = a[count:], b[count:]


def _meaning(spec: TensorSpec, want: Tensor, got: Tensor) -> str:
    """Say how many elements differ, by how much, and which known fault it looks like."""
    if spec.dtype == torch.uint8:
        if torch.equal(got, (want << 4) | (want >> 4)):
            return "every byte has its two codes swapped; the low nibble is the first of the two elements"
        want, got = (unpack_codes(t).int() for t in (want, got))
        differs, table = want != got, code_values(want.device)
        want_value, got_value = table[want], table[got]
    else:
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[spec.dtype.itemsize]
        differs = want.view(integer) != got.view(integer)
        want_value, got_value = want.float(), got.float()
    gap = torch.where(differs, (want_value - got_value).abs(), 0.0)
    count, total = int(differs.sum()), differs.numel()
    if not bool(gap.nan_to_num(1.0).any()):
        return f"{count} of {total} elements differ in the sign of zero only"
    at = int(gap.nan_to_num(torch.inf).argmax())
    one, other = (value.reshape(-1)[at].item() for value in (want_value, got_value))
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), gap.shape)]
    return f"{count} of {total} elements differ, most at {place}: {one!r} on the left, {other!r} on the right"


def _file_differences(left: Source, right: Source) -> list[Difference]:
    files = {path: None for side in (left, right) for path in side.other_files()}
    differences = []
    for path in files:
        contents = [(s.files_folder / path) for s in (left, right)]
        if not all(content.exists() for content in contents):
            where = "left" if contents[0].exists() else "right"
            differences.append(Difference(str(path), "file", f"is only on the {where}"))
        elif contents[0].read_bytes() != contents[1].read_bytes():
            differences.append(Difference(str(path), "file", "has other contents"))
    return differences
