# SPDX-License-Identifier: Apache-2.0
"""Tests that `test_vllm_plugin` runs in a process that may import vLLM; no GPU, no engine."""

import importlib
import inspect
import random
import threading
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sequences import normal
from vllm import SamplingParams
from vllm.config import CacheConfig, CompilationConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils import torch_utils
from vllm.v1.attention.backends import utils as backend_utils
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor.interface import MoveDirectionality
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_forward_bridge import ops
from vllm_forward_bridge.checkpoint import make_tiny_checkpoint, open_repository
from vllm_forward_bridge.config import BridgeConfig, ModelSection
from vllm_forward_bridge.ops import conv_cuda, humming_gemm, ssd_cuda
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.quantization import bytes_digest
from vllm_forward_bridge.rollout import vllm as rollout_vllm
from vllm_forward_bridge.rollout.protocol import Request
from vllm_forward_bridge.rollout.uniform import token_uniform
from vllm_forward_bridge.vllm_plugin import mamba, register, sampler
from vllm_forward_bridge.vllm_plugin.model import BridgedNemotronH, _tensors_of
from vllm_forward_bridge.vllm_plugin.switch import ARGUMENTS, KEY, complete, package_digest
from vllm_forward_bridge.vllm_plugin.worker import BridgeWorker
from vllm_forward_bridge.vllm_symbols import humming

SEQUENCE_LENGTHS = (1, 15, 16, 17, 33)
CHUNK = 16
GEOMETRY = SimpleNamespace(
    conv_sections={"x": 32, "B": 32, "C": 32}, conv_kernel=4, mamba_num_heads=4, mamba_head_dim=8, n_groups=2,
    ssm_state_size=16, chunk_size=CHUNK,
)  # fmt: skip


def test_every_argument_exists_and_names_what_can_be_loaded():
    assert ARGUMENTS.keys() <= {field.name for field in fields(EngineArgs)}
    paths = [ARGUMENTS["worker_cls"], *ARGUMENTS["model_class_overrides"].values(), *ARGUMENTS["logits_processors"]]
    for path in paths:
        module, _, name = path.replace(":", ".").rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), name), type), path


def test_complete_knows_the_defaults_of_engine_args():
    arguments = EngineArgs(model="unused", additional_config={KEY: {}})
    complete(arguments)
    assert {name: getattr(arguments, name) for name in ARGUMENTS} == dict(ARGUMENTS)
    assert arguments.additional_config[KEY] == {"digest": package_digest()}


def test_what_the_refusals_read_exists():
    read = {
        ModelConfig: "architecture dtype runner_type logprobs_mode max_logprobs logits_processors enforce_eager",
        CacheConfig: "enable_prefix_caching mamba_cache_mode cache_dtype calculate_kv_scales block_size",
        ParallelConfig: "tensor_parallel_size pipeline_parallel_size data_parallel_size worker_cls enable_dbo "
        "prefill_context_parallel_size decode_context_parallel_size enable_expert_parallel enable_eplb",
        SchedulerConfig: "async_scheduling",
        CompilationConfig: "mode static_forward_context",
        VllmConfig: "additional_config speculative_config lora_config kv_transfer_config use_v2_model_runner",
    }
    missing = [
        f"{config.__name__}.{name}"
        for config, names in read.items()
        for name in names.split()
        if name not in {field.name for field in fields(config)}
        and not hasattr(config, name)
        and f"self.{name} = " not in inspect.getsource(config)
    ]
    assert missing == []


def test_register_completes_switched_on_engines_alone(monkeypatch):
    seen = []
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: seen.append(self))
    register()
    once = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is once
    stock = EngineArgs(model="unused")
    before = dict(vars(stock))
    stock.create_engine_config()
    assert vars(stock) == before
    bridged = EngineArgs(model="unused", additional_config={KEY: {}})
    bridged.create_engine_config()
    assert bridged.worker_cls == ARGUMENTS["worker_cls"]
    with pytest.raises(ValueError, match="enforce_eager|max_logprobs"):
        EngineArgs(model="unused", additional_config={KEY: {}}, max_logprobs=5).create_engine_config()
    assert seen == [stock, bridged]


def rollout_with(monkeypatch, answer):
    """Make a rollout whose workers answer `bridge_record` so; return it and the arguments of its engine."""
    given = []

    def engine(arguments):
        given.append(arguments)
        return SimpleNamespace(collective_rpc=lambda method, args=(): answer(method))

    monkeypatch.setattr(rollout_vllm.LLMEngine, "from_engine_args", engine)
    bridge = BridgeConfig(model=ModelSection(repository="unused"))
    return rollout_vllm.VllmRollout(bridge, max_model_len=64, kv_cache_bytes=1), given[0]


