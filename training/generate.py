"""Greedy decoding of many requests in batches of similar prompt length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from ..export.draft_training.torch_llama import CausalLM
from ..export.draft_training.training_loop import autocast


def greedy(
    model: CausalLM, prompts: Sequence[Sequence[int]], *, end: int, max_new: int = 96, batch: int = 256
) -> list[list[int]]:
    """Decode greedily after prompts of token ids.

    Every token is computed from the whole text, without a cache: texts are short, and finished ones leave their batch.
    A prompt that fills the context gets no answer.

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
            unfinished = order[start : start + batch]
            for _ in range(min(max_new, model.shape.max_position_embeddings - len(prompts[unfinished[-1]]))):
                texts = [torch.tensor([*prompts[index], *answers[index]]) for index in unfinished]
                hidden = model.hidden(pad_sequence(texts, batch_first=True, padding_value=end).to(device))
                last = hidden[torch.arange(len(texts)), [len(text) - 1 for text in texts]]
                for index, token in zip(unfinished, model.head(last).float().argmax(-1).tolist(), strict=True):
                    answers[index].append(token)
                unfinished = [index for index in unfinished if answers[index][-1] != end]
                if not unfinished:
                    break
    model.train(was_training)
    return answers
