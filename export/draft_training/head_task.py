"""An EAGLE-3 head as something to train: batches, loss and acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .acceptance import CHAIN, AnswerAcceptance, acceptance_figures
from .draft_model_task import compare, labels_of
from .eagle_head import EagleNetwork
from .losses import Labels, LossKind, draft_loss
from .target_states import TargetStates
from .training_batches import Batch, Example, collate
from .training_loop import autocast

_DEPTH_WEIGHT: Final = 0.8
"""Weight of a depth's loss, relative to that of the depth before, as in SpecForge."""
_EVALUATED: Final = 32


@dataclass(frozen=True)
class HeadBatch:
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
        return HeadBatch(
            self.batch.to(device), self.places.to(device), self.embedded.to(device), self.states.to(device)
        )


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
            chosen = Labels(labels.tokens[places], labels.top_ids[places], labels.top_probs[places])
            losses.append(_DEPTH_WEIGHT ** len(losses) * draft_loss(kind, logits, chosen, hard))
        return torch.stack(losses).sum()

    return loss


@torch.no_grad()
def head_acceptance(
    head: EagleNetwork, examples: Sequence[Example], source: TargetStates, pad: int
) -> dict[str, float]:
    """Figures of a head on the target's greedy answers; see `acceptance_figures`.

    As long as a chain is right, it reads the tokens of the answer, so that chains from all indices run at once.
    """
    was_training = head.training
    head.eval()
    device = next(head.parameters()).device
    answers: list[AnswerAcceptance] = []
    ordered = sorted(examples, key=lambda example: len(example.ids))
    for start in range(0, len(ordered), _EVALUATED):
        chosen = ordered[start : start + _EVALUATED]
        batch = with_states(chosen, source, pad).to(device)
        labels = head_labels(head, batch.batch)
        matches = np.zeros((CHAIN, len(labels.tokens)), np.bool_)
        expected = np.zeros(len(labels.tokens))
        with autocast(device):
            by_depth = list(_logits(head, batch, CHAIN))
        for depth, (places, logits) in enumerate(by_depth):
            some = Labels(labels.tokens[places], labels.top_ids[places], labels.top_probs[places])
            where = places.cpu().numpy()
            matches[depth, where], sums = compare(logits, some)
            if depth == 0:
                expected[where] = sums
        place = 0
        for example in chosen:
            end = place + sum(example.answer)
            answers.append(AnswerAcceptance(matches[:, place:end], expected[place:end]))
            place = end
    head.train(was_training)
    return acceptance_figures(answers)


def _logits(head: EagleNetwork, batch: HeadBatch, depths: int) -> list[tuple[Tensor, Tensor]]:
    """For each depth the answer tokens that chains predict, int64 [N], and the logits of them, [N, V]."""
    found = []
    for depth, hidden in enumerate(head.chains(batch.embedded, batch.states, depths)):
        ahead = batch.places[:, depth + 2 :]
        predicted = ahead >= 0
        found.append((ahead[predicted], head.lm_head(hidden[:, : ahead.shape[1]][predicted])))
    return found
