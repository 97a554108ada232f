# SPDX-License-Identifier: Apache-2.0
"""Megatron's HybridModel with our final norm, output layer and chunked logprob: never all logits unless asked for.

The built model is called as Megatron calls any model; tokens are `[b, s]`, or `[1, T]` with thd `packed_seq_params`:

    loss_BS = model(tokens, position_ids, None, labels=next_tokens)            -logprob, fp32, temperature 1
    loss_BS = model(tokens, position_ids, None, labels=next_tokens, packed_seq_params=packed,
                    sampling=Sampling(temperature_BS, top_p_BS, top_k_BS))     -logprob as the rollout defines it
    loss_BS, entropy_BS = model(..., labels=next_tokens, with_entropy=True)    entropy carries no gradient
    logits_BSV = model(tokens, position_ids, None)                             all logits, bf16 (Float16Module: fp32)
    model(..., expert_ids=ids_BSLk)                                            baseline only: router replay (R3)

A logprob is exactly `-loss`: negation does not round. `next_tokens` of the last token of a sequence may be any id.
Calls give the same bits for a token under grad and no_grad, train and eval, [b, s] and packed, and on every layout.

Around it:

    with launch.session(): ...                       patches (and the CPU shim without a GPU) for a program of your own
    arguments.model_arguments(ModelConfig)           Megatron flags of the geometry, as list[str]
    build.build(bridge, flags) -> build.Trainer      .model (chunks), .optimizer, .scheduler, .args; one call, through
                                                     megatron.training.initialize and setup_model_and_optimizer
    weights.load_deployment(trainer.model, source, trainer.optimizer)   source: folder's Repository or {hf name: tensor}
    weights.deployment_tensors(trainer.model)        iterator of (hf name, tensor), whole model on every rank
    weights.deployment_digest(trainer.model)         hex digest over all of them
    versions.deployment_version(trainer.model)       integer; grows with every optimizer step and load
    trainer.optimizer.step()                         requantises and bumps (optimizer_hook.install is part of build)
    optimizer_hook.last_report(trainer.optimizer)    RequantizeReport: changed and overflowed blocks of the last step
"""

# Legend: b batch, s sequence of this rank, T = b s tokens, H hidden, V vocab, L MoE layers, k slots a token.

from collections.abc import Mapping
from typing import Any

from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vllm_forward.carried import CarriedTensors
from megatron.vllm_forward.coverage import check_coverage
from megatron.vllm_forward.limits import check_build
from megatron.vllm_forward.output import OutputLayer, Sampling, plain_sampling
from megatron.vllm_forward.packing import to_packed
from megatron.vllm_forward.sharding import all_rows, own_rows
from megatron.vllm_forward.versions import deployed_modules, mark_bytes_current, mark_masters_changed


class BridgedModel(HybridModel):
    """Megatron's hybrid model over deployment bytes; see the module docstring for how it is called."""

    def __init__(
        self, config: TransformerConfig, hybrid_stack_spec: ModuleSpec, vocab_size: int, max_sequence_length: int,
        **keywords: Any,
    ) -> None:  # fmt: skip
        bridge = hybrid_stack_spec.params.get("bridge")
        check_build(bridge, config, vocab_size, keywords)
        super().__init__(config, hybrid_stack_spec, vocab_size, max_sequence_length, **keywords)
        self.bridge = bridge
        self.deployment_version = 0
        if self.post_process:
            self.carried = CarriedTensors(bridge)
        for module in deployed_modules([self]):
            module.quantize_masters()
        check_coverage([self])

    def setup_embeddings_and_output_layer(self) -> None:
        """Put our output layer in the place of Megatron's before Megatron marks its weight."""
        if self.post_process:
            bridge = self.hybrid_stack_spec.params["bridge"]
            self.output_layer = OutputLayer(config=self.config, bridge=bridge, tp_group=self.pg_collection.tp)
        super().setup_embeddings_and_output_layer()

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
        sampling: Sampling | None = None,
        with_entropy: bool = False,
        expert_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return hidden states of a middle stage, else -logprob of `labels`, else logits; see the module docstring.

        Args:
            input_ids: [b, s].
            position_ids: not read: the model has no position embedding.
            attention_mask: not read: attention is causal within each sequence.
            decoder_input: [s, b, h] in place of the embedding's output.
            labels: [b, s], the token to score at each place.
            inference_context: None; generation is the rollout's.
            runtime_gather_output: not read: logits are whole on every rank.
            inference_params: as inference_context.
            loss_mask: not read: the caller masks.
            packed_seq_params: thd with b = 1, or None for b sequences of s tokens.
            padding_mask: not read: rows do not see each other.
            sampling: how labels were sampled; None stands for temperature 1.
            with_entropy: also return the entropy of each place.
            expert_ids: [b, s, L, k], baseline only.

        Raises:
            ValueError: expert ids come with the bridged forward, or Megatron's inference engine is the caller.
        """
        self._check_call(inference_context or inference_params, expert_ids)
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
        replayed = None if expert_ids is None else expert_ids.flatten(0, 1)
        hidden_sbH = self.decoder(
            decoder_input, attention_mask, packed_seq_params=packed_seq_params, expert_ids_TLk=replayed
        )
        if not self.post_process:
            return hidden_sbH
        if labels is None:
            logits_sbV, _ = self.output_layer(hidden_sbH)
            return self._rows_of_all(logits_sbV).transpose(0, 1).contiguous()
        rows = (labels.flatten(), *(plain_sampling(labels) if sampling is None else sampling).rows())
        token_ids, *sampled = (own_rows(row, self.pg_collection.tp) for row in rows)
        logprob_t, entropy_t = self.output_layer.logprob(to_packed(hidden_sbH).squeeze(1), token_ids, sampled)
        logprob_T, entropy_T = self._rows_of_all(logprob_t), self._rows_of_all(entropy_t)
        loss = -logprob_T.view(labels.shape)
        return (loss, entropy_T.view(labels.shape)) if with_entropy else loss

    def _rows_of_all(self, rows: Tensor) -> Tensor:
        """Return the rows of all tensor-parallel ranks; each of them goes on with the same loss."""
        group = self.pg_collection.tp
        return rows if group.size() == 1 else all_rows(rows, group)

    def _check_call(self, inference: Any, expert_ids: Tensor | None) -> None:
        if inference is not None:
            raise ValueError("an inference context was given; a bridged model only trains: generate with the rollout")
        if expert_ids is not None and self.bridge.config.forward.mode != "baseline":
            raise ValueError(
                "expert_ids were given to the bridged forward; only mode 'baseline' takes them, "
                "because a replayed choice would hide a fault of the router"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **keywords: Any) -> Any:
        """Load a Megatron checkpoint: its masters and its bytes, as stored; opens a new version."""
        result = super().load_state_dict(state_dict, strict=strict, **keywords)
        mark_masters_changed([self])
        for module in deployed_modules([self]):
            module.derive_unsaved()
        mark_bytes_current([self])
        return result
