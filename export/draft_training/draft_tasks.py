"""What a draft is trained on and judged by: losses and acceptance of draft models and of EAGLE-3 heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from .eagle_head import EagleNetwork
from .target_data import TargetStates
from .torch_llama import CausalLM
from .training_batches import Batch, Example, collate
from .training_loop import autocast
from .training_options import LossKind

_SMALLEST_DEVIATION = 1e-4
CHAIN: Final = 4
"""Number of draft tokens of a chain whose acceptance length is reported."""
SCORE: Final = "tokens_per_pass"
"""The figure by which checkpoints are compared."""
_EVALUATED: Final = 32
"""Number of answers of an evaluating pass."""
_DEPTH_WEIGHT: Final = 0.8
"""Weight of a depth's loss, relative to the depth before, as in SpecForge."""


class Labels(NamedTuple):
    """What the target has at N positions, in the token ids of the draft's head."""

    tokens: Tensor
    """The tokens that it wrote, int64 [N]; -1 where the draft's head has none."""
    top_ids: Tensor
    """Its most likely tokens, int64 [N, k]; what the head does not have is 0 with probability 0."""
    top_probs: Tensor
    """Their probabilities, float32 [N, k]."""

    def at(self, places: Tensor) -> Labels:
        """The labels of some positions."""
        return Labels(*(each[places] for each in self))


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
    """A loss with the gradient of TVD++ for a draft's log-probabilities [N, V].

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


_Matches = tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]
"""Comparison of a draft with the n tokens of some answers, one after the other: whether a chain has token i as its
token number `depth`, if all its tokens before are right, [depth, n]; and the sum over tokens of min(p, q), the
probability that a sampled token is accepted at position i, [n]."""


def chain_passes(matches: npt.NDArray[np.bool_]) -> int:
    """Number of verifying passes that an answer takes with greedy chains.

    Each pass gives the accepted tokens of a chain and one more, which the target chooses.

    Args:
        matches: see `_Matches`; chains have as many tokens as it has rows.
    """
    depths, length = matches.shape
    place, passes = 1, 0
    while place < length:
        accepted = 0
        while accepted < depths and place + accepted < length and matches[accepted, place + accepted]:
            accepted += 1
        place += accepted + 1
        passes += 1
    return passes


def labels_of(batch: Batch) -> Labels:
    """The labels of a batch.

    Raises:
        ValueError: it has no probabilities of a target.
    """
    if batch.top_ids is None or batch.top_probs is None:
        raise ValueError("distillation needs examples with a target's probabilities")
    return Labels(batch.targets, batch.top_ids, batch.top_probs)


def model_loss(model: CausalLM, kind: LossKind, hard: float = 0.0) -> Callable[[Batch], Tensor]:
    """The loss of a draft model; logits are computed at the positions of answers only."""

    def loss(batch: Batch) -> Tensor:
        return draft_loss(kind, model.head(model.hidden(batch.ids)[batch.predicts]), labels_of(batch), hard)

    return loss


@torch.no_grad()
def _acceptance(
    draft: nn.Module, examples: Sequence[Example], compared: Callable[[Sequence[Example], torch.device], _Matches]
) -> dict[str, float]:
    """Figures of a draft on the target's greedy answers; the first token of each is given by the prompt's pass.

    Returns:
        `tokens_per_pass`: the acceptance length, mean tokens of a verifying pass with greedy chains of
        `CHAIN` tokens; `agreement`: share of positions where the first token of a chain is the target's; `acceptance`:
        mean of the sum of min(p, q).
    """
    was_training = draft.training
    draft.eval()
    device = next(draft.parameters()).device
    passes = positions = 0
    agreeing = overlap = 0.0
    ordered = sorted(examples, key=lambda example: len(example.ids))
    for start in range(0, len(ordered), _EVALUATED):
        chosen = ordered[start : start + _EVALUATED]
        with autocast(device):
            matches, expected = compared(chosen, device)
        ends = np.cumsum([sum(example.answer) for example in chosen])[:-1]
        for each, probs in zip(np.split(matches, ends, axis=1), np.split(expected, ends), strict=True):
            passes += chain_passes(each)
            positions += max(0, each.shape[1] - 1)
            agreeing += float(each[0, 1:].sum())
            overlap += float(probs[1:].sum())
    draft.train(was_training)
    return {
        SCORE: positions / max(1, passes),
        "agreement": agreeing / max(1, positions),
        "acceptance": overlap / max(1, positions),
    }


def model_acceptance(model: CausalLM, examples: Sequence[Example], pad: int) -> dict[str, float]:
    """Figures of a draft model on the target's greedy answers; see `_acceptance`.

    As long as a chain is right, its tokens are the answer's, so one pass over an answer tells all chains.
    """

    def compared(chosen: Sequence[Example], device: torch.device) -> _Matches:
        batch = collate(chosen, pad).to(device)
        matches, expected = compare(model.head(model.hidden(batch.ids)[batch.predicts]), labels_of(batch))
        return np.tile(matches, (CHAIN, 1)), expected

    return _acceptance(model, examples, compared)


def compare(logits: Tensor, labels: Labels) -> _Matches:
    """Compare logits [N, V] with labels: whether the likeliest token is the target's [N], and sums of min(p, q) [N]."""
    probs = logits.float().softmax(-1).gather(1, labels.top_ids)
    expected = torch.minimum(probs, labels.top_probs.to(probs.dtype)).sum(-1)
    return (logits.argmax(-1) == labels.tokens).cpu().numpy(), expected.double().cpu().numpy()


