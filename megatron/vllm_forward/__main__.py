# SPDX-License-Identifier: Apache-2.0
"""Run a Megatron script on the rollout's forward.

python -m megatron.vllm_forward SCRIPT [its arguments] --vllm-forward FILE.toml
"""

import os
import runpy
import socket
import sys
from pathlib import Path

from megatron.vllm_forward.arguments import given_file
from megatron.vllm_forward.launch import session
from megatron.vllm_forward.orphans import end_with_parent
from megatron.vllm_forward.patches import Patch, applied
from vllm_forward_bridge.config import load


def main(argv: list[str]) -> None:
    """Run the script with its own arguments, unmodified, as if python had been given its path.

    Raises:
        SystemExit: no script or no `--vllm-forward` was given, or that file cannot be used.
    """
    path = given_file(argv[1:])
    if not argv or argv[0].startswith("-") or path is None:
        raise SystemExit(
            f"given: {' '.join(argv) or 'nothing'}\n"
            "needed: python -m megatron.vllm_forward SCRIPT [the script's arguments] --vllm-forward FILE.toml\n"
            "(with several processes: torchrun ... -m megatron.vllm_forward SCRIPT ...)"
        )
    try:
        load(path)
    except ValueError as error:
        # Read again where Megatron parses; here a mistake in the file is told without a traceback.
        raise SystemExit(f"--vllm-forward {error}") from error
    _be_one_process_without_torchrun()
    script = argv[0]
    # Python puts the script's folder first, so that it finds its neighbours.
    sys.path.insert(0, str(Path(script).resolve().parent))
    with applied([Patch("sys", "argv", lambda found: argv)]), session():
        runpy.run_path(script, run_name="__main__")


def _be_one_process_without_torchrun() -> None:
    """Give torch.distributed the rendezvous that torchrun would give; what is set already stays."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {name: value for name, value in alone.items() if name not in os.environ}


end_with_parent(__name__)

# The guard matters: Megatron's checkpoint writer starts a process that imports this file again.
if __name__ == "__main__":
    main(sys.argv[1:])
