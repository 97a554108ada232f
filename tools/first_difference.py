# SPDX-License-Identifier: Apache-2.0
"""Name the first layer and op at which two recordings differ.

Example: python tools/first_difference.py trainer.safetensors rollout.safetensors
Recordings are written by vllm_forward_bridge.parity.recorder.OpRecorder. A point that only one recording has, such as a
scan that replays rows on one side, is reported and not compared. Exit status: 0 same bits, 1 different, 2 misuse.
"""

import argparse
import json
import sys
from dataclasses import asdict

from vllm_forward_bridge.parity.recorder import PointDifference, compare_recordings


def main() -> int:
    """Compare and report; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("left", help="recording whose order of ops is followed")
    parser.add_argument("right", help="recording to compare with")
    parser.add_argument("--all", action="store_true", help="list every point, not only the first that differs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    try:
        points, lonely = compare_recordings(arguments.left, arguments.right)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    differing = [point for point in points if point.differing_rows]
    if arguments.json:
        first = asdict(differing[0]) if differing else None
        print(json.dumps({"first": first, "points": [asdict(point) for point in points], "one_side_only": lonely}))
    else:
        for point in points if arguments.all else differing[:1]:
            print(_line(point))
        if lonely:
            print(f"{len(lonely)} points are in one recording only, the first: {lonely[0]}")
        print(f"{len(differing)} of {len(points)} points differ" if differing else f"same bits at {len(points)} points")
    return 1 if differing else 0


def _line(point: PointDifference) -> str:
    layer, op, place = point.name.split(".", 2)
    where = f"layer {layer}, {op}, call {place}"
    if point.first is None:
        return f"{where}: same bits in {point.common_rows} rows"
    return (
        f"{where}: {point.differing_rows} of {point.common_rows} rows and {point.differing_elements} of "
        f"{point.elements} elements differ, by {point.largest:.3e} at most; first at sample {point.first[0]}, "
        f"position {point.first[1]}"
    )


if __name__ == "__main__":
    sys.exit(main())
