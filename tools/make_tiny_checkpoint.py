# SPDX-License-Identifier: Apache-2.0
"""Write a tiny nemotron_h repository in ModelOpt's exact format.

Example: python tools/make_tiny_checkpoint.py runs/tiny --family lightning --chunk-size 16
"""

import argparse
import json
import sys

from vllm_forward_bridge.checkpoint import make_tiny_checkpoint, open_repository
from vllm_forward_bridge.checkpoint.tiny_config import FAMILIES

MISUSE = 2


def main(arguments: list[str] | None = None) -> int:
    """Make the repository, open it again with every check, and say what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder to create; must not exist")
    parser.add_argument("--family", choices=FAMILIES, default="lightning", help="released repository to imitate")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes")
    parser.add_argument(
        "--chunk-size", type=int, default=16, help="chunk of the scan in tokens; 128 for kernels on a GPU"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    try:
        make_tiny_checkpoint(args.folder, seed=args.seed, chunk_size=args.chunk_size, family=args.family)
        repository = open_repository(args.folder)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return MISUSE
    made = {
        "folder": args.folder,
        "tensors": len(repository.table),
        "shards": len(repository.headers),
        "bytes": sum(spec.num_bytes for spec in repository.table.values()),
    }
    print(
        json.dumps(made) if args.json else "{folder}: {tensors} tensors, {shards} shards, {bytes} bytes".format(**made)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