def test_rollout_switches_on_without_a_loaded_plugin(monkeypatch):
    _, arguments = rollout_with(monkeypatch, lambda method: [{"package": package_digest()}])
    assert {name: getattr(arguments, name) for name in ARGUMENTS} == dict(ARGUMENTS)


def test_rollout_refuses_workers_with_other_code(monkeypatch):
    with pytest.raises(RuntimeError, match=f"workers run package other, this process {package_digest()}"):
        rollout_with(monkeypatch, lambda method: [{"package": "other"}])
    with pytest.raises(RuntimeError, match="workers run different kernels"):
        rollout_with(monkeypatch, lambda method: [{"package": package_digest()}, {"package": "other"}])


def test_rollout_refuses_stock_workers(monkeypatch):
    def stock(method):
        raise AttributeError(f"Worker has no method {method}")

    with pytest.raises(AttributeError, match="bridge_record"):
        rollout_with(monkeypatch, stock)


@pytest.mark.parametrize("call", ["generate", "score"])
def test_rollout_takes_all_requests_or_none(monkeypatch, call):
    rollout, _ = rollout_with(monkeypatch, lambda method: [{"package": package_digest()}])
    queued = []

    def add_request(request_id, prompt, params):
        if len(prompt["prompt_token_ids"]) > 64:
            raise ValueError("longer than max_model_len")
        queued.append(request_id)
        return request_id

    rollout._engine.add_request = add_request
    rollout._engine.abort_request = lambda ids: [queued.remove(each) for each in ids if each in queued]
    prompts = [(1,), (2,), (3,) * 65]
    requests = [Request(request_id=str(number), prompt_ids=prompt) for number, prompt in enumerate(prompts)]
    with pytest.raises(ValueError, match="longer"):
        rollout.generate(requests) if call == "generate" else rollout.score(prompts, rollout_vllm.SamplingParams())
    assert queued == []
    assert not rollout.has_unfinished()


def test_request_parameters_are_refused_in_one_error():
    bad = SamplingParams(seed=1, presence_penalty=0.5, min_p=0.1, logit_bias={1: 2.0}, n=2)
    with pytest.raises(ValueError, match="temperature, top-k and top-p alone") as raised:
        sampler.RequestState.validate_params(bad)
    for name in ("seed", "presence_penalty", "min_p", "logit_bias", "n", f"extra_args[{sampler.SEED!r}]"):
        assert f"\n  - {name} is " in str(raised.value)
    sampler.RequestState.validate_params(SamplingParams(temperature=0.7, extra_args={sampler.SEED: 3}))


def test_sampler_draws_by_seed_and_position():
    state = sampler.RequestState(None, torch.device("cpu"), False)
    chosen = [
        SamplingParams(temperature=0.7 + seed / 9, top_p=0.9, extra_args={sampler.SEED: seed}) for seed in range(3)
    ]
    outputs = [[], [5], [5, 6]]
    added = [(row, chosen[row], [1, 2], outputs[row]) for row in range(3)]
    state.update_state(BatchUpdate(batch_size=3, removed=[], added=added, moved=[]))
    outputs[0].append(9)  # vLLM's lists grow
    moved = [(0, 2, MoveDirectionality.SWAP), (2, 1, MoveDirectionality.UNIDIRECTIONAL)]
    state.update_state(BatchUpdate(batch_size=2, removed=[1], added=[], moved=moved))
    seed_T, position_T = torch.tensor([2, 0]), torch.tensor([4, 3])
    temperature_T, top_p_T = torch.tensor([0.7 + 2 / 9, 0.7]), torch.tensor([0.9, 0.9])
    settings = (temperature_T, top_p_T, torch.zeros(2, dtype=torch.int32))
    logits_TV = normal(2, 40, seed=0, scale=3.0)
    uniform_T = token_uniform(seed_T, position_T)
    want_T = ops.sample(logits_TV, *settings, uniform_T)
    processors = SimpleNamespace(argmax_invariant=[state])
    got = sampler.BridgeSampler().forward(logits_TV, SimpleNamespace(logitsprocs=processors, max_num_logprobs=0))
    assert got.sampled_token_ids.tolist() == want_T[:, None].tolist()
    assert_same_bits(got.logprobs_tensors.logprobs[:, 0], ops.logprob(logits_TV, want_T, *settings), "logprobs")
    assert_same_bits(state.columns(2, torch.device("cpu"))[3], uniform_T, "uniform")


# ---- weight updates: vLLM's own reload, the plugin's worker and model, no engine ----


