# SPDX-License-Identifier: Apache-2.0
"""An engine that runs out of pages preempts and recomputes: same tokens and bits as one that has enough."""

import dataclasses

from sampling import PLAIN, TRUNCATED, assert_same_completions, request, serve

REQUESTS, NEW_TOKENS, SPARE = 16, 60, 4


def test_too_few_pages_change_no_bit(scale, bridge, rollout, engine_with, measure):
    vllm_config = rollout._engine.vllm_config
    page_tokens = vllm_config.cache_config.block_size
    groups = rollout._engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    # Every request starts within its first page of each group and grows into a second page of keys and values.
    pages = 1 + REQUESTS * len(groups) + SPARE
    requests = [
        request(f"grows {n}", page_tokens - 30 + n, scale.vocabulary, NEW_TOKENS, (PLAIN, TRUNCATED)[n % 2])
        for n in range(REQUESTS)
    ]
    own = dataclasses.replace(bridge, rollout=dataclasses.replace(bridge.rollout, own_process=True))
    tight = engine_with(own, kv_cache_gib=scale.kv_gib, num_gpu_blocks_override=pages)
    found = serve(tight, requests, a_step=REQUESTS)
    preempted = sum("prefill" in completion.phases[1:] for completion in found.values())
    measure(what="too few pages", pages=pages, page_tokens=page_tokens, requests=REQUESTS, preempted=preempted)
    assert preempted, "nothing was preempted: the engine had enough pages"
    assert_same_completions(found, serve(rollout, requests, a_step=REQUESTS), "too few pages and enough")
