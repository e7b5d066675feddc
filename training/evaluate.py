"""Evaluation of a checkpoint: exact commands, correct first words, loss."""

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
    """Comparison of answers with the reference commands."""

    count: int
    exact: float
    """Fraction of answers that equal the reference."""
    first_word: float
    """Fraction of answers whose first word is that of the reference."""


def answer_all(model: CausalLM, codec: ChatCodec, requests: Sequence[str], max_new: int = 96) -> list[str]:
    """The model's greedy answers to requests."""
    answers = greedy(model, codec.encode_prompts(requests), end=codec.end, max_new=max_new)
    return [codec.decode(ids) for ids in answers]


def compare(pairs: Sequence[Pair], answers: Sequence[str]) -> Score:
    """Compare answers with the commands of their pairs, ignoring surrounding space."""
    if not pairs:
        raise ValueError("there are no answers to compare")
    exact = sum(answer.strip() == pair.command.strip() for pair, answer in zip(pairs, answers, strict=True))
    first = sum(first_word(answer) == first_word(pair.command) for pair, answer in zip(pairs, answers, strict=True))
    return Score(len(pairs), exact / len(pairs), first / len(pairs))


def by_group(pairs: Sequence[Pair], answers: Sequence[str]) -> dict[str, Score]:
    """Scores of all pairs, of the first 150, and of each source."""
    answered = list(zip(pairs, answers, strict=True))
    groups = {"all": answered, "first_150": answered[:150]}
    for source in sorted({pair.source for pair in pairs}):
        groups[source] = [each for each in answered if each[0].source == source]
    return {name: compare(*zip(*group, strict=True)) for name, group in groups.items()}


@torch.no_grad()
def answer_loss(model: CausalLM, codec: ChatCodec, pairs: Sequence[Pair], batch_size: int = 64) -> float:
    """Mean cross-entropy, in nats per token, of the reference commands including the end token."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    encoded = codec.encode_chats([[Turn(pair.request, pair.command)] for pair in pairs])
    examples = [Example(ids, answer).clipped(model.shape.max_position_embeddings) for ids, answer in encoded]
    examples.sort(key=lambda example: len(example.ids))
    total, count = 0.0, 0
    for start in range(0, len(examples), batch_size):
        batch = collate(examples[start : start + batch_size], codec.end).to(device)
        with autocast(device):
            logits = model.head(model.hidden(batch.ids)[batch.predicts])
        total += float(functional.cross_entropy(logits.float(), batch.targets, reduction="sum"))
        count += batch.targets.numel()
    model.train(was_training)
    return total / max(1, count)


def validate(model: CausalLM, codec: ChatCodec, pairs: Sequence[Pair]) -> dict[str, float]:
    """Compute the validation figures of a training run, within seconds.

    Checkpoints are selected by `score`, the fraction of correct first words. The first word decides whether an answer
    is useful, and it keeps improving after the loss on whole commands has begun to rise.
    """
    answers = answer_all(model, codec, [pair.request for pair in pairs], max_new=8)
    return {"score": compare(pairs, answers).first_word, "loss": answer_loss(model, codec, pairs)}
