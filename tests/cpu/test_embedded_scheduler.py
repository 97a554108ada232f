# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: order, budget, pages and preemption, without a model."""

import random

from vllm_forward_bridge.rollout.embedded.scheduler import Chunk, Scheduler, Sequence
from vllm_forward_bridge.rollout.protocol import SamplingParams


def sequence(name, prompt_length, max_new_tokens=4):
    return Sequence(name, [1] * prompt_length, prompt_length, SamplingParams(max_new_tokens=max_new_tokens))


def advance(scheduler, chunks):
    """Do what an engine does with a schedule; return the sequences that ended."""
    ended = []
    for chunk in chunks:
        chunk.sequence.num_computed = chunk.end
        if chunk.samples:
            chunk.sequence.tokens.append(1)
            if len(chunk.sequence.tokens) - chunk.sequence.prompt_length == chunk.sequence.sampling.max_new_tokens:
                scheduler.remove(chunk.sequence)
                ended.append(chunk.sequence.request_id)
    return ended


def shape(chunks):
    return [(chunk.sequence.request_id, chunk.start, chunk.count) for chunk in chunks]


def test_long_prompts_are_cut_to_the_budget_and_decodes_go_first():
    scheduler = Scheduler(max_num_seqs=4, token_budget=8, num_pages=32, page_tokens=4)
    scheduler.add(sequence("short", 3))
    scheduler.add(sequence("long", 12))
    steps = []
    for _ in range(3):
        chunks = scheduler.schedule()
        steps.append(shape(chunks))
        advance(scheduler, chunks)
    assert steps == [
        [("short", 0, 3), ("long", 0, 5)],
        [("short", 3, 1), ("long", 5, 7)],
        [("short", 4, 1), ("long", 12, 1)],
    ]


def test_phase_of_a_chunk():
    one = sequence("one", 1)
    assert not Chunk(one, 0, 1).is_decode
    assert Chunk(one, 1, 1).is_decode
    assert not Chunk(one, 0, 2).is_decode
    assert not Chunk(one, 1, 2).is_decode


def test_requests_wait_for_a_free_slot_in_order_of_arrival():
    scheduler = Scheduler(max_num_seqs=2, token_budget=64, num_pages=32, page_tokens=4)
    for name in "abc":
        scheduler.add(sequence(name, 2, max_new_tokens=1 if name == "a" else 3))
    first = scheduler.schedule()
    assert shape(first) == [("a", 0, 2), ("b", 0, 2)]
    assert advance(scheduler, first) == ["a"]
    assert shape(scheduler.schedule()) == [("b", 2, 1), ("c", 0, 2)]


def test_the_youngest_is_preempted_and_computed_again_from_its_first_token():
    scheduler = Scheduler(max_num_seqs=4, token_budget=64, num_pages=4, page_tokens=2)
    old, young = sequence("old", 4, max_new_tokens=5), sequence("young", 3, max_new_tokens=2)
    scheduler.add(old)
    scheduler.add(young)
    advance(scheduler, scheduler.schedule())
    assert scheduler.num_free_pages == 0
    chunks = scheduler.schedule()
    assert shape(chunks) == [("old", 4, 1)]
    assert scheduler.num_preemptions == 1
    assert (young.num_computed, young.pages, young.slot) == (0, [], None)
    while old in scheduler.running:
        advance(scheduler, chunks)
        chunks = scheduler.schedule()
    assert shape(chunks) == [("young", 0, 4)]
    assert advance(scheduler, chunks) == ["young"]
    assert scheduler.num_free_pages == 4


def test_removing_a_sequence_frees_what_it_holds():
    scheduler = Scheduler(max_num_seqs=1, token_budget=64, num_pages=8, page_tokens=2)
    running, waiting = sequence("running", 6), sequence("waiting", 6)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    assert scheduler.num_free_pages == 5
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert scheduler.num_free_pages == 8
    assert scheduler.is_idle


def test_any_traffic_ends_without_sharing_a_page_or_a_slot():
    """Whatever arrives and leaves, no two sequences hold the same page or slot, and every request ends."""
    chosen = random.Random(11)
    scheduler = Scheduler(max_num_seqs=3, token_budget=7, num_pages=9, page_tokens=3)
    names = [str(number) for number in range(60)]
    waiting = [sequence(name, chosen.randint(1, 20), chosen.randint(1, 7)) for name in names]
    ended, steps = [], 0
    while waiting or not scheduler.is_idle:
        while waiting and chosen.random() < 0.4:
            scheduler.add(waiting.pop(0))
        if scheduler.running and chosen.random() < 0.05:
            victim = chosen.choice(scheduler.running)
            scheduler.remove(victim)
            ended.append(victim.request_id)
        chunks = scheduler.schedule()
        assert sum(chunk.count for chunk in chunks) <= 7
        pages = [page for running in scheduler.running for page in running.pages]
        slots = [running.slot for running in scheduler.running]
        assert len(set(pages)) == len(pages) == 9 - scheduler.num_free_pages
        assert len(set(slots)) == len(slots) <= 3
        assert all(chunk.end <= len(chunk.sequence.pages) * 3 for chunk in chunks)
        assert all(chunk.start == chunk.sequence.num_computed for chunk in chunks)
        ended += advance(scheduler, chunks)
        steps += 1
        assert steps < 5000
    assert sorted(ended) == sorted(names)
    assert scheduler.num_preemptions > 0
    assert scheduler.num_free_pages == 9