class HeadBatch(NamedTuple):
    """Right-padded texts with the target's embeddings and states."""

    batch: Batch
    places: Tensor
    """For each token, its place among the answer tokens of the batch, int64 [B, T]; -1 outside answers."""
    embedded: Tensor
    """float32 [B, T, C]."""
    states: Tensor
    """float32 [B, T, 3 C]."""

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return self.batch.tokens

    def to(self, device: torch.device) -> HeadBatch:
        """The same batch on `device`."""
        return self._replace(**{name: each.to(device) for name, each in self._asdict().items()})


def with_states(examples: Sequence[Example], source: TargetStates, pad: int) -> HeadBatch:
    """Pad examples, and read their states."""
    batch = collate(examples, pad)
    rows, length = batch.ids.shape
    width = source.architecture.hidden_size
    embedded, states = np.zeros((rows, length, width), np.float32), np.zeros((rows, length, 3 * width), np.float32)
    places = np.full((rows, length), -1, np.int64)
    first = 0
    for row, example in enumerate(examples):
        count = len(example.ids)
        embedded[row, :count], states[row, :count] = source.read(np.array(example.ids, np.int64))
        answer = np.flatnonzero(example.answer)
        places[row, answer] = first + np.arange(answer.size)
        first += answer.size
    return HeadBatch(batch, torch.from_numpy(places), torch.from_numpy(embedded), torch.from_numpy(states))


def head_labels(head: EagleNetwork, batch: Batch) -> Labels:
    """The labels of a batch in the head's tokens."""
    labels = labels_of(batch)
    top_ids = head.draft_tokens(labels.top_ids)
    return Labels(head.draft_tokens(labels.tokens), top_ids.clamp(min=0), labels.top_probs * (top_ids >= 0))


def head_loss(head: EagleNetwork, kind: LossKind, depths: int, hard: float = 0.0) -> Callable[[HeadBatch], Tensor]:
    """The loss of chains of `depths` tokens; a depth counts 0.8 times as much as the one before."""

    def loss(batch: HeadBatch) -> Tensor:
        labels = head_labels(head, batch.batch)
        losses: list[Tensor] = []
        for places, logits in _logits(head, batch, depths):
            if not len(places):
                continue
            losses.append(_DEPTH_WEIGHT ** len(losses) * draft_loss(kind, logits, labels.at(places), hard))
        return torch.stack(losses).sum()

    return loss


def head_acceptance(
    head: EagleNetwork, examples: Sequence[Example], source: TargetStates, pad: int
) -> dict[str, float]:
    """Figures of a head on the target's greedy answers; see `_acceptance`.

    As long as a chain is right, it reads the tokens of the answer, so that chains from all indices run at once.
    """

    def compared(chosen: Sequence[Example], device: torch.device) -> _Matches:
        batch = with_states(chosen, source, pad).to(device)
        labels = head_labels(head, batch.batch)
        matches, expected = np.zeros((CHAIN, len(labels.tokens)), np.bool_), np.zeros(len(labels.tokens))
        for depth, (places, logits) in enumerate(_logits(head, batch, CHAIN)):
            where = places.cpu().numpy()
            matches[depth, where], sums = compare(logits, labels.at(places))
            if depth == 0:
                expected[where] = sums
        return matches, expected

    return _acceptance(head, examples, compared)


def _logits(head: EagleNetwork, batch: HeadBatch, depths: int) -> list[tuple[Tensor, Tensor]]:
    """For each depth the answer tokens that chains predict, int64 [N], and the logits of them, [N, V]."""
    found = []
    for depth, hidden in enumerate(head.chains(batch.embedded, batch.states, depths)):
        ahead = batch.places[:, depth + 2 :]
        predicted = ahead >= 0
        found.append((ahead[predicted], head.lm_head(hidden[:, : ahead.shape[1]][predicted])))
    return found
