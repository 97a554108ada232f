# SPDX-License-Identifier: Apache-2.0
"""Let helper processes end when their trainer is killed, and a trainer when the program that started it is.

Megatron's checkpoint writer starts a process that serves a queue. Nothing tells that process that its trainer is gone
after `kill -9`: it would stay, with all that it imported, and a restarted run would start another. Imports no torch.
"""

import os

from vllm_forward_bridge.parent import end_with

STARTER = "MEGATRON_FORWARD_STARTER"
"""A program that starts a trainer puts its own process id there if the trainer shall not outlive it."""
_TRAINER = "MEGATRON_FORWARD_TRAINER"


def end_with_parent(module_name: str) -> None:
    """Call it in a main module with its `__name__`: each process then watches the one it must not outlive.

    Args:
        module_name: `__main__` in the trainer; `__mp_main__` in a process that multiprocessing spawned, which imports
            the main module under that name.
    """
    if module_name == "__main__":
        os.environ[_TRAINER] = str(os.getpid())
        if STARTER in os.environ:
            end_with(int(os.environ.pop(STARTER)))  # the trainer's own children have another parent
    elif module_name == "__mp_main__" and _TRAINER in os.environ:
        end_with(int(os.environ[_TRAINER]))
