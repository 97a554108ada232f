# SPDX-License-Identifier: Apache-2.0
"""logprob and sample on the CPU."""

import math

import pytest
import torch
from invariance import assert_gradcheck, assert_row_bits_ignore_batch, assert_within, bf16_step

from vllm_forward_bridge.ops import exact, logprob, sample
from vllm_forward_bridge.ops.logprob import block_sums, logit_gradients, merged_in_order
from vllm_forward_bridge.ops.survivors import Cut
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.reference import logprob as plain

JUST_BELOW_ONE = math.nextafter(1.0, 0.0)


def example(num_rows, vocab, seed=0):
    """Return logits with ties, flat rows and both zeros, and a mix of (temperature, top_p, top_k)."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = (torch.randn(num_rows, vocab, generator=generator) * 4).bfloat16()
    logits_TV[1::9] = 0.0
    logits_TV[1::9, ::3] = -0.0
    logits_TV[2::9] = (logits_TV[2::9] / 4).round()  # many equal logits
    logits_TV[3::9, : vocab // 2] = -torch.inf
    temperature_T = torch.rand(num_rows, generator=generator) * 1.5 + 0.3
    temperature_T[::5] = 0.0
    temperature_T[1::5] = 1.0
    top_p_T = torch.rand(num_rows, generator=generator).clamp(min=1e-6)
    top_p_T[::3] = 1.0
    top_k_T = torch.randint(1, vocab + 3, (num_rows,), generator=generator, dtype=torch.int32)
    top_k_T[1::4], top_k_T[2::4] = 0, 1
    return logits_TV, temperature_T, top_p_T, top_k_T


def settings(num_rows, temperature=1.0, top_p=1.0, top_k=0):
    return (
        torch.full((num_rows,), float(temperature)), torch.full((num_rows,), float(top_p)),
        torch.full((num_rows,), top_k, dtype=torch.int32),
    )  # fmt: skip


def every_logprob(logits_V, temperature=1.0, top_p=1.0, top_k=0):
    """Return the logprob of each token of one row."""
    vocab = len(logits_V)
    return logprob(
        logits_V.expand(vocab, -1).contiguous(), torch.arange(vocab), *settings(vocab, temperature, top_p, top_k)
    )


def test_logprob_opcheck():
    logits_TV, *rest = example(5, 11)
    arguments = (logits_TV.requires_grad_(), torch.arange(5), *rest)
    torch.library.opcheck(torch.ops.vllm_forward_bridge.logprob.default, arguments)


def test_sample_opcheck():
    torch.library.opcheck(sample, (*example(5, 11), torch.linspace(0.0, 0.9, 5, dtype=torch.float64)))


@pytest.mark.parametrize("vocab", [1, 2, 7, 1024, 1280, 3000])
def test_logprob_close_to_reference(vocab):
    logits_TV, *rest = example(90, vocab)
    uniform_T = torch.rand(90, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    token_ids_T = sample(logits_TV, *rest, uniform_T)
    token_ids_T[::2] = torch.arange(45) % vocab
    got, want = logprob(logits_TV, token_ids_T, *rest), plain.logprob(logits_TV, token_ids_T, *rest)
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    alive_T = want > -torch.inf
    # z - max and the logarithm are of the size of the result or of ln V, rounded to fp32 a few times on both sides.
    size_T = 4 * 2.0**-23 * (want.abs() + (logits_TV.float().clamp(-99).abs().amax(-1) / rest[0].clamp(min=0.3)) + 9)
    assert ((got - want).abs() <= size_T)[alive_T].all()
    assert alive_T.any()


TRICKY = {
    "all equal": [0.0] * 9,
    "both zeros": [0.0, -0.0, -0.0, 0.0, -0.0],
    "ties at the top": [1.0, 5.0, 5.0, -3.0, 5.0, 1.0],
    "ties at the cut": [3.0, 1.0, 2.0, 1.0, 1.0, -8.0, 1.0],
    "one dominates": [0.0, 60.0, 1.0, -40.0],
    "masses of zero": [50.0, -50.0, -50.0, 50.0, -60.0],
    "minus infinity": [-math.inf, 1.0, -math.inf, 2.0],
    "one token": [-7.0],
}


@pytest.mark.parametrize("name", TRICKY)
def test_logprob_survivors_are_those_of_the_sorted_reference(name):
    logits_V = torch.tensor(TRICKY[name]).bfloat16()
    for temperature in (0.0, 0.25, 1.0, 3.0):
        for top_k in (0, 1, 2, 3, len(logits_V), 1000):
            for top_p in (1e-30, 0.1, 1 / 3, 0.5, 0.75, 0.999, JUST_BELOW_ONE, 1.0):
                got_V = every_logprob(logits_V, temperature, top_p, top_k)
                top_p = torch.tensor(top_p).item()  # as fp32 holds it
                want_V = plain.survivors(logits_V, temperature, top_p, top_k) & (logits_V > -torch.inf)
                assert torch.equal(got_V > -torch.inf, want_V), (temperature, top_k, top_p)
                assert abs(got_V.double().exp().sum().item() - 1) < 1e-5


def test_logprob_ties_survive_by_smaller_id():
    flat_V = torch.zeros(10).bfloat16()
    assert (every_logprob(flat_V, top_k=4) > -torch.inf).tolist() == [True] * 4 + [False] * 6
    assert (every_logprob(flat_V, top_p=0.35) > -torch.inf).tolist() == [True] * 4 + [False] * 6
    flat_V[::2] = -0.0
    assert (every_logprob(flat_V, top_k=4) > -torch.inf).tolist() == [True] * 4 + [False] * 6
    # Top-p takes its share of what top-k left: 0.5 of 4 equal tokens.
    assert (every_logprob(flat_V, top_k=4, top_p=0.5) > -torch.inf).tolist() == [True] * 2 + [False] * 8


@pytest.mark.parametrize("vocab", [1024, 1280, 3000])
def test_logprob_merges_blocks_in_order(vocab):
    logits_TV, *_ = example(20, vocab, seed=3)
    z_TV = logits_TV.float()
    largest_T, total_T = torch.full((20,), -torch.inf), torch.zeros(20)
    for start in range(0, vocab, 1024):
        block = z_TV[:, start : start + 1024]
        peak_T = block.amax(-1)
        shift_T = torch.where(peak_T == -torch.inf, 0.0, peak_T)
        block_sum_T = exact.exp(block - shift_T[:, None]).double().sum(-1).float()  # 24 bits and 11: exact in float64
        new_T = torch.maximum(largest_T, peak_T)
        safe_T = torch.where(new_T == -torch.inf, 0.0, new_T)
        total_T = total_T * exact.exp(largest_T - safe_T) + block_sum_T * exact.exp(peak_T - safe_T)
        largest_T = new_T
    token_ids_T = torch.arange(20) * (vocab // 20) + vocab // 20 - 1
    want = (z_TV.gather(1, token_ids_T[:, None])[:, 0] - largest_T) - exact.log(total_T)
    assert_same_bits(logprob(logits_TV, token_ids_T, *settings(20)), want, "blocks of 1,024 merged from the first on")


def test_logprob_merge_keeps_the_order():
    zeros = torch.zeros(1, 3)
    huge = 2.0**24  # one more is lost in fp32, two together are not
    assert merged_in_order(zeros, torch.tensor([[huge, 1.0, 1.0]]))[1].item() == huge
    assert merged_in_order(zeros, torch.tensor([[1.0, 1.0, huge]]))[1].item() == huge + 2


def test_logprob_vocabulary_shards_of_whole_blocks_give_its_bits():
    z_TV = example(20, 5000)[0].float()
    whole = block_sums(z_TV)
    for blocks in (1, 2, 3):
        shards = [block_sums(shard) for shard in z_TV.split(blocks * 1024, dim=1)]
        for place in (0, 1):
            assert_same_bits(
                torch.cat([shard[place] for shard in shards], 1), whole[place], f"shards of {blocks} blocks"
            )


@pytest.mark.parametrize("vocab", [1280, 1000])
def test_logprob_row_bits_ignore_batch(vocab):
    logits_TV, *rest = example(257, vocab)
    token_ids_T = torch.randint(vocab, (257,), generator=torch.Generator().manual_seed(1))
    token_ids_T[:] = torch.where(logits_TV.gather(1, token_ids_T[:, None])[:, 0] > 2, token_ids_T, logits_TV.argmax(-1))

    def run(logits, row):
        return logprob(logits, token_ids_T[row], *(value[row] for value in rest))

    assert_row_bits_ignore_batch(run, logits_TV, torch.arange(257))


def test_sample_row_bits_ignore_batch():
    logits_TV, *rest = example(257, 1280)
    uniform_T = torch.rand(257, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(logits, row):
        return sample(logits, *(value[row] for value in rest), uniform_T[row])

    assert_row_bits_ignore_batch(run, logits_TV, torch.arange(257))


@pytest.mark.parametrize("vocab", [1, 5, 1280])
def test_sample_close_to_reference_and_always_has_a_logprob(vocab):
    for seed in range(5):
        logits_TV, *rest = example(180, vocab, seed)
        uniform_T = torch.rand(180, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        uniform_T[::7], uniform_T[1::7] = 0.0, JUST_BELOW_ONE
        token_ids_T = sample(logits_TV, *rest, uniform_T)
        assert torch.equal(token_ids_T, plain.sample(logits_TV, *rest, uniform_T))
        assert logprob(logits_TV, token_ids_T, *rest).isfinite().all()


def test_sample_draws_in_proportion():
    logits_V = torch.tensor([0.5, -1.0, 2.0, 2.0, -9.0, 0.0, 1.0]).bfloat16()
    draws = 4096
    uniform_T = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    for temperature, top_p, top_k in ((1.0, 1.0, 0), (0.5, 1.0, 0), (1.0, 0.8, 0), (2.0, 1.0, 3)):
        rows = settings(draws, temperature, top_p, top_k)
        token_ids_T = sample(logits_V.expand(draws, -1).contiguous(), *rows, uniform_T)
        assert (token_ids_T.diff() >= 0).all(), "the inverse CDF runs in id order"
        counts_V = torch.bincount(token_ids_T, minlength=7)
        want_V = every_logprob(logits_V, temperature, top_p, top_k).double().exp() * draws
        # A cumulative share crosses an evenly spaced grid at either end of a token: less than one draw off.
        assert ((counts_V - want_V).abs() < 1.001).all()
        assert (counts_V[want_V == 0] == 0).all()


def test_sample_at_temperature_zero_takes_the_first_largest():
    logits_TV = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-0.0, 0.0, -1.0, 0.0], [5.0, 1.0, 1.0, 1.0]]).bfloat16()
    for uniform in (0.0, 0.5, JUST_BELOW_ONE):
        uniform_T = torch.full((3,), uniform, dtype=torch.float64)
        for top_p, top_k in ((1.0, 0), (1e-30, 0), (0.5, 2), (1.0, 1)):
            assert sample(logits_TV, *settings(3, 0.0, top_p, top_k), uniform_T).tolist() == [1, 0, 0]
    want = logprob(logits_TV, torch.tensor([1, 0, 0]), *settings(3, 1.0))
    assert_same_bits(
        logprob(logits_TV, torch.tensor([1, 0, 0]), *settings(3, 0.0)), want, "temperature 0 divides by nothing"
    )


def test_logprob_backward_formula():
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(4, 6, generator=generator).double()
    alive_TV = torch.rand(4, 6, generator=generator) < 0.7
    token_ids_T = alive_TV.int().argmax(-1)
    temperature_T = torch.tensor([0.0, 0.5, 1.0, 2.0]).double()

    def scaled(logits):
        divisor_T1 = torch.where(temperature_T == 0, 1.0, temperature_T)[:, None]
        return (logits / divisor_T1).masked_fill(~alive_TV, -torch.inf)

    def forward(logits):
        return scaled(logits).log_softmax(-1).gather(1, token_ids_T[:, None])[:, 0]

    def gradients(grad_T, logits):
        return logit_gradients(grad_T, logits, token_ids_T, temperature_T, scaled(logits).logsumexp(-1), alive_TV)

    assert_gradcheck(forward, gradients, logits_TV)


def test_logprob_grads_close():
    logits_TV, *rest = example(90, 1280)
    uniform_T = torch.rand(90, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    token_ids_T = plain.sample(logits_TV, *rest, uniform_T)
    token_ids_T[::6] = 1279
    grad_T = torch.randn(90, generator=torch.Generator().manual_seed(1))
    wide = logits_TV.double().requires_grad_()
    want_T = plain.logprob(wide, token_ids_T, *rest)
    alive_T = want_T > -torch.inf
    [want] = torch.autograd.grad(want_T[alive_T], wide, grad_T.double()[alive_T])
    logits_TV.requires_grad_()
    logprob(logits_TV, token_ids_T, *rest).backward(grad_T)
    # fp32 exponents of size 50 at the most, so 2^-18 of a probability; then one rounding to bf16.
    scale_T1 = (grad_T / torch.where(rest[0] == 0, 1.0, rest[0])).abs()[:, None].double()
    assert_within(logits_TV.grad, want, bf16_step(want) / 2 + 2.0**-18 * scale_T1, "gradient")
    assert not alive_T.all()
    assert not logits_TV.grad[~alive_T].any(), "a token behind the cut has no gradient"
    assert (logits_TV.grad != 0).any(-1)[alive_T].float().mean() > 0.5


def test_cut_keeps_everything_when_both_filters_are_off():
    logits_TV = torch.tensor([[-math.inf, 0.0, -3e38, 3e38]]).bfloat16()
    cut = Cut(torch.tensor([-(1 << 15)], dtype=torch.int16), torch.tensor([3]))
    assert cut.survivors(logits_TV).all()


def test_logprob_rejects_values_outside_their_range():
    logits_TV, _, _, _ = example(4, 8)
    wrong = torch.tensor([1.0, -1.0, torch.nan, torch.inf]), torch.tensor([0.0, 1.5, 0.5, 1.0])
    top_k_T = torch.tensor([0, 1, -1, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match="logprob cannot take this call") as error:
        logprob(logits_TV, torch.tensor([0, 8, 1, 2]), *wrong, top_k_T)
    for part in (
        "temperature_T has 3 values such as -1.0; 0 or positive", "top_p_T has 2 values such as 0.0",
        "top_k_T has 1 values such as -1", "token_ids_T has 1 values such as 8; 0 up to, not including, 8",
    ):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(ValueError, match="uniform_T has 1 values such as 1.0"):
        sample(logits_TV, *settings(4), torch.tensor([0.0, 0.5, 1.0, 0.9]).double())


def test_logprob_rejects_wrong_tensors():
    logits_TV, *rest = example(4, 8)
    with pytest.raises(ValueError, match="logits_TV is torch.float32") as error:
        logprob(logits_TV.float(), torch.zeros(3, dtype=torch.int32), rest[0].double(), *rest[1:])
    for part in ("temperature_T is torch.float64", "token_ids_T is torch.int32", "T = 3, but T = 4 in logits_TV"):
        assert part in str(error.value)
