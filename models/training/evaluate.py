"""What a checkpoint is worth: exact commands, right first words, loss, and how often a draft agrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .batches import collate
from .corpus import Pair, first_word
from .generate import greedy
from .model import CausalLM
from .precision import autocast
from .tasks import Turn
from .tokenizer import ChatCodec


@dataclass(frozen=True)
class Score:
    """Greedy answers compared with the reference commands; shares are between 0 and 1."""

    count: int
    exact: float
    first_word: float
    answers: list[str]


def answer_all(model: CausalLM, codec: ChatCodec, requests: Sequence[str], max_new: int = 96) -> list[str]:
    """The model's greedy answers to requests."""
    return [
        codec.decode(ids)
        for ids in greedy(model, codec.encode_prompts(requests), end=codec.end, max_new=max_new)
    ]


def score(model: CausalLM, codec: ChatCodec, pairs: Sequence[Pair], max_new: int = 96) -> Score:
    """Answer every request greedily and compare."""
    answers = answer_all(model, codec, [pair.request for pair in pairs], max_new)
    return compare(pairs, answers)


def compare(pairs: Sequence[Pair], answers: Sequence[str]) -> Score:
    """Score answers that were generated before."""
    if not pairs:
        raise ValueError("nothing to score")
    exact = sum(answer.strip() == pair.command for pair, answer in zip(pairs, answers, strict=True))
    first = sum(first_word(answer) == first_word(pair.command) for pair, answer in zip(pairs, answers, strict=True))
    return Score(len(pairs), exact / len(pairs), first / len(pairs), list(answers))


@torch.no_grad()
def answer_loss(model: CausalLM, codec: ChatCodec, pairs: Sequence[Pair], rows: int = 64) -> float:
    """Mean cross-entropy in nats over all tokens of the reference commands (end token included)."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    context = model.shape.max_position_embeddings
    encoded = codec.encode_chats([[Turn(pair.request, pair.command)] for pair in pairs])
    encoded = sorted(((ids[:context], flags[:context]) for ids, flags in encoded), key=lambda item: len(item[0]))
    total, count = 0.0, 0
    for start in range(0, len(encoded), rows):
        batch = collate(encoded[start : start + rows], codec.end).to(device)
        with autocast(device):
            logits = model.head(model.hidden(batch.ids)[batch.predicts])
        total += float(F.cross_entropy(logits.float(), batch.targets, reduction="sum"))
        count += batch.targets.numel()
    model.train(was_training)
    return total / max(1, count)


@torch.no_grad()
def agreement(target: CausalLM, draft: CausalLM, codec: ChatCodec, requests: Sequence[str]) -> float:
    """Share of the target's greedy answer tokens that are also the draft's top token, given the same prefix."""
    prompts = codec.encode_prompts(requests)
    answers = greedy(target, prompts, end=codec.end)
    examples = [
        (prompt + answer, [False] * len(prompt) + [True] * len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    examples.sort(key=lambda item: len(item[0]))
    draft.eval()
    device = next(draft.parameters()).device
    same = count = 0
    for start in range(0, len(examples), 64):
        batch = collate(examples[start : start + 64], codec.end).to(device)
        top = draft.head(draft.hidden(batch.ids)[batch.predicts]).argmax(-1)
        same += int((top == batch.targets).sum())
        count += batch.targets.numel()
    return same / max(1, count)
