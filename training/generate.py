"""Greedy answers for many requests at once: prompts of one length form a batch, finished rows leave it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .model import CausalLM, LayerCache
from .precision import autocast


def greedy(
    model: CausalLM, prompts: Sequence[Sequence[int]], *, end: int, max_new: int = 96, batch: int = 256
) -> list[list[int]]:
    """Greedy continuations of token-id prompts, each ending with (and including) `end` unless cut at `max_new`.

    Prompts of similar length form a batch. A prompt that fills the context gets no answer.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    # One autocast region around everything: it keeps the bfloat16 copies of the weights for as long as it lasts.
    with torch.no_grad(), autocast(device):
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            length = len(prompts[rows[-1]])
            # Padding goes in front: rotary attention sees distances only, so shifted positions change nothing.
            padding = [length - len(prompts[row]) for row in rows]
            ids = torch.tensor([[end] * pad + list(prompts[row]) for pad, row in zip(padding, rows, strict=True)])
            room = min(max_new, model.shape.max_position_embeddings - length)
            made = _continue(model, ids.to(device), torch.tensor(padding, device=device), end, room)
            for row, answer in zip(rows, made, strict=True):
                answers[row] = answer
    model.train(was_training)
    return answers


def _continue(model: CausalLM, ids: Tensor, padding: Tensor, end: int, room: int) -> list[list[int]]:
    """Greedy continuations, at most `room` tokens each, of prompts int64 [B, T] with padding [B] ids in front."""
    answers: list[list[int]] = [[] for _ in range(ids.shape[0])]
    going = list(range(ids.shape[0]))
    cache = [LayerCache() for _ in range(model.shape.num_hidden_layers)]
    for _ in range(room):
        chosen = model.head(model.hidden(ids, cache, padding)[:, -1]).float().argmax(-1)
        for row, token in zip(going, chosen.tolist(), strict=True):
            answers[row].append(token)
        more = chosen != end
        going = [row for row in going if answers[row][-1] != end]
        if not going:
            break
        if len(going) < len(chosen):
            padding = padding[more]
            for layer in cache:
                layer.keep(more)
        ids = chosen[more][:, None]
    return answers
