# SPDX-License-Identifier: Apache-2.0
"""The verl recipe: its own parts everywhere; against an installed verl, skipped by name where it is absent.

With verl this goes as far as one process without a GPU and without Ray can: the job over verl's own configuration,
verl's own `initialize()`, forward, training step, checkpoint and weight transport.
"""

import asyncio
import dataclasses
import importlib
import importlib.util
import math
import os
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import verl_process
from megatron_process import tiny_source
from test_megatron_parity import rollout, sample

from examples.swe_bench_pro.verl_recipe import announcement, limits
from vllm_forward_bridge.parity.bits import assert_same_bits

yaml = pytest.importorskip("yaml", reason="PyYAML is absent: pip install pyyaml")
JOB = yaml.safe_load((verl_process.RECIPE / "job.yaml").read_text())
TENSORS = [("a", torch.arange(6.0)), ("b", torch.ones(3, 2).to(torch.float8_e4m3fn))]


@pytest.fixture(scope="session")
def verl():
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is absent: pip install verl==0.9.1 in an environment of its own to run its smoke test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BRIDGE_DIGEST", "0123456789abcdef")
        yield importlib.import_module("examples.swe_bench_pro.verl_recipe.engine")


# Without verl.


def test_job_keeps_what_the_contract_needs():
    rollout, actor = JOB["actor_rollout_ref"]["rollout"], JOB["actor_rollout_ref"]["actor"]
    assert actor["strategy"] == "megatron"
    assert actor["megatron"]["use_dist_checkpointing"] is True
    assert actor["entropy_coeff"] == 0
    assert JOB["actor_rollout_ref"]["model"]["use_fused_kernels"] is True
    assert (rollout["temperature"], rollout["top_p"], rollout["top_k"]) == (1.0, 1.0, -1)
    assert rollout["logprobs_mode"] == "processed_logprobs"
    assert rollout["calculate_log_probs"] is True
    assert (rollout["tensor_model_parallel_size"], rollout["enable_sleep_mode"]) == (1, False)
    assert (JOB["data"]["train_batch_size"], rollout["n"]) == (32, 8)
    assert JOB["data"]["max_prompt_length"] + JOB["data"]["max_response_length"] == actor["ppo_max_token_len_per_gpu"]


def test_announced_weights_come_back_whole():
    received = dict(announcement.announced(iter(TENSORS)))
    assert list(received) == ["a", "b", announcement.NAME]
    digest = announcement.take(received)
    assert list(received) == ["a", "b"]
    other = dict(announcement.announced([("a", TENSORS[0][1] + 1), TENSORS[1]]))
    assert announcement.take(other) != digest


def test_stream_that_was_cut_off_is_refused():
    stream = announcement.announced(iter(TENSORS))
    with pytest.raises(ValueError, match="2 tensors arrived without .* the stream was cut off"):
        announcement.take(dict(next(stream) for _ in TENSORS))


def configurations(**engine):
    """Return stand-ins for verl's three configurations, all of them accepted."""
    accepted = {
        "use_fused_kernels": True, "use_remove_padding": True, "use_dist_checkpointing": True,
        "tensor_model_parallel_size": 1, "expert_tensor_parallel_size": None,
        "virtual_pipeline_model_parallel_size": None, "dynamic_context_parallel": False, "param_offload": False,
        "optimizer_offload": False, "pad_to_length": False, "use_megatron_fsdp": False, "forward_only": False,
        "router_replay": SimpleNamespace(mode="disabled"), "qat": SimpleNamespace(enable=False), "dtype": "bfloat16",
    }  # fmt: skip
    return (
        SimpleNamespace(**{**accepted, **engine}),
        SimpleNamespace(optimizer="adam", lr_decay_style="constant", lr_warmup_steps=-1, lr_warmup_steps_ratio=0.0),
        SimpleNamespace(model_type="language_model", mtp=SimpleNamespace(enable=False), lora={}),
    )


def test_jobs_outside_the_recipe_are_refused_by_name():
    limits.check(*configurations())
    limits.check(*configurations(tensor_model_parallel_size=2, expert_tensor_parallel_size=1))
    with pytest.raises(ValueError, match="megatron.expert_tensor_parallel_size is 2, accepted is 1"):
        limits.check(*configurations(tensor_model_parallel_size=2))
    with pytest.raises(ValueError, match=r"(?s)use_fused_kernels is False.*\n.*param_offload is True"):
        limits.check(*configurations(use_fused_kernels=False, param_offload=True))


