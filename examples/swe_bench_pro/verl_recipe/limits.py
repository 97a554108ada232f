# SPDX-License-Identifier: Apache-2.0
"""What a verl job may ask of the bridged actor; everything else is refused by name before a model is built."""

from typing import Any


def check(engine: Any, optimizer: Any, model: Any) -> None:
    """Raise unless verl's three configurations stay inside what the bridged actor does.

    Raises:
        ValueError: lists every field that has another value than the accepted one.
    """
    problems = [
        f"{name} is {given!r}, accepted is {accepted!r}: {why}"
        for name, given, accepted, why in (*_of_engine(engine), *_of_optimizer(optimizer), *_of_model(model))
        if given != accepted
    ]
    if problems:
        raise ValueError("the bridged actor refuses this verl job; change these:\n  - " + "\n  - ".join(problems))


def _of_engine(engine: Any) -> tuple:
    unproven = "not proven to keep the bits"
    split_experts = engine.expert_tensor_parallel_size or engine.tensor_model_parallel_size
    return (
        ("model.use_fused_kernels", engine.use_fused_kernels, True, "the other path holds the logits of a whole batch"),
        ("model.use_remove_padding", engine.use_remove_padding, True, "sequences are packed"),
        ("megatron.use_dist_checkpointing", engine.use_dist_checkpointing, True, "there is no bridge to Hugging Face"),
        ("megatron.expert_tensor_parallel_size", split_experts, 1, "no expert is split; null means the tensor size"),
        ("megatron.virtual_pipeline_model_parallel_size", engine.virtual_pipeline_model_parallel_size, None, unproven),
        ("megatron.dynamic_context_parallel", engine.dynamic_context_parallel, False, unproven),
        ("megatron.param_offload", engine.param_offload, False, unproven),
        ("megatron.optimizer_offload", engine.optimizer_offload, False, unproven),
        ("megatron.pad_to_length", engine.pad_to_length, False, unproven),
        ("megatron.use_megatron_fsdp", engine.use_megatron_fsdp, False, unproven),
        ("megatron.forward_only", engine.forward_only, False, "a reference model is not part of the recipe"),
        ("megatron.router_replay.mode", engine.router_replay.mode, "disabled", "the routers agree by themselves"),
        ("megatron.qat.enable", engine.qat.enable, False, "the deployment bytes are the quantisation"),
        ("megatron.dtype", engine.dtype, "bfloat16", "masters are bf16"),
    )


def _of_optimizer(optimizer: Any) -> tuple:
    only = "the recipe gives Megatron a constant rate and Adam"
    return (
        ("optim.optimizer", optimizer.optimizer, "adam", only),
        ("optim.lr_decay_style", optimizer.lr_decay_style, "constant", only),
        ("optim.lr_warmup_steps", max(optimizer.lr_warmup_steps or 0, 0), 0, only),
        ("optim.lr_warmup_steps_ratio", optimizer.lr_warmup_steps_ratio, 0.0, only),
    )


def _of_model(model: Any) -> tuple:
    return (
        ("model_type", model.model_type, "language_model", "there is no value head"),
        ("model.mtp.enable", model.mtp.enable, False, "there is no multi-token prediction"),
        ("model.lora.rank", model.lora.get("rank", 0), 0, "whole weights are trained"),
    )
