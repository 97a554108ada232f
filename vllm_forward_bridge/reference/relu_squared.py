# SPDX-License-Identifier: Apache-2.0
"""Squared ReLU."""

import torch
from torch import Tensor


def relu_squared(x: Tensor) -> Tensor:
    """Return relu(x)^2."""
    return torch.relu(x) ** 2
