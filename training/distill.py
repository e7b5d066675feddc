"""Distillation of a draft model, which learns the target's own greedy answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save
from torch import Tensor

from ..models.atomic import write_atomically
from .batches import Batch, Example, ExampleSource, collate, in_epochs
from .corpus import Pair
from .generate import greedy
from .model import CausalLM
from .precision import autocast
from .tasks import TaskMaker
from .tokenizer import ChatCodec
from .train import LossFunction

TOP_TOKENS = 8
"""Number of tokens whose probabilities are stored: they have nearly all of the target's probability mass."""


def distillation_requests(pairs: Sequence[Pair], maker: TaskMaker, count: int, seed: int) -> list[str]:
    """Make `count` distinct requests from the pairs, of all kinds that the target was trained on."""
    requests: dict[str, None] = {}
    for place, index in enumerate(in_epochs(len(pairs), seed, range(2 * count))):
        requests.setdefault(maker.make(pairs[index], random.Random(f"distill/{seed}/{place}"))[0].user)
        if len(requests) == count:
            break
    return list(requests)


@torch.no_grad()
def answer_requests(target: CausalLM, codec: ChatCodec, requests: Sequence[str], max_new: int = 48) -> list[Example]:
    """Let the target answer requests.

    Returns:
        Its greedy answers, with its `TOP_TOKENS` most likely tokens at every answer position.
    """
    prompts = codec.encode_prompts(requests)
    context = target.shape.max_position_embeddings
    prompts = [prompt for prompt in prompts if len(prompt) < context]
    answers = greedy(target, prompts, end=codec.end, max_new=max_new, batch=512)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(answers[i]))
    examples = []
    device = next(target.parameters()).device
    target.eval()
    for start in range(0, len(order), 128):
        unlabelled = [
            Example(prompts[i] + answers[i], [False] * len(prompts[i]) + [True] * len(answers[i]))
            for i in order[start : start + 128]
        ]
        batch = collate(unlabelled, codec.end).to(device)
        with autocast(device):
            logits = target.head(target.hidden(batch.ids)[batch.predicts]).float()
        top = logits.log_softmax(-1).topk(TOP_TOKENS)
        top_probs = (top.values.exp() / top.values.exp().sum(-1, keepdim=True)).cpu().numpy()
        top_ids = top.indices.cpu().numpy()
        place = 0
        for example in unlabelled:
            end = place + sum(example.answer)
            examples.append(Example(example.ids, example.answer, top_ids[place:end], top_probs[place:end]))
            place = end
    return examples


def save_examples(path: Path, examples: Sequence[Example]) -> None:
    """Write answered examples to one safetensors file, so that a resumed distillation does not compute them again."""
    arrays = {
        "ids": np.concatenate([np.asarray(example.ids, dtype=np.int32) for example in examples]),
        "answer": np.concatenate([np.asarray(example.answer, dtype=np.uint8) for example in examples]),
        "lengths": np.asarray([len(example.ids) for example in examples], dtype=np.int32),
        "top_ids": np.concatenate([e.top_ids for e in examples if e.top_ids is not None]).astype(np.int32),
        "top_probs": np.concatenate([e.top_probs for e in examples if e.top_probs is not None]).astype(np.float32),
    }
    write_atomically(path, save(arrays))


def load_examples(path: Path) -> list[Example]:
    """Read what `save_examples` wrote."""
    arrays = load_file(path)
    examples = []
    at = answered = 0
    for length in arrays["lengths"].tolist():
        answer = arrays["answer"][at : at + length].astype(bool).tolist()
        count = sum(answer)
        examples.append(
            Example(
                arrays["ids"][at : at + length].tolist(),
                answer,
                arrays["top_ids"][answered : answered + count].astype(np.int64),
                arrays["top_probs"][answered : answered + count],
            )
        )
        at, answered = at + length, answered + count
    return examples


def fixed_examples(examples: Sequence[Example], seed: int) -> ExampleSource:
    """The same examples in every epoch, in a new order."""

    def source(places: range) -> list[Example]:
        return [examples[index] for index in in_epochs(len(examples), seed, places)]

    return source


def distillation_loss(hard: float = 0.5) -> LossFunction:
    """Cross-entropy with the target's distribution (its top tokens), and with its greedy token at weight `hard`.

    The second part raises greedy agreement, which makes a draft useful; the first one calibrates its probabilities.
    """

    def loss(model: CausalLM, batch: Batch) -> Tensor:
        if batch.top_ids is None or batch.top_probs is None:
            raise ValueError("distillation needs examples with a teacher's probabilities")
        logprobs = model.head(model.hidden(batch.ids)[batch.predicts]).float().log_softmax(-1)
        soft = -(batch.top_probs * logprobs.gather(1, batch.top_ids)).sum(-1).mean()
        exact = -logprobs.gather(1, batch.targets[:, None]).mean()
        return (1 - hard) * soft + hard * exact

    return loss


@torch.no_grad()
def agreement(draft: CausalLM, examples: Sequence[Example], pad: int) -> float:
    """Fraction of the target's greedy answer tokens that are also the draft's top token after the same prefix."""
    was_training = draft.training
    draft.eval()
    device = next(draft.parameters()).device
    same = count = 0
    ordered = sorted(examples, key=lambda example: len(example.ids))
    for start in range(0, len(ordered), 64):
        batch = collate(ordered[start : start + 64], pad).to(device)
        with autocast(device):
            top = draft.head(draft.hidden(batch.ids)[batch.predicts]).argmax(-1)
        same += int((top == batch.targets).sum())
        count += batch.targets.numel()
    draft.train(was_training)
    return same / max(1, count)
