"""Evaluation of a checkpoint: exact commands, correct first words, loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..export.draft_training.torch_llama import CausalLM
from ..export.draft_training.training_batches import Example, collate
from ..export.draft_training.training_loop import autocast
from .corpus import Pair, first_word
from .generate import greedy
from .tasks import Turn
from .tokenizer import ChatCodec


@dataclass(frozen=True)
class Score:
    """Comparison of answers with the reference commands."""

    count: int
    exact: float
    """Fraction of answers that equal the reference."""
    first_word: float
    """Fraction of answers with the reference's first word."""


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


@torch.no_grad()
def agreement(draft: CausalLM, target: CausalLM, codec: ChatCodec, requests: Sequence[str]) -> float:
    """Fraction of the target's greedy answer tokens that are also the draft's top token after the same prefix."""
    context = target.shape.max_position_embeddings
    prompts = [prompt for prompt in codec.encode_prompts(requests) if len(prompt) < context]
    answers = greedy(target, prompts, end=codec.end, max_new=48)
    examples = [
        Example(prompt + answer, [False] * len(prompt) + [True] * len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    was_training = draft.training
    draft.eval()
    device = next(draft.parameters()).device
    same = count = 0
    examples.sort(key=lambda example: len(example.ids))
    for start in range(0, len(examples), 64):
        batch = collate(examples[start : start + 64], codec.end).to(device)
        with autocast(device):
            top = draft.head(draft.hidden(batch.ids)[batch.predicts]).argmax(-1)
        same += int((top == batch.targets).sum())
        count += batch.targets.numel()
    draft.train(was_training)
    return same / max(1, count)


def validate(model: CausalLM, codec: ChatCodec, pairs: Sequence[Pair]) -> dict[str, float]:
    """Compute the validation figures of a training run, within seconds.

    Checkpoints are selected by `first_word`, the fraction of correct first words. The first word decides whether an
    answer is useful, and it keeps improving after the loss on whole commands has begun to rise.
    """
    answers = answer_all(model, codec, [pair.request for pair in pairs], max_new=8)
    return {"first_word": compare(pairs, answers).first_word, "loss": answer_loss(model, codec, pairs)}
