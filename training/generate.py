"""Greedy decoding of many requests in batches of similar prompt length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..export.draft_training.torch_llama import CausalLM, LayerCache
from ..export.draft_training.training_loop import autocast


def greedy(
    model: CausalLM, prompts: Sequence[Sequence[int]], *, end: int, max_new: int = 96, batch: int = 256
) -> list[list[int]]:
    """Decode greedily after prompts of token ids.

    Finished sequences leave their batch. A prompt that fills the context gets no answer.

    Returns:
        The new token ids of each prompt, ending with `end` unless cut at `max_new`.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    # One autocast region around everything: it keeps the bfloat16 copies of the weights for as long as it lasts.
    with torch.no_grad(), autocast(device):
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            length = len(prompts[chosen[-1]])
            # Padding is in front: rotary attention depends on distances only, so shifted positions do not matter.
            padding = [length - len(prompts[index]) for index in chosen]
            ids = torch.tensor([[end] * pad + list(prompts[index]) for pad, index in zip(padding, chosen, strict=True)])
            room = min(max_new, model.shape.max_position_embeddings - length)
            continued = _continue(model, ids.to(device), torch.tensor(padding, device=device), end, room)
            for index, answer in zip(chosen, continued, strict=True):
                answers[index] = answer
    model.train(was_training)
    return answers


def _continue(model: CausalLM, ids: Tensor, padding: Tensor, end: int, room: int) -> list[list[int]]:
    """Decode at most `room` tokens after prompts int64 [B, T] that begin with `padding` [B] ids."""
    answers: list[list[int]] = [[] for _ in range(ids.shape[0])]
    unfinished = list(range(ids.shape[0]))
    cache = [LayerCache() for _ in range(model.shape.num_hidden_layers)]
    for _ in range(room):
        chosen = model.head(model.hidden(ids, cache, padding)[:, -1]).float().argmax(-1)
        for index, token in zip(unfinished, chosen.tolist(), strict=True):
            answers[index].append(token)
        kept = chosen != end
        unfinished = [index for index in unfinished if answers[index][-1] != end]
        if not unfinished:
            break
        if len(unfinished) < len(chosen):
            padding = padding[kept]
            for layer in cache:
                layer.keep(kept)
        ids = chosen[kept][:, None]
    return answers
