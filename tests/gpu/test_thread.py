# SPDX-License-Identifier: Apache-2.0
"""An engine that another thread steps, as it serves many episodes, gives the bits of one that is stepped here."""

import asyncio
import faulthandler

import torch
from sampling import PLAIN, TRUNCATED, assert_same_completions, request, serve

from megatron.vllm_forward.rl.shared_engine import SharedEngine

REQUESTS, SECONDS = 16, 150


def test_a_thread_that_steps_changes_no_bit(scale, rollout):
    requests = [
        request(f"thread {n}", 20 + 60 * n, scale.vocabulary, 40, (PLAIN, TRUNCATED)[n % 2]) for n in range(REQUESTS)
    ]

    async def run():
        async with SharedEngine(rollout, lambda: torch.cuda.set_device(0)) as engine:
            return await asyncio.gather(*(engine.sample(one) for one in requests))

    # The thread comes first: what is compiled and loaded at first use must be so there too.
    # A step that never ends cannot be interrupted: say where it stands, and end the process.
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        found = asyncio.run(run())
    finally:
        faulthandler.cancel_dump_traceback_later()
    want = serve(rollout, requests, a_step=REQUESTS)
    assert_same_completions({one.request_id: one for one in found}, want, "stepped by a thread and here")
