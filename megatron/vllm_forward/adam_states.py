# SPDX-License-Identifier: Apache-2.0
"""Torch's Adam under Megatron's distributed optimizer: what Megatron needs where neither Apex nor TE is installed."""

from collections.abc import Iterator

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def start(optimizer: MegatronOptimizer) -> None:
    """Allocate the states that Adam would allocate in its first step.

    Megatron looks for the step count in them when it saves or loads, also before that step.
    """
    for adam in _adams(optimizer):
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            state = adam.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def restore_counts(optimizer: MegatronOptimizer) -> None:
    """Set every step count to the one that a load has left in the parameter groups.

    Megatron's load first shares one count among all parameters and then overwrites it with that of the empty state.
    """
    for adam in _adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                adam.state[parameter]["step"] = torch.tensor(float(group["step"]), dtype=torch.float32)


def _adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Adam]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam):
            yield part.optimizer
