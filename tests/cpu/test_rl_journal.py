# SPDX-License-Identifier: Apache-2.0
"""The journal survives a crash and a resume; table and picture come from its records."""

import io
import math
import subprocess
import sys

import pytest
from rich.console import Console

from megatron.vllm_forward.rl.journal import Journal, read_journal
from megatron.vllm_forward.rl.report import plot_runs, step_table, totals


def record(step, **changes):
    values = {
        "step": step, "tokens": 100, "mismatches": 0, "max": 0.0, "mean": 0.0, "std": 0.0, "k3_kl": 0.0,
        "reward": 0.1 * step, "entropy": 3.0, "tokens_per_s": 50.0,
    }  # fmt: skip
    return {**values, **changes}


def text_of(table):
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()


def test_journal_appends_and_reads_back(tmp_path):
    journal = Journal(tmp_path / "deep" / "journal.jsonl")
    for step in (1, 2):
        journal.append(record(step))
    assert read_journal(journal.path) == [record(1), record(2)]


def test_journal_drops_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for step in (1, 2, 3):
            journal.append(record(step))
    with path.open("a") as out:
        out.write('{"step": 4, "tok')  # a crash in the middle of a line
    assert [r["step"] for r in read_journal(path)] == [1, 2, 3]
    resumed = Journal(path, resume_after=2)
    resumed.append(record(3, tokens=7))
    assert [(r["step"], r["tokens"]) for r in read_journal(path)] == [(1, 100), (2, 100), (3, 7)]


def test_journal_rejects_a_checkpoint_of_another_run(tmp_path):
    Journal(tmp_path / "journal.jsonl").append(record(1))
    with pytest.raises(ValueError, match="holds 1 steps up to 5, the checkpoint is at step 5"):
        Journal(tmp_path / "journal.jsonl", resume_after=5)


def test_journal_is_refused_while_another_process_writes_it(tmp_path):
    path = tmp_path / "journal.jsonl"
    hold = f"from {Journal.__module__} import Journal; held = Journal({str(path)!r}); print('held', flush=True)"
    command = [sys.executable, "-c", f"{hold}; input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        path.write_text('{"step": 1}\n')
        with pytest.raises(RuntimeError, match=f"written by process {holder.pid}, which holds .*journal.jsonl.lock"):
            Journal(path)
        assert read_journal(path) == [{"step": 1}]  # the refusal has not touched it
        holder.kill()
    Journal(path, resume_after=1).append(record(2))
    assert [r["step"] for r in read_journal(path)] == [1, 2]


def test_refused_journal_lets_go_of_its_lock(tmp_path):
    path = tmp_path / "journal.jsonl"
    with pytest.raises(ValueError, match="checkpoint") as kept:
        Journal(path, resume_after=5)
    assert kept.value.__traceback__ is not None  # its frames still hold the object
    Journal(path).append(record(1))


def test_journal_rejects_numbers_that_json_cannot_hold(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(ValueError, match="step 1: max not finite"):
        journal.append(record(1, max=math.inf))
    assert read_journal(journal.path) == []


def test_journal_names_a_damaged_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_journal(path)


def test_totals_weigh_steps_by_their_tokens():
    records = [
        record(1, tokens=100, max=0.5, mean=0.1, std=0.0, mismatches=3),
        record(2, tokens=300, max=0.2, mean=0.3, std=0.0, mismatches=4, tokens_per_s=300.0),
    ]
    got = totals(records)
    assert (got["tokens"], got["mismatches"], got["max"]) == (400, 7, 0.5)
    assert got["mean"] == pytest.approx(0.25, rel=1e-12)
    assert got["tokens_per_s"] == pytest.approx(400 / 3.0, rel=1e-12)
    assert totals([]) == {}


def test_table_prints_zero_only_for_zero():
    text = text_of(step_table("bridged", [record(1), record(2, max=1e-30, mismatches=1)]))
    first, second = (line for line in text.splitlines() if line.split()[:1] in (["1"], ["2"]))
    assert "e-" not in first
    assert " 1e-30 " in second


def test_table_fits_a_terminal():
    wide = {"max": 1.25e-5, "mean": 1.25e-5, "std": 1.25e-5, "k3_kl": 1.25e-5}
    text = text_of(step_table("baseline", [record(step, tokens=1024, mismatches=1024, **wide) for step in (99, 100)]))
    assert "…" not in text
    assert " 1.3e-05 " in text


def test_table_always_shows_the_last_step():
    text = text_of(step_table("run", [record(step) for step in range(1, 8)], every=5))
    shown = [line.split()[0] for line in text.splitlines() if len(line.split()) > 5]
    assert shown == ["step", "1", "6", "7", "all"]


def test_plot_is_a_transparent_png(tmp_path):
    baseline = [record(1, max=0.1), record(2, max=0.2)]
    plot_runs({"bridged": [record(1), record(2)], "baseline": baseline}, tmp_path / "p.png")
    content = (tmp_path / "p.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[25] == 6  # colour type: RGB with alpha, so that the page's own background shows
