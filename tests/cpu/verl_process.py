# SPDX-License-Identifier: Apache-2.0
"""verl in the test process: the job's configuration, its own `initialize()` of our engine, a batch in its form."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training.training import destroy_global_state
from megatron_process import one_rank

RECIPE = Path(__file__).parents[2] / "examples" / "swe_bench_pro" / "verl_recipe"
# What the README's command gives beside the job, and a rate that moves bytes in one step.
GIVEN = ("actor_rollout_ref.model.path=/model", "data.train_files=[/rows.parquet]", "data.val_files=[/rows.parquet]")


def composed(*overrides):
    """Return job.yaml over verl's own configuration, as `verl.trainer.main_ppo` composes it."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(RECIPE), version_base=None):
        return compose("job", overrides=["hydra.searchpath=[pkg://verl.trainer.config]", *GIVEN, *overrides])


def actor_config(*overrides):
    """Return verl's dataclass of the actor, with what its worker copies from the model's section."""
    from verl.utils.config import omega_conf_to_dataclass

    job = composed(*overrides)
    actor = omega_conf_to_dataclass(job.actor_rollout_ref.actor)
    model = job.actor_rollout_ref.model
    actor.engine.use_remove_padding, actor.engine.use_fused_kernels = model.use_remove_padding, model.use_fused_kernels
    return actor


def model_config(path):
    """Return a stand-in for verl's HFModelConfig, which wants a tokenizer that the tiny checkpoint lacks."""
    from transformers import PretrainedConfig

    return SimpleNamespace(
        model_type="language_model", mtp=SimpleNamespace(enable=False), lora={"rank": 0}, local_path=str(path),
        hf_config=PretrainedConfig(architectures=["NemotronHForCausalLM"]), architectures=["NemotronHForCausalLM"],
        tokenizer=SimpleNamespace(pad_token_id=0), get_processor=lambda: None,
    )  # fmt: skip


@contextmanager
def started(path, toml, *overrides):
    """Yield the engine that verl's registry makes for the job, initialised by verl, on one gloo rank."""
    from verl.workers.engine import EngineRegistry

    actor = actor_config(*overrides)
    with one_rank(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_FORWARD_TOML", str(toml))
        dist.init_process_group("gloo")
        engine = EngineRegistry.new(
            model_type="language_model", backend=actor.engine.strategy, model_config=model_config(path),
            engine_config=actor.engine, optimizer_config=actor.optim, checkpoint_config=actor.checkpoint,
        )  # fmt: skip
        try:
            engine.initialize()
            yield engine
        finally:
            engine._session.close()
            destroy_global_state()
            parallel_state.destroy_model_parallel()


def batch_of(completions, temperature=1.0, **more):
    """Return whole sequences in the unpadded form that verl's trainer hands to an engine."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    rows = [torch.tensor(done.prompt_ids + done.token_ids) for done in completions]
    sampled = [torch.tensor([0] * len(done.prompt_ids) + [1] * len(done.token_ids)) for done in completions]
    found = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
            "loss_mask": torch.nested.as_nested_tensor(sampled, layout=torch.jagged),
            "temperature": torch.full((len(rows),), temperature),
        },
        batch_size=[len(rows)],
    )
    # As verl's worker fills them in from the actor's configuration.
    tu.assign_non_tensor(found, use_dynamic_bsz=True, max_token_len_per_gpu=128, use_fused_kernels=True, **more)
    return found


def sampled_of(nested, completions):
    """Return the numbers of the sampled tokens, in order: verl's row at i belongs to the token at i + 1."""
    ends = [
        row[len(done.prompt_ids) - 1 : len(row) - 1]
        for row, done in zip(nested.unbind(), completions, strict=True)
    ]  # fmt: skip
    return torch.cat(ends)
