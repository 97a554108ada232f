# SPDX-License-Identifier: Apache-2.0
import filecmp
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from vllm_forward_bridge.checkpoint import convert_to_hf, convert_to_megatron, make_tiny_checkpoint, transfer
from vllm_forward_bridge.checkpoint.repository import Repository, partial_folder
from vllm_forward_bridge.checkpoint.torch_dist_reader import TorchDistReader

CONVERT = {"to-megatron": convert_to_megatron, "to-hf": convert_to_hf}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("resume")
    make_tiny_checkpoint(path / "hf")
    convert_to_megatron(path / "hf", path / "megatron")
    convert_to_hf(path / "megatron", path / "back")
    return path


def files(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def killed(direction, source, target, finished):
    """Start a conversion and kill it when it has finished some units; return the names of those."""
    program = Path(__file__).parent / "convert_worker.py"
    worker = subprocess.Popen([sys.executable, str(program), direction, str(source), str(target), "0.03"])
    records, deadline = partial_folder(target) / "records", time.monotonic() + 300
    while len(list(records.glob("*.json"))) < finished and time.monotonic() < deadline:
        assert worker.poll() is None, "the conversion ended before it could be killed"
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert not target.exists()
    return {path.stem for path in records.glob("*.json")}


@pytest.mark.parametrize(
    ("direction", "source", "result"), [("to-megatron", "hf", "megatron"), ("to-hf", "megatron", "back")]
)
def test_killed_conversion_goes_on_without_reading_finished_units(
    folder, tmp_path, monkeypatch, direction, source, result
):
    target = tmp_path / "target"
    finished = killed(direction, folder / source, target, 3)
    assert len(finished) >= 3
    calls = [(Repository, "fetch_bytes"), (TorchDistReader, "read"), (TorchDistReader, "place")]
    calls = [(owner, method, getattr(owner, method)) for owner, method in calls]

    def note_in(seen):
        for owner, method, call in calls:
            noting = lambda s, name, *a, call=call: seen.append(name) or call(s, name, *a)  # noqa: E731
            monkeypatch.setattr(owner, method, noting)

    read, whole = [], []
    note_in(read)
    done = CONVERT[direction](folder / source, target)
    assert done.reused_bytes > 0
    assert not partial_folder(target).exists()
    note_in(whole)
    assert CONVERT[direction](folder / source, tmp_path / "fresh").reused_bytes == 0
    assert len(read) < len(whole) - 20
    got, want = files(target), files(tmp_path / "fresh")
    assert got == want
    assert {k: v for k, v in want.items()} == files(folder / result)


def test_interrupted_conversion_of_another_source_is_refused(folder, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(folder / "hf", source)
    killed("to-megatron", source, tmp_path / "target", 1)
    shard = source / "model-00001-of-00007.safetensors"
    os.utime(shard, ns=(1, 1))
    with pytest.raises(ValueError, match=r"target.partial holds parts of another conversion.*remove that folder"):
        convert_to_megatron(source, tmp_path / "target")
    with pytest.raises(ValueError, match="holds parts of another conversion"):
        convert_to_megatron(folder / "hf", tmp_path / "target", dry_run=True)
    shutil.rmtree(partial_folder(tmp_path / "target"))
    assert convert_to_megatron(source, tmp_path / "target").reused_bytes == 0


def test_conversion_killed_before_its_first_file_starts_fresh(folder, tmp_path):
    """Killed while it makes its folders, a conversion has nothing yet that another could take up."""
    place = partial_folder(tmp_path / "target")
    (place / "records").mkdir(parents=True)
    (place / "conversion.json.partial").write_text("{")
    assert convert_to_megatron(folder / "hf", tmp_path / "target", dry_run=True).reused_bytes == 0
    assert convert_to_megatron(folder / "hf", tmp_path / "target").reused_bytes == 0
    assert files(tmp_path / "target") == files(folder / "megatron")


def test_folder_with_files_of_others_is_refused(folder, tmp_path):
    place = partial_folder(tmp_path / "target")
    place.mkdir()
    (place / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="holds parts of another conversion"):
        convert_to_megatron(folder / "hf", tmp_path / "target")
    assert (place / "thesis.tex").exists()


@pytest.mark.parametrize("direction", CONVERT)
def test_conversion_killed_around_its_last_rename(folder, tmp_path, monkeypatch, direction):
    source, target = folder / ("hf" if direction == "to-megatron" else "megatron"), tmp_path / "target"
    finish = transfer.finish_folder

    def before(partial, path):
        raise KeyboardInterrupt

    def after(partial, path):
        finish(partial, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(transfer, "finish_folder", before)
    with pytest.raises(KeyboardInterrupt):
        CONVERT[direction](source, target)
    assert not target.exists()
    monkeypatch.setattr(transfer, "finish_folder", after)
    with pytest.raises(KeyboardInterrupt):
        CONVERT[direction](source, target)
    whole = files(target)
    assert whole == files(folder / ("megatron" if direction == "to-megatron" else "back"))
    # What is left beside a finished target belongs to nothing: a new conversion starts from the source.
    shutil.rmtree(target)
    monkeypatch.setattr(transfer, "finish_folder", finish)
    assert CONVERT[direction](source, target).reused_bytes == 0
    assert files(target) == whole
    assert not partial_folder(target).exists()


def test_failed_conversion_leaves_no_target_and_stops_every_worker(folder, tmp_path, monkeypatch):
    fetch, calls = Repository.fetch_bytes, []

    def broken(self, name, *arguments):
        calls.append(name)
        if name == "backbone.layers.1.mixer.experts.0.up_proj.weight":
            raise OSError("the disk went away")
        return fetch(self, name, *arguments)

    monkeypatch.setattr(Repository, "fetch_bytes", broken)
    with pytest.raises(OSError, match="the disk went away"):
        convert_to_megatron(folder / "hf", tmp_path / "target", workers=2)
    assert not (tmp_path / "target").exists()
    stopped = len(calls)
    time.sleep(0.2)
    assert len(calls) == stopped < 500


@pytest.mark.parametrize("direction", CONVERT)
def test_disk_that_is_too_small_is_refused_before_writing(folder, tmp_path, monkeypatch, direction):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    source = folder / ("hf" if direction == "to-megatron" else "megatron")
    for dry_run in (True, False):
        with pytest.raises(OSError, match=r"0\.0\d GB are needed, .* has 0\.00 GB free; nothing was written"):
            CONVERT[direction](source, tmp_path / "target", dry_run=dry_run)
    assert list(tmp_path.iterdir()) == []


def test_workers_do_not_change_a_byte(folder, tmp_path):
    for workers in (1, 4):
        convert_to_megatron(folder / "hf", tmp_path / str(workers), workers=workers)
    names = list(files(tmp_path / "1"))
    assert filecmp.cmpfiles(tmp_path / "1", tmp_path / "4", names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("direction", CONVERT)
def test_progress_counts_every_byte_once(folder, tmp_path, direction):
    counted, totals = [], set()
    source = folder / ("hf" if direction == "to-megatron" else "megatron")
    done = CONVERT[direction](
        source, tmp_path / "target", on_progress=lambda n, total: (counted.append(n), totals.add(total))
    )
    assert sum(counted) == done.num_bytes
    assert totals == {done.num_bytes}
