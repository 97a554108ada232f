# SPDX-License-Identifier: Apache-2.0
"""Draw docs/architecture.svg: rollout and training forward side by side, the backward hanging below the latter.

Example: python tools/plot_architecture.py docs/architecture.svg
"""

import argparse
import sys
from html import escape
from pathlib import Path

# Op, what its forward keeps fixed on both sides, its backward in the trainer.
OPS = (
    ("norms", "one row a program; only bf16(x + residual) crosses a layer", "closed form, fp32 statistics"),
    ("FP8 linears (Mamba in, out)", "checkpoint scales, one kernel class for every M", "GEMMs on bf16 masters"),
    ("causal conv1d", "prefill, chunk and step are one arithmetic", "VJP over whole sequences"),
    ("SSD scan", "chunk grid from the sequence start; fp32 state at chunk ends only", "SSD VJP, per sequence"),
    ("attention", "keys as e4m3 codes; splits of a fixed number of tokens", "on dequantised K, V"),
    ("router", "one GEMM for all M; ties to the smaller id", "through the chosen weights"),
    ("NVFP4 experts", "one tactic, full K, no split", "GEMMs on bf16 masters"),
    ("combine", "fp32, in slot order", "slot by slot"),
    ("lm_head, logprob", "blocks of 1,024 columns, merged in order", "softmax, chunked over tokens"),
)

WIDTH, COLUMN, LEFT, RIGHT, TOP = 980, 400, 30, 550, 118
BOX, HANG, HANG_WIDTH, PITCH = 40, 21, 256, 71

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .head { font-weight: 600; font-size: 16px; } .op { font-weight: 600; } .small { font-size: 11.5px; fill: #59636e; }
  .box { fill: #ddf4ff; stroke: #0969da; } .back { fill: #fff1e5; stroke: #bc4c00; stroke-dasharray: 4 3; }
  .plain { fill: #f6f8fa; stroke: #818b98; } .line { stroke: #59636e; fill: none; }
  .same { fill: #1a7f37; font-weight: 600; }
  .tip { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .small { fill: #9198a1; } .box { fill: #0c2d6b; stroke: #4493f8; }
    .back { fill: #3d1300; stroke: #db6d28; } .plain { fill: #212830; stroke: #656c76; } .line { stroke: #9198a1; }
    .same { fill: #3fb950; } .tip { fill: #9198a1; }
  }
"""


def main(arguments: list[str] | None = None) -> int:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", default="docs/architecture.svg", help="file to write")
    args = parser.parse_args(arguments)
    Path(args.path).write_text(picture())
    return 0


def picture() -> str:
    """Return the SVG."""
    end = TOP + PITCH * len(OPS)
    height = end + 132
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Rollout and training forward call the same ops on the same bytes; the backward is ours.">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>',
        *_headings(),
    ]
    for at, op in enumerate(OPS):
        parts += _op(TOP + PITCH * at, *op)
    parts += _bytes_and_gate(end)
    return "\n".join([*parts, "</svg>\n"])


def _headings() -> list[str]:
    return [
        _text(LEFT + COLUMN / 2, 28, "rollout: vLLM, or the embedded engine", "head"),
        _text(LEFT + COLUMN / 2, 48, "prefill, chunks, decode, preemption; continuous batching", "small"),
        _text(RIGHT + COLUMN / 2, 28, "training: Megatron", "head"),
        _text(RIGHT + COLUMN / 2, 48, "packed sequences; DP, PP, EP, CP, TP; recompute", "small"),
        _box(LEFT, 64, COLUMN, 32, "plain"),
        _text(LEFT + COLUMN / 2, 84, "token ids → embedding"),
        _box(RIGHT, 64, COLUMN, 32, "plain"),
        _text(RIGHT + COLUMN / 2, 84, "the same token ids → embedding"),
        _arrow(LEFT + COLUMN, 80, RIGHT, 80),
        _text((LEFT + COLUMN + RIGHT) / 2, 73, "samples", "small"),
    ]


def _op(top: int, name: str, rule: str, backward: str) -> list[str]:
    middle = (LEFT + COLUMN + RIGHT) / 2
    parts = []
    for left in (LEFT, RIGHT):
        parts += [
            _box(left, top, COLUMN, BOX, "box"),
            _text(left + COLUMN / 2, top + 17, name, "op"),
            _text(left + COLUMN / 2, top + 33, rule, "small"),
        ]
    hang = RIGHT + COLUMN - HANG_WIDTH - 12
    return [
        *parts,
        _box(hang, top + BOX, HANG_WIDTH, HANG, "back"),
        _text(hang + HANG_WIDTH / 2, top + BOX + 15, f"backward: {backward}", "small"),
        f'<path class="line" d="M{LEFT + COLUMN} {top + BOX / 2}H{RIGHT}"/>',
        _text(middle, top + BOX / 2 - 5, "same op", "same"),
        _text(middle, top + BOX / 2 + 15, "same bits", "same"),
    ]


def _bytes_and_gate(top: int) -> list[str]:
    middle = (LEFT + COLUMN + RIGHT) / 2
    low = top + 78
    return [
        _box(LEFT, top, COLUMN, BOX, "plain"),
        _text(LEFT + COLUMN / 2, top + 25, "logprob of every sampled token"),
        _box(RIGHT, top, COLUMN, BOX, "plain"),
        _text(RIGHT + COLUMN / 2, top + 25, "logprob of the same tokens"),
        f'<path class="line" d="M{LEFT + COLUMN} {top + BOX / 2}H{RIGHT}"/>',
        _text(middle, top + BOX / 2 - 5, "gate", "same"),
        _text(middle, top + BOX / 2 + 15, "difference 0", "same"),
        _box(LEFT, low, COLUMN, BOX, "plain"),
        _text(LEFT + COLUMN / 2, low + 17, "deployment bytes: NVFP4, FP8", "op"),
        _text(LEFT + COLUMN / 2, low + 33, "every forward above reads these, on both sides", "small"),
        _box(RIGHT, low, COLUMN, BOX, "plain"),
        _text(RIGHT + COLUMN / 2, low + 17, "bf16 masters, Megatron's optimizer", "op"),
        _text(RIGHT + COLUMN / 2, low + 33, "every backward above ends here", "small"),
        _arrow(RIGHT, low + BOX / 2, LEFT + COLUMN, low + BOX / 2),
        _text(middle, low + BOX / 2 - 5, "requantise", "small"),
        _text(middle, low + BOX / 2 + 15, "once a step", "small"),
    ]


def _box(left: float, top: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="5"/>'


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="middle">{escape(words)}</text>'


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="line" marker-end="url(#tip)" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>'


if __name__ == "__main__":
    sys.exit(main())
