# SPDX-License-Identifier: Apache-2.0
"""Show runs to people: a table with a line a step, and a picture of difference, reward and entropy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

Record = Mapping[str, Any]

COLUMNS = (
    ("step", "step", "d"), ("tokens", "tokens", ",d"), ("mismatches", "differ", ",d"), ("max", "max", ".2g"),
    ("mean", "mean", ".2g"), ("std", "std", ".2g"), ("k3_kl", "k3 KL", ".2g"), ("reward", "reward", ".3f"),
    ("entropy", "entropy", ".3f"), ("tokens_per_s", "tok/s", ".0f"),
)  # fmt: skip

# One grey and two hues that keep a contrast of 3:1 or more on white and on GitHub's dark grey.
INK = "#7d8590"
HUES = ("#2f81f7", "#db6d28", "#2da44e", "#a371f7")


def step_table(title: str, records: Sequence[Record], *, every: int = 1) -> Table:
    """Lay out the records of one run, and their total in the last line.

    Args:
        title: name of the run.
        records: as a journal holds them.
        every: show each nth step; the first and the last always.
    """
    # Few lines and short numbers: the table has to fit a terminal of 80 columns.
    table = Table(title=title, show_footer=True, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    total = totals(records)
    for key, heading, form in COLUMNS:
        footer = "all" if key == "step" else _show(total.get(key), form)
        table.add_column(heading, footer, justify="right", no_wrap=True)
    for at, record in enumerate(records):
        if at % every == 0 or at == len(records) - 1:
            table.add_row(*(_show(record[key], form) for key, _, form in COLUMNS))
    return table


def totals(records: Sequence[Record]) -> dict[str, Any]:
    """Sum counts over steps, take the largest maximum, and weigh means by tokens."""
    tokens = sum(record["tokens"] for record in records)
    if not tokens:
        return {}
    means = ("mean", "k3_kl", "reward", "entropy")
    weighted = {key: sum(r[key] * r["tokens"] for r in records) / tokens for key in means}
    spread = sum((r["std"] ** 2 + r["mean"] ** 2) * r["tokens"] for r in records) / tokens - weighted["mean"] ** 2
    return {
        "tokens": tokens,
        "mismatches": sum(record["mismatches"] for record in records),
        "max": max(record["max"] for record in records),
        "std": max(spread, 0.0) ** 0.5,
        "tokens_per_s": tokens / sum(record["tokens"] / record["tokens_per_s"] for record in records),
        **weighted,
    }


def _show(value: Any, form: str) -> str:
    if value is None:
        return ""
    return "0" if value == 0 and form != "d" else format(value, form)


def plot_runs(runs: Mapping[str, Sequence[Record]], path: str | Path) -> None:
    """Draw difference, reward and entropy against steps, one line a run, into a PNG that suits light and dark pages.

    Args:
        runs: records by the name of the run, at most four.
        path: file to write.
    """
    figure = Figure(figsize=(7.2, 8.4), layout="constrained")
    figure.patch.set_alpha(0.0)
    difference, reward, entropy = figure.subplots(3, 1, sharex=True)
    for (name, records), hue in zip(runs.items(), HUES, strict=False):
        steps = [record["step"] for record in records]
        difference.plot(steps, [record["max"] for record in records], color=hue, lw=1.8, label=f"{name}, max")
        difference.plot(steps, [record["mean"] for record in records], color=hue, lw=1.0, ls=":", label=f"{name}, mean")
        reward.plot(steps, [record["reward"] for record in records], color=hue, lw=1.6, label=name)
        entropy.plot(steps, [record["entropy"] for record in records], color=hue, lw=1.6, label=name)
    # Zero has to be on the axis: it is the claim. The scale is linear below one fp32 step of a logprob near one.
    difference.set_yscale("symlog", linthresh=1e-7)
    difference.set_ylim(bottom=-2e-8)
    difference.set_ylabel("|trainer - rollout| logprob")
    reward.set_ylabel("mean reward")
    entropy.set_ylabel("entropy (nats)")
    entropy.set_xlabel("GRPO step")
    for axes in (difference, reward, entropy):
        _style(axes)
    figure.savefig(path, dpi=160, transparent=True)


def _style(axes: Any) -> None:
    axes.patch.set_alpha(0.0)
    axes.grid(color=INK, alpha=0.25, lw=0.6)
    axes.tick_params(colors=INK, which="both")
    for item in (axes.xaxis.label, axes.yaxis.label):
        item.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)
