# SPDX-License-Identifier: Apache-2.0
"""Group-relative policy optimisation: advantages of a group, and the clipped objective of a token.

T packed tokens, G groups, K members of a group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

STD_FLOOR = 1e-4


@dataclass(frozen=True)
class Advantages:
    """Advantages of all groups of a step."""

    values_GK: Tensor
    """float32; 0 where the member is invalid or its group was dropped."""
    kept_G: Tensor
    """bool; a dropped group has fewer than two valid members or no variance, so it teaches nothing."""

    @property
    def dropped(self) -> int:
        """Count the dropped groups."""
        return int((~self.kept_G).sum())


def group_advantages(rewards_GK: Tensor, valid_GK: Tensor | None = None) -> Advantages:
    """Centre and scale every reward by its own group.

    advantage = (r - mean) / (population std + 1e-4) over the group's valid members, in float64, then float32.

    Args:
        rewards_GK: finite rewards of any float dtype; the value of an invalid member is ignored.
        valid_GK: bool; False takes a member (a failed sandbox, say) out of the statistics and of the loss. None: all.

    Returns:
        Advantages, with zero-variance groups dropped.

    Raises:
        ValueError: shapes differ, or a valid reward is not finite.

    Source:
        Shao et al. 2024, DeepSeekMath, section 4.1; the floor is Megatron-LM's.
    """
    valid_GK = torch.ones_like(rewards_GK, dtype=torch.bool) if valid_GK is None else valid_GK
    _check_rewards(rewards_GK, valid_GK)
    rewards_GK = torch.where(valid_GK, rewards_GK.double(), 0.0)
    members_G1 = valid_GK.sum(dim=1, keepdim=True)
    count_G1 = members_G1.clamp(min=1)
    centred_GK = torch.where(valid_GK, rewards_GK - rewards_GK.sum(dim=1, keepdim=True) / count_G1, 0.0)
    std_G1 = (centred_GK.square().sum(dim=1, keepdim=True) / count_G1).sqrt()
    kept_G = _has_variance(rewards_GK, valid_GK) & (members_G1[:, 0] > 1)
    values_GK = torch.where(kept_G[:, None], centred_GK / (std_G1 + STD_FLOOR), 0.0)
    return Advantages(values_GK.float(), kept_G)


def _has_variance(rewards_GK: Tensor, valid_GK: Tensor) -> Tensor:
    # Equal rewards are compared, not subtracted: a mean of equal decimals may round, and its deviation be non-zero.
    highest_G = torch.where(valid_GK, rewards_GK, -torch.inf).amax(dim=1)
    lowest_G = torch.where(valid_GK, rewards_GK, torch.inf).amin(dim=1)
    return highest_G > lowest_G


def _check_rewards(rewards_GK: Tensor, valid_GK: Tensor) -> None:
    if rewards_GK.dim() != 2 or valid_GK.shape != rewards_GK.shape or valid_GK.dtype != torch.bool:
        raise ValueError(
            f"rewards {tuple(rewards_GK.shape)} with valid {valid_GK.dtype} {tuple(valid_GK.shape)}: both must be "
            "[groups, members], valid of bool, because advantages are relative to a group; pad short groups as invalid"
        )
    wrong = (valid_GK & ~rewards_GK.isfinite()).nonzero().tolist()
    if wrong:
        raise ValueError(
            f"reward of (group, member) {wrong[0]} is {rewards_GK[tuple(wrong[0])].item()} ({len(wrong)} such): every "
            "valid reward must be finite; mark a member that has no reward as invalid"
        )


@dataclass(frozen=True, kw_only=True)
class ObjectiveRule:
    """The numbers of the objective."""

    clip_lower: float
    """How far below one the ratio still counts."""
    clip_upper: float
    """How far above."""
    kl_beta: float = 0.0
    """Weight of the KL to a reference policy; 0 leaves it out."""
    entropy_weight: float = 0.0
    """Weight of an entropy bonus; 0 leaves it out."""


@dataclass(frozen=True)
class Objective:
    """What the clipped objective gives for each token."""

    loss_T: Tensor
    """float32, to be minimised; not yet masked or averaged."""
    ratio_T: Tensor
    """float32, detached: exp(current - old)."""
    clipped_T: Tensor
    """bool: the clipped term won, so this token has no policy gradient."""
    kl_T: Tensor
    """float32, detached: k3 estimate of KL(current, reference); 0 without a reference."""


def clipped_objective(
    rule: ObjectiveRule,
    current_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    entropy_T: Tensor,
    reference_T: Tensor | None = None,
) -> Objective:
    """Compute the loss of every token.

    ratio = exp(current - old)
    loss = -weight * min(ratio * A, clip(ratio, 1 - lower, 1 + upper) * A) + kl_beta * (exp(d) - d - 1)
    with d = reference - current

    Args:
        rule: the numbers.
        current_T: float32 logprobs with gradient.
        old_T: float32 logprobs of the same weights that sampled, by the trainer's forward.
        advantage_T: float32.
        weight_T: float32 correction of the sampling distribution; exactly 1 when trainer and rollout agree.
        entropy_T: float32 entropy of the distribution that each token was drawn from.
        reference_T: float32 logprobs of the reference policy; needed if and only if there is a KL term.

    Source:
        Schulman et al. 2017, PPO, equation 7; k3 is Schulman's estimator, as used in DeepSeekMath, equation 4.
    """
    if (rule.kl_beta != 0.0) != (reference_T is not None):
        given = "no reference logprobs" if reference_T is None else "reference logprobs"
        raise ValueError(f"kl_beta {rule.kl_beta} with {given}: a KL term needs both, a run without one needs neither")
    ratio_T = (current_T - old_T).exp()
    free_T = ratio_T * advantage_T
    bound_T = ratio_T.clamp(1.0 - rule.clip_lower, 1.0 + rule.clip_upper) * advantage_T
    loss_T = -weight_T * torch.minimum(free_T, bound_T)
    kl_T = torch.zeros_like(old_T)
    if reference_T is not None:
        distance_T = reference_T - current_T
        kl_T = distance_T.exp() - distance_T - 1.0
        loss_T = loss_T + rule.kl_beta * kl_T
    if rule.entropy_weight:
        loss_T = loss_T + rule.entropy_weight * _entropy_loss(current_T, ratio_T, entropy_T)
    return Objective(loss_T, ratio_T.detach(), (bound_T < free_T).detach(), kl_T.detach())


def _entropy_loss(current_T: Tensor, ratio_T: Tensor, entropy_T: Tensor) -> Tensor:
    """Return zeros whose gradient is the score-function estimate of the gradient of -entropy.

    gradient = ratio * (current + entropy) * (gradient of current): the logprob itself, with its mean as the baseline
    """
    surprise_T = (ratio_T * (current_T + entropy_T)).detach()
    return surprise_T * (current_T - current_T.detach())
