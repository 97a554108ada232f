# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own gives the bits of one in this process, and neither loses nor hides a failure."""

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from embedded_engines import (
    PLAIN,
    SPLIT_TOKENS,
    assert_same_completion,
    engine,
    prompt,
    request,
    serve,
    tiny_repository,
)

from vllm_forward_bridge.config import BridgeConfig, ForwardSection, ModelSection, RolloutSection
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.quantization import bytes_digest
from vllm_forward_bridge.rollout import process
from vllm_forward_bridge.rollout.open import open_engine
from vllm_forward_bridge.rollout.protocol import NO_WEIGHTS, Rollout

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory files need Linux")


def own_process():
    config, _ = tiny_repository()
    bridge = BridgeConfig(
        model=ModelSection(repository="unused"),
        forward=ForwardSection(attention_split_tokens=SPLIT_TOKENS),
        rollout=RolloutSection(own_process=True),
    )
    return open_engine(bridge, config, torch.device("cpu"), max_model_len=1, kv_cache_gib=1)


def send(rollout, version, seed=0):
    tensors = list(tiny_repository(seed)[1].items())
    rollout.update_weights(tensors, version=version, digest=bytes_digest(tensors))


@pytest.fixture(scope="module")
def elsewhere():
    rollout = own_process()
    assert rollout.version == NO_WEIGHTS
    send(rollout, 0)
    yield rollout
    rollout.close()


def test_it_is_a_rollout_in_another_process(elsewhere):
    assert isinstance(elsewhere, Rollout)
    assert elsewhere._process.pid != os.getpid()
    assert elsewhere.record() == engine().record()


def test_same_bits_here_and_there(elsewhere):
    requests = [request(f"r{n}", length) for n, length in enumerate((1, 15, 16, 33))]
    here, there = (serve(one, requests, join_at={"r1": 2}) for one in (engine(), elsewhere))
    for name, completion in here.items():
        assert_same_completion(there[name], completion, "own process")
        assert there[name].phases == completion.phases
    tokens = [prompt(40), prompt(7)]
    for got, want in zip(elsewhere.score(tokens, PLAIN), engine().score(tokens, PLAIN), strict=True):
        assert_same_bits(got, want, "scored")


def test_weights_arrive_whole_or_not_at_all(elsewhere):
    one = request("w", 20)
    before = elsewhere.generate([one])[0]
    tensors = list(tiny_repository(1)[1].items())
    with pytest.raises(ValueError, match="digest") as raised:
        elsewhere.update_weights(tensors[:-1], version=elsewhere.version + 1, digest=bytes_digest(tensors))
    assert "In the rollout process" in raised.value.__notes__[0]
    assert_same_completion(elsewhere.generate([one])[0], before, "after a refused update")
    send(elsewhere, elsewhere.version + 1, seed=1)
    want = engine(seed=1).generate([one])[0]
    assert want.logprobs != before.logprobs
    want = dataclasses.replace(want, weight_version=elsewhere.version)
    assert_same_completion(elsewhere.generate([one])[0], want, "after an update")
    send(elsewhere, elsewhere.version + 1)


def test_errors_come_back_as_they_were_raised(elsewhere):
    with pytest.raises(KeyError, match="no unfinished request"):
        elsewhere.abort("unknown")
    elsewhere.add(request("left", 3))
    with pytest.raises(RuntimeError, match="unfinished"):
        send(elsewhere, elsewhere.version + 1)
    elsewhere.abort("left")
    assert [completion.finish_reason for completion in elsewhere.step()] == ["aborted"]
    assert not elsewhere.has_unfinished()


def test_what_cannot_be_pickled_harms_no_engine(elsewhere):
    version = elsewhere.version
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        elsewhere.add(lambda: None)
    with pytest.raises(RuntimeError, match="OnlyThere: no such class here"):
        elsewhere.abort(_RaisesWhatOnlyItKnows("x"))
    assert elsewhere.version == version


class _RaisesWhatOnlyItKnows(str):
    """A request id whose look-up raises an exception of a class that only the other process has."""

    def __reduce__(self):
        return eval, (_KEY,)


_KEY = """type("Key", (str,), {"__hash__": lambda self: exec(
    "class OnlyThere(Exception): pass\\nOnlyThere.__module__ = 'only_there'\\nraise OnlyThere('no such class here')"
)})("x")"""


def test_a_forked_process_keeps_no_engine_alive():
    rollout = own_process()
    forked = os.fork()
    if not forked:
        time.sleep(60)
        os._exit(0)
    try:
        start = time.monotonic()
        rollout.close()
        assert rollout._process.returncode == 0
        assert time.monotonic() - start < process._PATIENCE / 2
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


def test_a_launchers_environment_stays_with_the_trainer(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "of the trainer")
    with pytest.raises(RuntimeError, match="found: \\[\\]"):
        process.ProcessRollout(partial(exec, _TELL))


_TELL = """
import os
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE")
raise RuntimeError(f"found: {[name for name in names if name in os.environ]}")
"""


def test_an_engine_that_cannot_start_says_why():
    with pytest.raises(TypeError, match="missing"):
        process.ProcessRollout(process._mapped)
    with pytest.raises(RuntimeError, match="Local: only there"):
        process.ProcessRollout(partial(exec, "class Local(Exception): pass\nraise Local('only there')"))


def test_vllm_is_refused_on_another_ranks_gpu():
    config, _ = tiny_repository()
    bridge = BridgeConfig(model=ModelSection(repository="unused"), rollout=RolloutSection(engine="vllm"))
    with pytest.raises(ValueError, match="the trainer is on cuda:1 and vLLM takes the first visible GPU"):
        open_engine(bridge, config, torch.device("cuda", 1), max_model_len=1, kv_cache_gib=1)


def test_a_killed_process_is_named_and_stays_ended():
    rollout = own_process()
    send(rollout, 3)
    rollout.add(request("lost", 3))
    os.kill(rollout._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="exit code -9 during step.*make a new engine"):
        rollout.step()
    with pytest.raises(RuntimeError, match="has ended"):
        assert rollout.version


_PARENT = """
import sys, time
sys.path.insert(0, {folder!r})
from test_rollout_process import own_process
rollout = own_process()
print(rollout._process.pid, flush=True)
time.sleep(100)
"""


def test_no_process_outlives_a_killed_parent():
    code = _PARENT.format(folder=os.path.dirname(__file__))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} still runs")
