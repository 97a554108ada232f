# SPDX-License-Identifier: Apache-2.0
"""vLLM general plugin: an engine whose `additional_config` has "vllm_forward_bridge" runs the contract's forward.

vLLM calls `register` in every process. It registers nothing globally: stock engines stay stock. An engine that is
switched on gets the worker, model, attention, Mamba state and sampler of this package by explicit engine arguments.
"""

import functools


def register() -> None:
    """Let EngineArgs complete the arguments of a switched-on engine; repeat calls change nothing."""
    # vLLM loads plugins while it is itself being imported, so nothing of it may be imported above.
    from vllm.engine.arg_utils import EngineArgs

    from vllm_forward_bridge.vllm_plugin.switch import complete, is_on

    original = EngineArgs.create_engine_config
    if hasattr(original, "__wrapped__") and getattr(original, "completes_bridge", False):
        return

    @functools.wraps(original)
    def create_engine_config(self, *args, **kwargs):
        if is_on(self.additional_config):
            complete(self)
        return original(self, *args, **kwargs)

    create_engine_config.completes_bridge = True
    EngineArgs.create_engine_config = create_engine_config
