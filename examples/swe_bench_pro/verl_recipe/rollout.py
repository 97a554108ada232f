# SPDX-License-Identifier: Apache-2.0
"""What verl adds to a vLLM worker, for a bridged one: weights are taken whole, with their checksum, or not at all.

verl's own extension loads bucket after bucket. An update that breaks off would leave a mixture, so the bridged worker
refuses it; here the buckets are collected and handed to the worker's one update.
"""

from typing import Any

from torch import Tensor
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from examples.swe_bench_pro.verl_recipe.announcement import take


class BridgedWorkerExtension(vLLMColocateWorkerExtension):
    """vLLM mixes this class into its worker; `engine_kwargs.vllm.worker_extension_cls` names it."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """Leave the model alone: no id lies behind the vocabulary, and masked logits would not be the trainer's.

        Raises:
            ValueError: verl asks for ids to be masked.
        """
        if banned_token_ids:
            raise ValueError(
                f"verl asks to mask {len(banned_token_ids)} token ids; the trainer scores with all of them: use a "
                "model without vision placeholders"
            )

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive a whole version and replace the present one by it.

        Raises:
            ValueError: adapters, or what arrived is not what was announced; nothing was changed.
        """
        if peft_config:
            raise ValueError("adapters are not part of the bridged forward; train whole weights")
        received: dict[str, Tensor] = {}

        def collect(bucket: list[tuple[str, Tensor]], is_last: bool) -> None:
            # Copies: the next bucket overwrites the buffer.
            received.update((name, tensor.clone()) for name, tensor in bucket)

        BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm).receive_weights(collect)
        digest = take(received)
        self.bridge_update(received, self.bridge_version() + 1, digest)
