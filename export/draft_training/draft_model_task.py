"""A draft model as something to train: batches, loss and acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .acceptance import CHAIN, AnswerAcceptance, acceptance_figures
from .losses import Labels, LossKind, draft_loss
from .torch_llama import CausalLM
from .training_batches import Batch, Example, collate
from .training_loop import autocast

_EVALUATED: Final = 32
"""Number of answers of an evaluating pass."""


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
def model_acceptance(model: CausalLM, examples: Sequence[Example], pad: int) -> dict[str, float]:
    """Figures of a draft model on the target's greedy answers; see `acceptance_figures`.

    As long as a chain is right, its tokens are those of the answer, so one pass over an answer tells all chains.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    answers: list[AnswerAcceptance] = []
    ordered = sorted(examples, key=lambda example: len(example.ids))
    for start in range(0, len(ordered), _EVALUATED):
        chosen = ordered[start : start + _EVALUATED]
        batch = collate(chosen, pad).to(device)
        with autocast(device):
            logits = model.head(model.hidden(batch.ids)[batch.predicts])
        matches, expected = compare(logits, labels_of(batch))
        place = 0
        for example in chosen:
            end = place + sum(example.answer)
            answers.append(AnswerAcceptance(np.tile(matches[place:end], (CHAIN, 1)), expected[place:end]))
            place = end
    model.train(was_training)
    return acceptance_figures(answers)


def compare(logits: Tensor, labels: Labels) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Compare logits [N, V] with labels: whether the likeliest token is the target's [N], and sums of min(p, q) [N]."""
    probs = logits.float().softmax(-1).gather(1, labels.top_ids)
    expected = torch.minimum(probs, labels.top_probs.to(probs.dtype)).sum(-1)
    return (logits.argmax(-1) == labels.tokens).cpu().numpy(), expected.double().cpu().numpy()
