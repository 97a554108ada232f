# SPDX-License-Identifier: Apache-2.0
"""Decay rate of each Mamba-2 head, in plain torch."""

import torch
from torch import Tensor


def ssd_decay(A_log_h: Tensor) -> Tensor:
    """Return A = -exp(A_log), in the dtype of `A_log`."""
    return -torch.exp(A_log_h)
