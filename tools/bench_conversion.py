# SPDX-License-Identifier: Apache-2.0
"""Measure a conversion against a plain copy of the same bytes, on a repository of a released model's true tensors.

Makes a repository with random bytes, copies it, converts it to Megatron and back, compares, and removes everything it
made. Each step ends with its data on disk; peak memory is that of a process of its own.

Example: python tools/bench_conversion.py bench --model lightning_nvfp4 --without-masters
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from vllm_forward_bridge.checkpoint.released import RELEASED
from vllm_forward_bridge.checkpoint.repository import open_repository
from vllm_forward_bridge.checkpoint.synthetic import make_sparse_repository, make_synthetic_repository

MISUSE = 2
_CONVERT = Path(__file__).with_name("convert_checkpoint.py")
# A process counts what its parent held when it was forked, so a small one stands between.
_PEAK = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def main(arguments: list[str] | None = None) -> int:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="scratch folder to create; removed at the end")
    parser.add_argument("--model", choices=RELEASED, default="lightning_nvfp4")
    parser.add_argument("--layers", type=int, help="keep only the first layers")
    parser.add_argument("--without-masters", action="store_true", help="a quarter of the bytes for an NVFP4 repository")
    parser.add_argument(
        "--plan-only", action="store_true", help="a dry run on files without contents, for large models"
    )
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args(arguments)
    if args.folder.exists():
        print(f"{args.folder} exists; name a new folder, it is removed at the end", file=sys.stderr)
        return MISUSE
    args.folder.mkdir(parents=True)
    try:
        print(json.dumps(_measure(args), indent=2))
    finally:
        shutil.rmtree(args.folder)
    return 0


def _measure(args: argparse.Namespace) -> dict:
    source, megatron, back, copied = (args.folder / name for name in ("hf", "megatron", "back", "copy"))
    if args.plan_only:
        make_sparse_repository(source, args.model, args.layers)
        tensors, size = len(open_repository(source).table), _size(source)
        # 2: planned to the end, then refused because the disk is too small, which is no fault here.
        plan = _tool(["to-megatron", str(source), str(megatron), "--dry-run"], None, accepted=(0, 2))
        return {"model": args.model, "tensors": tensors, "source_bytes": size, "plan": plan}
    make_synthetic_repository(source, args.model, args.layers)
    tensors = len(open_repository(source).table)
    report = {"model": args.model, "layers": args.layers, "tensors": tensors, "source_bytes": _size(source)}
    report["copy"] = _run(["cp", "-r", str(source), str(copied)], copied, source)
    shutil.rmtree(copied)
    options = ["--workers", str(args.workers)]
    masters = ["--without-masters"] if args.without_masters else []
    report["to_megatron"] = _tool(["to-megatron", str(source), str(megatron), *masters, *options], megatron, source)
    report["verify"] = _tool(["verify", str(source), str(megatron), *options], None, source, megatron)
    # Two checkpoints at a time; the export is compared with the checkpoint, which was compared with the source.
    shutil.rmtree(source)
    report["to_hf"] = _tool(["to-hf", str(megatron), str(back), *options], back, megatron)
    report["verify_export"] = _tool(["verify", str(megatron), str(back), *options], None, megatron, back)
    for step in ("to_megatron", "to_hf"):
        report[step]["of_copy_speed"] = round(report[step]["mb_per_s"] / report["copy"]["mb_per_s"], 2)
    return report


def _tool(command: list[str], written: Path | None, *read: Path, accepted: tuple[int, ...] = (0,)) -> dict:
    return _run([sys.executable, str(_CONVERT), *command], written, *read, accepted=accepted)


def _run(command: list[str], written: Path | None, *read: Path, accepted: tuple[int, ...] = (0,)) -> dict:
    """Run a command on cold files until its result is on disk; return seconds, bytes a second, peak memory."""
    for folder in read:
        _settle(folder)
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _PEAK, *command], capture_output=True, text=True)
    if done.returncode not in accepted:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")
    if written:
        _settle(written)
    seconds = time.perf_counter() - started
    moved = _size(written) if written else sum(map(_size, read))
    return {
        "bytes": moved,
        "seconds": round(seconds, 1),
        "mb_per_s": round(moved / seconds / 1e6, 1),
        "peak_rss_gib": round(int(done.stdout) / 2**20, 2),
    }


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _settle(folder: Path) -> None:
    """Bring a folder's files to the disk and drop them from the page cache, so that reading them reads the disk."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
