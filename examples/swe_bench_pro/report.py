# SPDX-License-Identifier: Apache-2.0
"""Draw a run: how episodes ended, how long they were, where the time went, and the difference of the gate.

Example: python -m examples.swe_bench_pro.report runs/swe/journal.jsonl --out runs/swe/report.png
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron.vllm_forward.rl.journal import read_journal
from megatron.vllm_forward.rl.report import HUES, INK

MISUSE = 2
PHASES = ("rollout", "gate", "train", "update", "weights")
ALIKE = {
    "resolved": ("resolved",),
    "wrong or no patch": ("unresolved", "no_patch", "patch_rejected", "forged"),
    "limit or format": ("format", "agent_timeout", "steps", "context"),
    "infrastructure": ("sandbox_error", "grade_timeout", "grade_error", "oom"),
}


def main(arguments: list[str] | None = None) -> int:
    """Draw the picture and say where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", type=Path)
    parser.add_argument("--out", type=Path, help="PNG; beside the journal by default")
    args = parser.parse_args(arguments)
    records = read_journal(args.journal)
    if not records:
        print(f"{args.journal} has no steps", file=sys.stderr)
        return MISUSE
    path = args.out or args.journal.with_suffix(".png")
    plot(records, path)
    print(path)
    return 0


def plot(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw four panels against steps into a PNG that suits light and dark pages."""
    figure = Figure(figsize=(8.4, 9.6), layout="constrained")
    figure.patch.set_alpha(0.0)
    steps = [record["step"] for record in records]
    outcomes, lengths, times, difference = figure.subplots(4, 1, sharex=True)
    shares = {
        name: [sum(r[f"outcome_{o}"] for o in group) / r["episodes"] for r in records] for name, group in ALIKE.items()
    }
    bottom = [0.0] * len(steps)
    for (name, values), hue in zip(shares.items(), HUES, strict=True):
        outcomes.bar(steps, values, bottom=bottom, color=hue, label=name, width=0.8)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    outcomes.set_ylabel("share of episodes")
    lengths.plot(steps, [r["episode_tokens_mean"] for r in records], color=HUES[0], label="mean tokens")
    lengths.plot(steps, [r["episode_tokens_max"] for r in records], color=HUES[0], ls=":", label="longest")
    turns = lengths.twinx()
    turns.plot(steps, [r["turns_mean"] for r in records], color=HUES[1], label="mean turns")
    lengths.set_ylabel("tokens")
    turns.set_ylabel("turns", color=HUES[1])
    turns.tick_params(colors=HUES[1])
    turns.spines[:].set_visible(False)
    for phase, hue in zip(PHASES, (*HUES, INK), strict=True):
        times.plot(steps, [r.get(f"seconds_{phase}", 0.0) for r in records], color=hue, label=phase, marker=".")
    times.set_ylabel("seconds")
    difference.plot(steps, [r["max"] for r in records], color=HUES[2], marker=".", label="largest logprob difference")
    difference.set_ylabel("difference")
    difference.set_xlabel("step")
    for panel in (outcomes, lengths, times, difference):
        _plain(panel)
    figure.savefig(path, dpi=120)


def _plain(panel) -> None:
    panel.set_facecolor("none")
    panel.tick_params(colors=INK)
    panel.xaxis.label.set_color(INK)
    panel.yaxis.label.set_color(INK)
    for spine in panel.spines.values():
        spine.set_color(INK)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.legend(frameon=False, labelcolor=INK, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=5)


if __name__ == "__main__":
    sys.exit(main())
