# SPDX-License-Identifier: Apache-2.0
"""The loop's order and its refusals, on a table of logits that both sides read: policy and rollout of a few lines."""

import random

import pytest
import torch

from megatron.vllm_forward.rl.layout import Layout
from megatron.vllm_forward.rl.loop import GrpoLoop, Scores
from megatron.vllm_forward.rl.metrics import ObjectiveSums
from megatron.vllm_forward.rl.settings import GrpoSettings
from megatron.vllm_forward.rl.single_turn import SingleTurn, request_seed
from vllm_forward_bridge.config import GateSection
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.parity.gate import Gate, ParityError
from vllm_forward_bridge.rollout.protocol import Completion, SamplingParams

VOCAB = 6


class TablePolicy:
    """Logits of the next token are a row of a table."""

    def __init__(self):
        torch.manual_seed(3)
        self.table = torch.randn(VOCAB, VOCAB, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.table], lr=0.1)
        self.version = 1
        self.error = 0.0
        self.seen = []

    def logprobs(self):
        return self.table.log_softmax(1)

    def score(self, rows):
        with torch.no_grad():
            return [self._scores(row, self.logprobs()) for row in rows]

    def _scores(self, row, logprobs):
        entropy_T = -(logprobs.exp() * logprobs).sum(1)[row.tokens_T]
        return Scores(logprobs[row.tokens_T, row.labels_T].detach() + self.error, entropy_T.detach())

    def backward(self, rows, loss):
        self.table.grad = None
        self.seen.append([(row.tokens_T, row.old_logprob_T, row.advantage_T) for row in rows])
        tokens = sum(row.num_sampled for row in rows)
        for row in rows:
            logprobs = self.logprobs()
            entropy_T = self._scores(row, logprobs).entropy_T
            (loss(row, logprobs[row.tokens_T, row.labels_T], entropy_T) / tokens).backward()
        return self.score(rows)

    def update(self):
        self.optimizer.step()
        self.version += 1
        return {"grad_norm": self.table.grad.norm().item()}

    def deployment(self):
        return [("table", self.table.detach().clone())], "digest"


class TableRollout:
    """Samples from its own copy of the table."""

    def __init__(self):
        self.version = 0
        self.table = None
        self.updates = []

    def update_weights(self, named_tensors, *, version, digest):
        self.table = dict(named_tensors)["table"].log_softmax(1)
        self.version = version
        self.updates.append(version)

    def generate(self, requests):
        return [self._complete(request) for request in requests]

    def _complete(self, request):
        generator = torch.Generator().manual_seed(request.sampling.seed)
        tokens, last = [], request.prompt_ids[-1]
        for _ in range(request.sampling.max_new_tokens):
            tokens.append(int(torch.multinomial(self.table[last].exp(), 1, generator=generator)))
            last = tokens[-1]
        before = (request.prompt_ids[-1], *tokens)
        logprobs = tuple(self.table[a, b].item() for a, b in zip(before, tokens, strict=False))
        return Completion(
            request_id=request.request_id, prompt_ids=request.prompt_ids, token_ids=tuple(tokens), logprobs=logprobs,
            phases=("prefill",) + ("decode",) * (len(tokens) - 1), finish_reason="length", weight_version=self.version,
        )  # fmt: skip


class EchoTask:
    """Repeat the prompt's last token."""

    def prompt(self, step, group):
        return (0, 1 + (step + group) % (VOCAB - 1))

    def reward(self, prompt_ids, token_ids):
        return sum(token == prompt_ids[-1] for token in token_ids) / len(token_ids)


def make_loop(policy=None, collect=None, section=None, layout=None, **settings):
    values = {"prompts_per_step": 4, "group_size": 6, "row_tokens": 40, **settings}
    settings = GrpoSettings(sampling=SamplingParams(max_new_tokens=5, seed=11), **values)
    section = section or GateSection()
    policy, rollout = policy or TablePolicy(), TableRollout()
    loop = GrpoLoop(
        settings=settings, section=section, policy=policy, rollout=rollout, layout=layout or Layout(),
        collect=collect or SingleTurn(EchoTask(), rollout, settings), gate=Gate(on_difference=section.on_difference),
    )  # fmt: skip
    loop.publish()
    return loop


