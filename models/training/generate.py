"""Greedy answers for many requests at once: prompts of one length form a batch, finished rows leave it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .model import CausalLM, LayerCache
from .precision import autocast


@torch.no_grad()
def greedy(
    model: CausalLM, prompts: Sequence[Sequence[int]], *, end: int, max_new: int = 96, batch: int = 128
) -> list[list[int]]:
    """Greedy continuations of token-id prompts, each ending with (and including) `end` unless cut at `max_new`.

    Grouping by prompt length keeps rows aligned without padding.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    answers: list[list[int]] = [[] for _ in prompts]
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    for length, members in sorted(by_length.items()):
        room = min(max_new, model.shape.max_position_embeddings - length)
        for start in range(0, len(members), batch):
            rows = members[start : start + batch]
            ids = torch.tensor([list(prompts[row]) for row in rows], device=device)
            cache = [LayerCache() for _ in range(model.shape.num_hidden_layers)]
            for _ in range(room):
                with autocast(device):
                    logits = model.head(model.hidden(ids, cache)[:, -1])
                chosen = logits.float().argmax(-1)
                for row, token in zip(rows, chosen.tolist(), strict=True):
                    answers[row].append(token)
                going = chosen != end
                if not bool(going.any()):
                    break
                if not bool(going.all()):
                    rows = [row for row, more in zip(rows, going.tolist(), strict=True) if more]
                    for layer in cache:
                        layer.keep(going)
                ids = chosen[going][:, None]
    model.train(was_training)
    return answers
