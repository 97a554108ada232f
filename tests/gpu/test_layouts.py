# SPDX-License-Identifier: Apache-2.0
"""Layouts of the trainer on two GPUs over NCCL: what tests/dist proves on two CPU processes, by the same tests."""

import pytest
import shapes
import torch
from test_megatron_layouts import (  # noqa: F401  (tests)
    run_two_ranks,
    test_a_checkpoint_moves_between_layouts,
    test_all_ranks_export_the_same_bytes_and_an_idle_step_changes_none,
    test_an_overlapped_parameter_gather_gives_the_same_bytes,
    test_context_parallelism_keeps_the_bits,
    test_expert_parallelism_keeps_the_bits,
    test_gradients_are_close_to_one_process,
    test_pipeline_parallelism_keeps_the_bits,
    test_tensor_parallelism_keeps_the_bits,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return what two processes saw, each on a GPU of its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there are {torch.cuda.device_count()}")
    return run_two_ranks(tmp_path_factory.mktemp("layouts"), "nccl", shapes.CHUNK)