def test_step_records_zero_difference_and_a_rising_reward():
    loop = make_loop()
    records = [loop.step(step) for step in range(1, 41)]
    for record in records:
        assert (record["mismatches"], record["max"], record["mean"], record["std"], record["k3_kl"]) == (0, 0, 0, 0, 0)
        assert record["compared"] == record["tokens"] == 4 * 6 * 5
        assert record["ratio"] == 1.0
        assert record["ratio_deviation"] == record["weights_off_one"] == record["clip_fraction"] == 0.0
    early, late = (sum(r["reward"] for r in part) / 5 for part in (records[:5], records[-5:]))
    assert late > early + 0.2
    assert records[-1]["entropy"] < records[0]["entropy"]
    assert loop.gate.total.count == 40 * 4 * 6 * 5
    assert loop.rollout.version == loop.policy.version == 41


def test_step_stops_before_the_update_when_one_token_differs():
    loop = make_loop()
    honest = loop.collect

    def tampered(step, groups):
        trajectories = honest(step, groups)
        values = list(trajectories[7].logprobs)
        values[-1] = torch.tensor(values[-1]).nextafter(torch.tensor(0.0)).item()
        trajectories[7] = type(trajectories[7])(**{**vars(trajectories[7]), "logprobs": tuple(values)})
        return trajectories

    loop.collect = tampered
    before = loop.policy.table.detach().clone()
    with pytest.raises(ParityError, match="1 of 120 sampled tokens") as error:
        loop.step(1)
    assert error.value.metrics.first.sample == 1 * 6 + 1
    assert error.value.metrics.first.position == 4
    assert_same_bits(loop.policy.table.detach(), before, "a failed gate changes no weight")
    assert loop.policy.version == 1


def test_training_forward_is_judged_too():
    loop = make_loop()
    honest = loop.policy.score
    calls = []

    def drifting(rows):  # right when scoring, wrong when training: as a kernel would be that looks at the batch
        calls.append(len(rows))
        loop.policy.error = 0.0 if len(calls) == 1 else 1e-6
        return honest(rows)

    loop.policy.score = drifting
    with pytest.raises(ParityError):
        loop.step(1)
    assert len(calls) == 2
    assert loop.policy.version == 1


def test_reuse_skips_the_scoring_forward_and_keeps_the_gate():
    loops = [make_loop(section=GateSection(old_logprob=old, certificate="c")) for old in ("recompute", "reuse")]
    records = [[loop.step(step) for step in (1, 2, 3)] for loop in loops]
    assert_same_bits(loops[0].policy.table.detach(), loops[1].policy.table.detach(), "reuse trains the same weights")
    assert all("seconds_gate" in record for record in records[0])
    assert not any("seconds_gate" in record for record in records[1])
    assert all(r["compared"] == r["trained_tokens"] > 0 and r["mismatches"] == 0 for r in records[1])
    loops[1].policy.error = 1e-6
    with pytest.raises(ParityError):
        loops[1].step(4)


def test_order_of_completion_does_not_change_the_training_batch():
    plain, shuffled = make_loop(), make_loop()
    honest = shuffled.collect

    def late(step, groups):
        trajectories = honest(step, groups)
        random.Random(step).shuffle(trajectories)
        return trajectories

    shuffled.collect = late
    for step in (1, 2, 3):
        plain.step(step)
        shuffled.step(step)
    for got, want in zip(shuffled.policy.seen, plain.policy.seen, strict=True):
        for got_row, want_row in zip(got, want, strict=True):
            for got_value, want_value in zip(got_row, want_row, strict=True):
                assert_same_bits(got_value, want_value, "rows are equal")
    assert_same_bits(shuffled.policy.table.detach(), plain.policy.table.detach(), "weights are equal")


def test_dropped_groups_are_gated_but_not_trained():
    loop = make_loop()
    loop.collect.task.reward = lambda prompt_ids, token_ids: float(prompt_ids[-1] == 2 and token_ids[0] > 2)
    record = loop.step(1)  # prompts 2, 3, 4, 5: only the first group can have variance
    assert record["dropped_groups"] == 3
    assert record["compared"] == 120
    assert record["trained_tokens"] == 30


def test_a_step_without_variance_changes_nothing():
    loop = make_loop()
    loop.collect.task.reward = lambda prompt_ids, token_ids: 1.0
    record = loop.step(1)
    assert (record["dropped_groups"], record["trained_tokens"], record["version"]) == (4, 0, 1)
    assert record["compared"] == 120
    assert loop.rollout.updates == [1]