# The job over verl's own configuration.


def leaves(node, path=""):
    """Yield every dotted key of a nested mapping, outer ones first."""
    for name, value in node.items():
        yield f"{path}{name}"
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{name}.")


def test_every_key_of_the_job_is_verls(verl):
    from importlib.resources import files

    from omegaconf import OmegaConf
    from verl.workers.config import RolloutConfig

    flat = OmegaConf.load(str(files("verl.trainer.config") / "_generated_ppo_megatron_trainer.yaml"))
    known = set(leaves(OmegaConf.to_container(flat)))
    # Fields of the dataclass that the flat file leaves out, and mappings that verl hands on as they are.
    known |= {f"actor_rollout_ref.rollout.{field.name}" for field in dataclasses.fields(RolloutConfig)}
    free = "actor_rollout_ref.rollout.engine_kwargs.vllm."
    asked = leaves({name: value for name, value in JOB.items() if name != "defaults"})
    assert [key for key in asked if key not in known and not key.startswith(free)] == []


def test_verl_accepts_the_job(verl):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    job = verl_process.composed()
    validate_config(job, need_reference_policy(job), need_critic(job))
    assert not need_reference_policy(job)
    assert not need_critic(job)
    rollout = omega_conf_to_dataclass(job.actor_rollout_ref.rollout)
    assert (rollout.enable_sleep_mode, rollout.prompt_length, rollout.response_length) == (False, 16384, 114688)
    assert rollout.engine_kwargs["vllm"]["additional_config"]["vllm_forward_bridge"]["digest"] == "0123456789abcdef"
    actor = verl_process.actor_config()
    limits.check(actor.engine, actor.optim, verl_process.model_config("/model"))


def test_external_module_puts_our_engine_in_verls_place(verl):
    code = (
        "import verl.workers.engine as e; found = e.EngineRegistry.get_engine_cls('language_model', 'megatron'); "
        "print(found.__module__, found.__name__)"
    )
    module = "examples.swe_bench_pro.verl_recipe.engine"
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": module, "PYTHONPATH": str(verl_process.RECIPE.parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    # vLLM logs to the same stream, before.
    assert done.stdout.split()[-2:] == [module, "BridgedMegatronEngine"], done.stderr[-2000:]


def test_second_replacement_is_refused(verl):
    from verl.workers.engine import EngineRegistry

    backends = EngineRegistry._engines["language_model"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends, "megatron", dict(backends["megatron"]))
        with pytest.raises(RuntimeError, match="no MegatronEngineWithLMHead for cuda"):
            verl.replace_verls_engine()


