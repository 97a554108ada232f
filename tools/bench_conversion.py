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

import torch
from torch import Tensor

from vllm_forward_bridge.checkpoint.released import RELEASED, released_config
from vllm_forward_bridge.checkpoint.repository import SINGLE_FILE, even_shards, open_repository, write_repository
from vllm_forward_bridge.checkpoint.safetensors_file import TensorSpec
from vllm_forward_bridge.checkpoint.tensor_table import tensor_table
from vllm_forward_bridge.model_config import parse_model_config

MISUSE = 2
SHARDS = 52
_NOISE_BYTES = 1 << 25
_CONVERT = Path(__file__).with_name("convert_checkpoint.py")


def make_repository(folder: Path, model: str, layers: int | None) -> None:
    """Write a repository with a released model's names, dtypes and shapes; values are valid, otherwise random."""
    config, quant = released_config(model, layers)
    parsed = parse_model_config(config, quant and quant["quantization"])
    specs = [
        TensorSpec(e.name, e.dtypes[-1 if e.name.startswith("mtp.") else 0], e.shapes[0], SINGLE_FILE)
        for e in tensor_table(parsed)
    ]
    noise = torch.randint(0, 256, (_NOISE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    specs = even_shards(specs, SHARDS)
    table = {spec.name: spec for spec in specs}
    files = {"config.json": json.dumps(config)} | ({"hf_quant_config.json": json.dumps(quant)} if quant else {})
    write_repository(folder, files, specs, lambda name: _random_tensor(table[name], noise))


def _random_tensor(spec: TensorSpec, noise: Tensor) -> Tensor:
    start = len(spec.name) * 4096
    end = start + spec.num_bytes
    raw = (noise if end <= len(noise) else noise.repeat(-(-end // len(noise))))[start:end]
    if spec.dtype == torch.float8_e4m3fn:
        # Never a NaN; block scales are not negative.
        raw = raw & (0x77 if spec.name.endswith("weight_scale") else 0xF7)
    elif spec.dtype == torch.bfloat16:
        raw = raw & 0xBF
    elif spec.dtype == torch.float32 and spec.num_bytes == 4:
        return torch.full(spec.shape, 1e-4 * (1 + len(spec.name) / 100))
    elif spec.dtype == torch.float32:
        return torch.rand(spec.shape, generator=torch.Generator().manual_seed(start))
    return raw.contiguous().view(spec.dtype).reshape(spec.shape)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="scratch folder to create; removed at the end")
    parser.add_argument("--model", choices=RELEASED, default="lightning_nvfp4")
    parser.add_argument("--layers", type=int, help="keep only the first layers")
    parser.add_argument("--without-masters", action="store_true", help="a quarter of the bytes for an NVFP4 repository")
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
    make_repository(source, args.model, args.layers)
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


def _tool(command: list[str], written: Path | None, *read: Path) -> dict:
    return _run([sys.executable, str(_CONVERT), *command], written, *read)


def _run(command: list[str], written: Path | None, *read: Path) -> dict:
    """Run a command on cold files until its result is on disk; return seconds, bytes a second, peak memory."""
    for folder in read:
        _settle(folder)
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    errors = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"{' '.join(command)} failed: {errors}")
    if written:
        _settle(written)
    seconds = time.perf_counter() - started
    moved = _size(written) if written else sum(map(_size, read))
    return {
        "bytes": moved,
        "seconds": round(seconds, 1),
        "mb_per_s": round(moved / seconds / 1e6, 1),
        "peak_rss_gib": round(usage.ru_maxrss / 2**20, 2),
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