def test_invalid_trajectories_are_gated_but_not_trained():
    loop = make_loop()
    honest = loop.collect

    def failing(step, groups):
        return [
            type(t)(**{**vars(t), "valid": t.member != 0, "reward": 99.0 if t.member == 0 else t.reward})
            for t in honest(step, groups)
        ]

    loop.collect = failing
    record = loop.step(1)
    assert record["invalid_trajectories"] == 4
    assert record["compared"] == 120
    assert record["trained_tokens"] <= 100
    assert record["reward"] <= 1.0


def test_second_iteration_leaves_ratio_one_and_first_does_not_count_it():
    loop = make_loop(iterations=3)
    record = loop.step(1)
    assert record["ratio_deviation"] == 0.0  # of the first iteration
    assert loop.policy.version == 4
    assert loop.rollout.updates == [1, 4]


def test_baseline_goes_on_with_a_correction():
    section = GateSection(on_difference="correct", correction="tis", correction_cap=2.0)
    policy = TablePolicy()
    policy.error = 0.25
    record = make_loop(policy=policy, section=section).step(1)
    assert record["mismatches"] == 120
    # One float32 addition and one subtraction on logprobs below 16: at most two steps of 2**-20.
    assert abs(record["max"] - 0.25) <= 2 * 2.0**-20
    assert record["weights_off_one"] == 1.0
    assert abs(record["weight"] - 1.2840254166877414) <= 1e-4


def test_kl_term_pulls_towards_the_reference():
    free, held = make_loop(), make_loop(kl_beta=5.0)
    start = held.policy.logprobs().detach()
    held.reference = lambda row: start[row.tokens_T, row.labels_T]
    for step in range(1, 16):
        free.step(step)
        record = held.step(step)
    assert record["kl"] > 0
    moved = [(loop.policy.logprobs().detach() - start).abs().mean() for loop in (free, held)]
    assert moved[1] < 0.7 * moved[0]


def test_entropy_bonus_keeps_the_policy_broad():
    free, broad = make_loop(), make_loop(entropy_weight=0.5)
    for step in range(1, 31):
        last = free.step(step)["entropy"], broad.step(step)["entropy"]
    assert last[1] > last[0] + 0.3


def test_loop_rejects_stale_trajectories_missing_members_and_uneven_ranks():
    loop = make_loop()
    loop.policy.version = 5
    with pytest.raises(RuntimeError, match=r"version \[1\], the trainer has version 5"):
        loop.step(1)
    loop = make_loop()
    honest = loop.collect
    loop.collect = lambda step, groups: honest(step, groups)[1:]
    with pytest.raises(ValueError, match=r"missing: \[\(0, 0\)\]"):
        loop.step(1)
    with pytest.raises(ValueError, match="4 prompts a step on 3 data-parallel ranks"):
        make_loop(layout=Layout(data_size=3))


def test_trained_tokens_are_counted_by_the_rank_that_speaks():
    sums = ObjectiveSums()
    sums.sums["tokens"] = 12.0
    assert [sums.over(Layout(speaks=speaks))["trained_tokens"] for speaks in (True, False)] == [12, 0]


def test_layout_splits_problems_and_rollout_work():
    layouts = [Layout(data_rank=d, data_size=2, replica_rank=r, replica_size=2) for d in range(2) for r in range(2)]
    assert [layout.own_groups(8) for layout in layouts] == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2
    assert sorted(group for layout in layouts for group in layout.own_work(8)) == list(range(8))


def test_request_seeds_differ_by_place_and_fit_the_contract():
    seeds = {request_seed(1, step, group, member) for step in range(5) for group in range(5) for member in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(1, 2, 3, 4) == request_seed(1, 2, 3, 4) != request_seed(2, 2, 3, 4)


@pytest.mark.parametrize(("changes", "words"), [
    ({"group_size": 1}, "group_size is 1; at least 2"),
    ({"iterations": 0, "kl_beta": -1.0}, "kl_beta is -1.0"),
    ({"clip_lower": 1.0}, "clip_lower is 1.0"),
])  # fmt: skip
def test_settings_reject_what_cannot_train(changes, words):
    with pytest.raises(ValueError) as error:
        make_loop(**changes)
    assert words in str(error.value)
