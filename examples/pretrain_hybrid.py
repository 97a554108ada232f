# SPDX-License-Identifier: Apache-2.0
"""Pretrain a hybrid model with plain Megatron calls; nothing here knows of the bridge.

    python -m megatron.vllm_forward examples/pretrain_hybrid.py --vllm-forward FILE.toml --mock-data ...

`docs/megatron.md` has a complete command.
"""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split


def datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple:
    """Return the train, validation and test sets that --data-path or --mock-data names."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, lambda: True, config).build()


datasets.is_distributed = True


def masked_loss(mask_BS: torch.Tensor, loss_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Return the sum over unmasked tokens, their count, and both for the log."""
    total, count = torch.sum(loss_BS * mask_BS), mask_BS.sum()
    return total, count.to(torch.int), {"lm loss": torch.stack((total.detach(), count.float()))}


def forward_step(data_iterator, model: torch.nn.Module) -> tuple[torch.Tensor, partial]:
    """Run one microbatch; every pipeline stage reads it, so that stages need no exchange of labels."""
    batch = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    # Padding has a label below zero; its loss is masked, but an id must be in the vocabulary.
    labels = batch["labels"].clamp(min=0)
    loss_BS = model(batch["tokens"], batch["position_ids"], None, labels=labels)
    return loss_BS, partial(masked_loss, batch["loss_mask"])


if __name__ == "__main__":
    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
