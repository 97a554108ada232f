# SPDX-License-Identifier: Apache-2.0
"""Convert a Megatron checkpoint into a Hugging Face / ModelOpt repository: its bytes, never a second derivation."""

import shutil
from functools import partial
from pathlib import Path

from vllm_forward_bridge.checkpoint.megatron_checkpoint import MegatronCheckpoint
from vllm_forward_bridge.checkpoint.safetensors_file import TensorSpec, write_file
from vllm_forward_bridge.checkpoint.transfer import (
    Conversion,
    Progress,
    Ticker,
    Unit,
    Workplace,
    check_space,
    run_units,
)


def convert_to_hf(
    source: str | Path,
    target: str | Path,
    *,
    base: str | Path | None = None,
    workers: int = 2,
    dry_run: bool = False,
    on_progress: Progress | None = None,
) -> Conversion:
    """Write a repository whose names, dtypes, shapes, shards and other files are those of the original one.

    An interrupted run goes on where it was when it is called again.

    Args:
        source: root of the Megatron checkpoint, or one of its iteration folders.
        target: folder to create.
        base: the checkpoint that the run started from, if `source` has no `hf` folder or no carried tensors of its own.
        workers: files written at a time.
        dry_run: check everything, write nothing.
        on_progress: called as bytes are written.

    Raises:
        ValueError: lists every tensor that is missing or has another dtype or shape.
        FileExistsError: `target` exists.
        OSError: the disk is too small.
    """
    target = Path(target)
    checkpoint = MegatronCheckpoint(source, base)
    shards: dict[str, list[TensorSpec]] = {shard: [] for shard in checkpoint.headers}
    for spec in checkpoint.table.values():
        shards[spec.shard].append(spec)
    total = sum(spec.num_bytes for spec in checkpoint.table.values())
    workplace = Workplace(target, checkpoint.identity())
    if dry_run:
        workplace.finished()
        check_space(target, total)
        return Conversion(len(checkpoint.table), total)
    work = [
        Unit(shard, sum(spec.num_bytes for spec in specs), partial(_write, checkpoint, workplace.folder, shard, specs))
        for shard, specs in shards.items()
    ]
    _, reused = run_units(workplace, work, workers=workers, on_progress=on_progress)
    for path in checkpoint.other_files():
        place = workplace.folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.files_folder / path, place)
    workplace.finish()
    return Conversion(len(checkpoint.table), total, reused)


def _write(checkpoint: MegatronCheckpoint, folder: Path, shard: str, specs: list[TensorSpec], ticker: Ticker) -> None:
    unfinished = folder / f"{shard}.partial"
    write_file(unfinished, checkpoint.headers[shard], specs, checkpoint.pieces, ticker.advance)
    unfinished.rename(folder / shard)