def worker_with(config, tensors):
    """Return a bridged worker as far as an update needs it, with its first weights loaded."""
    model = object.__new__(BridgedNemotronH)
    torch.nn.Module.__init__(model)
    model.geometry, model.device = config, torch.device("cpu")
    model._weights = model._version = model._announced = None
    model.mixers = torch.nn.ModuleList(torch.nn.Identity() for _ in config.layer_types)
    model.load_weights(tensors.items())
    runner = SimpleNamespace(
        get_model=lambda: model,
        model_config=SimpleNamespace(quantization=None),
        reset_encoder_cache=lambda: None,
        reset_mm_cache=lambda: None,
    )
    return SimpleNamespace(model_runner=runner, reload_weights=partial(GPUModelRunner.reload_weights, runner)), model


def test_an_update_is_vllms_reload_in_place_whole_or_not_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    make_tiny_checkpoint(tmp_path / "tiny")
    repository = open_repository(tmp_path / "tiny")
    tensors = {name: repository.read(name).clone() for name in repository.names()}
    worker, model = worker_with(repository.config, tensors)
    places = [tensor.data_ptr() for tensor in _tensors_of(model._weights)]
    tensors["backbone.norm_f.weight"] += 1
    digest = bytes_digest(tensors.items())
    with pytest.raises(ValueError, match="without version and digest"):
        worker.reload_weights(weights_iterator=iter(tensors.items()))
    with pytest.raises(ValueError, match=r"version is 0;(.|\n)*digest is"):
        BridgeWorker.bridge_update(worker, tensors, 0, "0" * 64)
    assert model.weights_version() == 0
    assert not torch.equal(model._weights.final_gain_H, tensors["backbone.norm_f.weight"])
    BridgeWorker.bridge_update(worker, tensors, 7, digest)
    assert model.weights_version() == 7
    assert_same_bits(model._weights.final_gain_H, tensors["backbone.norm_f.weight"], "the new gain")
    assert [tensor.data_ptr() for tensor in _tensors_of(model._weights)] == places
    with pytest.raises(ValueError, match="without version and digest"):
        worker.reload_weights(weights_iterator=iter(tensors.items()))


# ---- replay_step: the CPU ops stand in for vLLM's kernels, the paged state and its index maps are the plugin's ----


def conv_on_pages(x_TC, weight_CW, bias_C, cu_seqlens_S1, tails, page_S, has_tail_S, metadata):
    tail_SWC = tails[page_S.long()].masked_fill(~has_tail_S[:, None, None], 0.0)
    y_TC = ops.causal_conv1d(x_TC, weight_CW, bias_C, cu_seqlens_S1, tail_SWC)
    for row, page in enumerate(page_S.tolist()):
        new = x_TC[cu_seqlens_S1[row] : cu_seqlens_S1[row + 1]]
        tails[page] = torch.cat([tail_SWC[row], new])[-tails.shape[1] :]
    return y_TC


def scan_of_plan(x, dt, A, B, C, D, dt_bias, plan, chunk_size, boundary_ShPn):
    return ops.ssd_scan(x, dt, A, B, C, D, dt_bias, plan.cu_seqlens_S1, chunk_size, boundary_ShPn)


@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(conv_cuda, "conv", conv_on_pages)
    monkeypatch.setattr(ssd_cuda, "scan", scan_of_plan)
    for module in (torch_utils, backend_utils):
        monkeypatch.setattr(module, "PIN_MEMORY", False)  # only a driver can pin


def mixer_weights():
    return SimpleNamespace(
        conv_weight_CW=normal(96, 4, seed=1), conv_bias_C=normal(96, seed=2), D_h=normal(4, seed=4),
        dt_bias_h=normal(4, seed=5) - 2, A_h=-torch.exp(normal(4, seed=3).float()),
    )  # fmt: skip


def dirty_state(num_pages):
    """Return pages as a former request may have left them: NaN everywhere."""
    shapes = mamba.state_shapes(GEOMETRY)
    return [
        torch.full((num_pages, *shape), torch.nan, dtype=dtype)
        for shape, dtype in zip(shapes, mamba.STATE_DTYPES, strict=True)
    ]


def run_steps(lengths, steps):
    """Run sequences in steps of (sequence, new rows) pairs; return the outputs of each and the state's pages."""
    inputs = [(normal(length, 96, seed=10 + i), normal(length, 4, seed=50 + i)) for i, length in enumerate(lengths)]
    pages = [3, 1, 5, 2, 4]  # page 0 is vLLM's null page
    state, done, outputs = dirty_state(6), [0] * len(lengths), [[] for _ in lengths]
    for step in steps:
        starts = [done[sequence] for sequence, _ in step]
        counts = [count for _, count in step]
        page_S = torch.tensor([pages[sequence] for sequence, _ in step], dtype=torch.int32)
        metadata = mamba.build_metadata(page_S, starts, counts, (CHUNK, 4), torch.device("cpu"))
        assert metadata.num_tokens == sum(counts)
        xBC_TC, dt_Th = (
            torch.cat([inputs[sequence][part][done[sequence] : done[sequence] + count] for sequence, count in step])
            for part in (0, 1)
        )
        y_ThP = mamba.replay_step(state, metadata, xBC_TC, dt_Th, mixer_weights(), GEOMETRY)
        for (sequence, count), rows in zip(step, y_ThP.split(counts), strict=True):
            outputs[sequence].append(rows)
            done[sequence] += count
    assert done == list(lengths)
    return [torch.cat(rows) for rows in outputs], state