def test_vllm_mixes_the_extension_into_our_worker_without_a_clash(verl):
    from vllm_forward_bridge.vllm_plugin.worker import BridgeWorker

    named = JOB["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]["worker_extension_cls"]
    module, _, name = named.rpartition(".")
    extension = getattr(importlib.import_module(module), name)
    assert [name for name in dir(extension) if not name.startswith("__") and hasattr(BridgeWorker, name)] == []


def test_episode_in_verls_form(verl):
    from examples.swe_bench_pro.agent.episode import Episode
    from examples.swe_bench_pro.agent.stream import TokenStream
    from examples.swe_bench_pro.verl_recipe.agent_loop import as_output, completion_of
    from vllm_forward_bridge.rollout.protocol import Request, SamplingParams

    request = Request(request_id="a", prompt_ids=(1, 2, 3), sampling=SamplingParams(stop_token_ids=(9,)))
    stream = TokenStream()
    stream.append_context([1, 2, 3], turn=0)
    stream.append_completion(completion_of(request, [5, 9], [-0.5, -0.25]), turn=1)
    stream.append_context([7], turn=1)
    output = as_output(Episode(name="a", instance_id="i", outcome="resolved", stream=stream, turns=1), 1.0)
    assert (output.prompt_ids, output.response_ids, output.response_mask) == ([1, 2, 3], [5, 9, 7], [1, 1, 0])
    assert output.response_logprobs == [-0.5, -0.25, 0.0]
    assert not any(math.isnan(value) for value in output.response_logprobs)
    with pytest.raises(RuntimeError, match="calculate_log_probs"):
        completion_of(request, [5], None)


def test_megatron_flags_of_a_job(verl):
    engine = SimpleNamespace(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=1, expert_model_parallel_size=4,
        context_parallel_size=1, use_distributed_optimizer=True, override_transformer_config={},
    )  # fmt: skip
    optimizer = SimpleNamespace(lr=1e-6, weight_decay=0.0, clip_grad=1.0, betas=(0.9, 0.98))
    flags = verl.megatron_flags(engine, optimizer)
    assert flags[flags.index("--adam-beta2") + 1] == "0.98"
    assert flags[flags.index("--expert-model-parallel-size") + 1] == "4"
    assert flags[flags.index("--expert-tensor-parallel-size") + 1] == "1"
    assert "--sequence-parallel" in flags
    assert "--use-distributed-optimizer" in flags


# verl's own path through the engine, in one process.


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_source(tmp_path_factory)


@pytest.fixture(scope="module")
def engine(verl, source, tmp_path_factory):
    toml = tmp_path_factory.mktemp("bridge") / "bridge.toml"
    toml.write_text(f'[model]\nrepository = "{source.path}"\n')
    with verl_process.started(source.path, toml, "actor_rollout_ref.actor.optim.lr=1e-3") as found:
        assert type(found) is verl.BridgedMegatronEngine
        yield found


def transport(engine, tmp_path, worker):
    """Send the engine's weights by verl's sender into our extension's receiver, in small buckets of shared memory."""
    import zmq
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    from examples.swe_bench_pro.verl_recipe.rollout import BridgedWorkerExtension

    handle = f"ipc://{tmp_path}/weights.sock"
    worker._get_zmq_handle, worker.device = lambda: handle, torch.device("cpu")
    receive = partial(BridgedWorkerExtension.update_weights_from_ipc, worker, use_shm=True)
    # Either side that fails leaves the other waiting for ever, at its end too; milliseconds, for sockets made after.
    zmq.Context.instance().rcvtimeo, zmq.Context.instance().linger = 30_000, 1_000
    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    named_tensors, adapters = engine.get_per_tensor_param()
    asyncio.run(BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True).async_send_weights(named_tensors))
    thread.join(30)
    assert not thread.is_alive()
    assert adapters is None


def compare(engine, completions, what):
    with engine.eval_mode():
        output = engine.infer_batch(verl_process.batch_of(completions, 0.8, calculate_entropy=True))["model_output"]
    mine = verl_process.sampled_of(output["log_probs"], completions)
    theirs = torch.tensor([value for done in completions for value in done.logprobs])
    assert len(theirs) > 40
    assert (output["entropy"].values() > 0).all()
    assert_same_bits(mine, theirs, what)


def test_verls_logprobs_are_the_rollouts_before_and_after_a_step(engine, source, tmp_path):
    from verl.workers.utils.losses import sft_loss

    serving = rollout(source, {name: source.read(name) for name in source.names()})
    completions = sample(serving, temperature=0.8)
    compare(engine, completions, "verl's log_probs of sampled tokens")

    with engine.train_mode():
        done = engine.train_batch(verl_process.batch_of(completions, 0.8), partial(sft_loss, None))
    assert done["metrics"]["grad_norm"] > 0
    assert math.isfinite(sum(done["loss"]))
    assert len(done["loss"]) > 1  # several micro-batches
    assert engine.lr_scheduler_step() == 1e-3

    with pytest.raises(AssertionError, match="stale"):
        compare(engine, completions, "stale")
    updates = []
    worker = SimpleNamespace(bridge_version=lambda: 6, bridge_update=lambda *update: updates.append(update))
    transport(engine, tmp_path, worker)
    [(tensors, version, digest)] = updates
    assert version == 7
    assert set(tensors) == set(source.names())
    serving.update_weights(iter(tensors.items()), version=1, digest=digest)
    compare(engine, sample(serving, temperature=0.8), "verl's log_probs after a step and verl's weight transport")


def test_checkpoint_brings_the_bytes_back(engine, source, tmp_path):
    from megatron.vllm_forward import weights

    saved = weights.deployment_digest(engine.module)
    engine.save_checkpoint(str(tmp_path), global_step=1)
    with torch.no_grad():
        moved = {name: source.read(name) for name in source.names()}
        name = "backbone.embeddings.weight"
        moved[name] = moved[name] * 2
        weights.load_deployment(engine.module, moved, engine.optimizer)
    assert weights.deployment_digest(engine.module) != saved
    engine.load_checkpoint(str(tmp_path), del_local_after_load=False)
    assert weights.deployment_digest(engine.module) == saved
