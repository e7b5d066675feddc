"""Losses that teach a draft its target's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional

_SMALLEST_DEVIATION = 1e-4


class LossKind(StrEnum):
    """What is minimized at every position of the target's answers."""

    CROSS_ENTROPY = "ce"
    """Cross-entropy of the token that the target wrote."""
    KL = "kl"
    """KL divergence of the draft from the target's distribution."""
    TVD = "tvd++"
    """Total variation distance, whose complement is the probability of acceptance, with normalized rewards."""


@dataclass(frozen=True)
class Labels:
    """What the target has at N positions, in the token ids of the draft's head."""

    tokens: Tensor
    """The tokens that it wrote, int64 [N]; -1 where the draft's head has none."""
    top_ids: Tensor
    """Its most likely tokens, int64 [N, k]; what the head does not have is 0 with probability 0."""
    top_probs: Tensor
    """Their probabilities, float32 [N, k]."""


def draft_loss(kind: LossKind, logits: Tensor, labels: Labels, hard: float = 0.0) -> Tensor:
    """The mean loss of a draft's logits [N, V].

    Args:
        kind: the loss.
        logits: float [N, V].
        labels: what the target has at these positions.
        hard: weight of the cross-entropy, 0 to 1, beside KL. It raises greedy agreement, which makes a draft useful;
            the distribution calibrates its probabilities.
    """
    logprobs = logits.float().log_softmax(-1)
    if kind is LossKind.TVD:
        return total_variation(logprobs, labels)
    written = functional.nll_loss(logprobs, labels.tokens, ignore_index=-1, reduction="sum")
    exact = written / (labels.tokens >= 0).sum().clamp(min=1)
    if kind is LossKind.CROSS_ENTROPY:
        return exact
    mass = labels.top_probs.sum(-1, keepdim=True)
    probs = labels.top_probs / mass.clamp(min=1e-9)
    divergence = (torch.xlogy(probs, probs) - probs * logprobs.gather(1, labels.top_ids)).sum(-1)
    soft = divergence.sum() / (mass > 0).sum().clamp(min=1)
    return (1 - hard) * soft + hard * exact


def total_variation(logprobs: Tensor, labels: Labels) -> Tensor:
    """A loss whose gradient is that of TVD++ for a draft's log-probabilities [N, V].

    With p the target's distribution, q the draft's and the reward r(x) = 1 where p(x) > q(x), the gradient of the total
    variation distance is -E_q[r(x) grad log q(x)], a policy gradient. TVD++ normalizes the rewards by their mean and
    standard deviation over the batch (Goyal et al., "Direct Alignment of Draft Model for Speculative Decoding",
    arXiv:2403.00858). The expectation is over all tokens here instead of a few samples of q, so that the mean changes
    nothing and the result is the gradient of the distance, divided by the deviation. Only the gradient has a meaning.
    """
    probs = logprobs.detach().exp()
    target = torch.zeros_like(probs).scatter_add_(1, labels.top_ids, labels.top_probs.to(probs.dtype))
    reward = (target > probs).to(probs.dtype)
    mean = (probs * reward).sum(-1).mean()
    deviation = (mean * (1 - mean)).sqrt().clamp(min=_SMALLEST_DEVIATION)
    return -(probs * (reward - mean) / deviation * logprobs).sum(-1).mean()
