"""What a checkpoint is worth: exact commands, right first words, and loss on reference commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from .batches import Example, collate
from .corpus import Pair, first_word
from .generate import greedy
from .model import CausalLM
from .precision import autocast
from .tasks import Turn
from .tokenizer import ChatCodec


@dataclass(frozen=True)
class Score:
    """How answers compare with the reference commands; `exact` and `first_word` are shares between 0 and 1."""

    count: int
    exact: float
    first_word: float


def answer_all(model: CausalLM, codec: ChatCodec, requests: Sequence[str], max_new: int = 96) -> list[str]:
    """The model's greedy answers to requests."""
    answers = greedy(model, codec.encode_prompts(requests), end=codec.end, max_new=max_new)
    return [codec.decode(ids) for ids in answers]


def compare(pairs: Sequence[Pair], answers: Sequence[str]) -> Score:
    """Score answers against the commands of their pairs; surrounding space does not count."""
    if not pairs:
        raise ValueError("nothing to score")
    exact = sum(answer.strip() == pair.command.strip() for pair, answer in zip(pairs, answers, strict=True))
    first = sum(first_word(answer) == first_word(pair.command) for pair, answer in zip(pairs, answers, strict=True))
    return Score(len(pairs), exact / len(pairs), first / len(pairs))


def by_group(pairs: Sequence[Pair], answers: Sequence[str]) -> dict[str, Score]:
    """Scores of everything, of the first 150, and of each source."""
    rows = list(zip(pairs, answers, strict=True))
    groups = {"all": rows, "first_150": rows[:150]}
    for source in sorted({pair.source for pair in pairs}):
        groups[source] = [row for row in rows if row[0].source == source]
    return {name: compare(*zip(*group, strict=True)) for name, group in groups.items()}


@torch.no_grad()
def answer_loss(model: CausalLM, codec: ChatCodec, pairs: Sequence[Pair], rows: int = 64) -> float:
    """Mean cross-entropy in nats over all tokens of the reference commands, end token included."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    encoded = codec.encode_chats([[Turn(pair.request, pair.command)] for pair in pairs])
    examples = [Example(ids, answer).clipped(model.shape.max_position_embeddings) for ids, answer in encoded]
    examples.sort(key=lambda example: len(example.ids))
    total, count = 0.0, 0
    for start in range(0, len(examples), rows):
        batch = collate(examples[start : start + rows], codec.end).to(device)
        with autocast(device):
            logits = model.head(model.hidden(batch.ids)[batch.predicts])
        total += float(functional.cross_entropy(logits.float(), batch.targets, reduction="sum"))
        count += batch.targets.numel()
    model.train(was_training)
    return total / max(1, count)


def validate(model: CausalLM, codec: ChatCodec, pairs: Sequence[Pair]) -> dict[str, float]:
    """Validation figures that cost seconds; `score` is what checkpoints are selected by.

    The first word decides whether an answer is of any use, and it keeps improving after the loss on whole commands
    has begun to rise, so it selects.
    """
    answers = answer_all(model, codec, [pair.request for pair in pairs], max_new=8)
    return {"score": compare(pairs, answers).first_word, "loss": answer_loss(model, codec, pairs)}
