# SPDX-License-Identifier: Apache-2.0
"""Choices of a GRPO run, read from Megatron's own `--grpo-*` and `--rl-default-*` flags."""

import argparse
from dataclasses import dataclass

from megatron.vllm_forward.rl.grpo import ObjectiveRule
from vllm_forward_bridge.rollout.protocol import SamplingParams


@dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    """What one GRPO step does; the bridge's own choices stay in the TOML file."""

    prompts_per_step: int
    group_size: int
    row_tokens: int
    """Most tokens of a packed row: Megatron's sequence length."""
    sampling: SamplingParams
    """Its seed is the run's; each request gets one of its own, derived from it."""
    iterations: int = 1
    """Updates on the same trajectories; from the second on the ratio differs from one."""
    clip_lower: float = 0.2
    clip_upper: float = 0.2
    kl_beta: float = 0.0
    """Weight of the KL to the policy that the run started from; 0 leaves it out."""
    entropy_weight: float = 0.0
    """Weight of an entropy bonus; 0 leaves it out."""

    @property
    def rule(self) -> ObjectiveRule:
        """Return the numbers of the objective."""
        return ObjectiveRule(
            clip_lower=self.clip_lower,
            clip_upper=self.clip_upper,
            kl_beta=self.kl_beta,
            entropy_weight=self.entropy_weight,
        )

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}; at least {least} is needed, {why}"
            for name, least, why in _LEAST
            if getattr(self, name) < least
        ]
        if self.clip_lower >= 1:
            problems.append(f"clip_lower is {self.clip_lower}; less than 1 is needed, a ratio is positive")
        if self.sampling.temperature == 0:
            problems.append("temperature is 0; a group of greedy samples has no variance, so nothing could be learned")
        if problems:
            raise ValueError("these GRPO settings cannot train:\n  - " + "\n  - ".join(problems))


_LEAST = (
    ("prompts_per_step", 1, "each prompt is a group"),
    ("group_size", 2, "an advantage is relative to other members"),
    ("row_tokens", 1, "rows hold the trajectories"),
    ("iterations", 1, "each is an update"),
    ("clip_lower", 0, "it bounds a distance"),
    ("clip_upper", 0, "it bounds a distance"),
    ("kl_beta", 0, "a negative weight would reward drift"),
    ("entropy_weight", 0, "a negative weight would reward collapse"),
)


def add_grpo_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give Megatron's RL flags defaults that the loop accepts, and add those that Megatron lacks."""
    group = parser.add_argument_group("grpo")
    group.add_argument("--rl-max-new-tokens", type=int, default=16, help="Sampled tokens of a response at most.")
    group.add_argument("--rl-journal", required=True, help="File that gets one JSON line a step.")
    group.add_argument("--rl-certificate", help="File to write if every token of the run was equal.")
    parser.set_defaults(
        grpo_iterations=1,
        grpo_clamp_eps_lower=0.2,
        grpo_clamp_eps_upper=0.2,
        grpo_kl_beta=0.0,
        rl_default_top_p=1.0,
        rl_default_top_k=0,
        calculate_per_token_loss=True,
        micro_batch_size=1,
        rerun_mode="disabled",
    )
    return parser


def settings_from_args(args: argparse.Namespace, *, stop_token_ids: tuple[int, ...] = ()) -> GrpoSettings:
    """Read the settings from parsed Megatron arguments.

    Raises:
        ValueError: lists what is outside the contract; Megatron's `top_p 0` and `top_k -1`, both "off", are refused
            too, because the rollout writes "off" as 1.0 and 0.
    """
    sampling = SamplingParams(
        temperature=args.rl_default_temperature,
        top_p=args.rl_default_top_p,
        top_k=args.rl_default_top_k,
        seed=args.seed,
        max_new_tokens=args.rl_max_new_tokens,
        stop_token_ids=stop_token_ids,
    )
    return GrpoSettings(
        prompts_per_step=args.grpo_prompts_per_step,
        group_size=args.grpo_group_size,
        row_tokens=args.seq_length,
        sampling=sampling,
        iterations=args.grpo_iterations,
        clip_lower=args.grpo_clamp_eps_lower,
        clip_upper=args.grpo_clamp_eps_upper,
        kl_beta=args.grpo_kl_beta,
        entropy_weight=args.grpo_entropy_term_weight,
    )