@pytest.mark.parametrize("seed", [0, 1])
def test_replay_step_has_the_bits_of_one_step(on_the_cpu, seed):
    lengths = SEQUENCE_LENGTHS
    want, _ = run_steps(lengths, [[(sequence, length)] for sequence, length in enumerate(lengths)])
    assert all(rows.isfinite().all() and rows.abs().sum() > 0 for rows in want)
    generator = random.Random(seed)
    left, steps = dict(enumerate(lengths)), []
    while left:
        chosen = generator.sample(sorted(left), generator.randint(1, len(left)))
        # Decode rows, chunks of a prompt and whole rests in one step.
        step = [(sequence, generator.choice([1, 1, min(left[sequence], 7), left[sequence]])) for sequence in chosen]
        steps.append(step)
        left = {s: n - dict(step).get(s, 0) for s, n in left.items() if n > dict(step).get(s, 0)}
    assert max(map(len, steps)) > 2
    got, state = run_steps(lengths, steps)
    for sequence, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(mine, theirs, f"sequence {sequence} of {lengths[sequence]} rows")
    assert all(part[0].isnan().all() for part in state), "the null page was written"


def test_replay_step_starts_a_page_afresh(on_the_cpu):
    # After preemption a sequence is computed again from its start, on a page with another state.
    first, state = run_steps((33,), [[(0, 33)]])
    metadata = mamba.build_metadata(torch.tensor([3], dtype=torch.int32), [0], [33], (CHUNK, 4), torch.device("cpu"))
    again = mamba.replay_step(
        state, metadata, normal(33, 96, seed=10), normal(33, 4, seed=50), mixer_weights(), GEOMETRY
    )
    assert_same_bits(again, first[0], "recomputed rows")


def test_update_block_table_moves_the_pages_alone(on_the_cpu):
    metadata = mamba.build_metadata(
        torch.tensor([3, 1], dtype=torch.int32), [0, 5], [2, 1], (CHUNK, 4), torch.device("cpu")
    )
    table = torch.tensor([[7, 0], [9, 0], [0, 0]], dtype=torch.int32)
    moved = mamba.ReplayBuilder.update_block_table(None, metadata, table, None)
    assert moved.page_S.tolist() == [7, 9]
    assert moved.plan is metadata.plan
    assert moved.chunks is metadata.chunks


def test_a_failed_step_is_the_last(monkeypatch):
    """Rows of a step that raised count as computed in vLLM, which would then schedule nothing, for ever."""
    rollout, _ = rollout_with(monkeypatch, lambda method: [{"package": package_digest()}])
    steps = []

    def step():
        steps.append(1)
        if len(steps) == 1:
            raise FloatingPointError("bad kernel")
        return []

    scheduler = SimpleNamespace(running=[])
    rollout._engine.add_request = lambda request_id, prompt, params: request_id
    rollout._engine.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    rollout._engine.step = step
    with pytest.raises(FloatingPointError, match="bad kernel"):
        rollout.generate([Request(request_id="a", prompt_ids=(1,))])
    with pytest.raises(RuntimeError, match=r"a step .* failed \(FloatingPointError: bad kernel\).*new engine"):
        rollout.step()
    assert rollout.has_unfinished()
    assert len(steps) == 1


@pytest.mark.parametrize("other_thread", [False, True])
def test_humming_loads_its_kernels_in_any_thread(monkeypatch, other_thread):
    """Given a plain tuning, Humming loads a kernel in the main thread only; an engine may be stepped by another."""
    kernel, loaded = humming("kernel.humming:HummingKernel"), []

    def load(self):
        loaded.append(threading.current_thread())
        self.kernel_id = 7

    def prepare(self):
        if threading.current_thread() is threading.main_thread():
            self.load_cubin()

    for name, value in {
        "_instances": {}, "_str2kernel_cache": {}, "load_cubin": load, "prepare": prepare,
        "init_sm_version": lambda self: setattr(self, "sm_version", 90),
    }.items():  # fmt: skip
        monkeypatch.setattr(kernel, name, value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found = []

    def ask():
        layer, compute = humming_gemm._layer(128, 128, 64, 0), humming_gemm._compute("dense")
        found.append(kernel.prepare_kernels(layer, compute, humming_gemm._tuning(16)).tolist())

    if other_thread:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert loaded == [thread]
    else:
        ask()
    assert found == [[0, 1 << 30, 7, 0]]
