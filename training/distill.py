"""Distils a draft from a target: the draft learns to repeat the target's own greedy answers."""

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

# A target's top token and its few rivals carry nearly all of its distribution; storing more buys nothing.
LIKELY = 8


def distillation_requests(pairs: Sequence[Pair], maker: TaskMaker, count: int, seed: int) -> list[str]:
    """`count` distinct opening requests made from the pairs, in all the kinds the target was trained on."""
    requests: dict[str, None] = {}
    for place, index in enumerate(in_epochs(len(pairs), seed, range(2 * count))):
        requests.setdefault(maker.make(pairs[index], random.Random(f"distill/{seed}/{place}"))[0].user)
        if len(requests) == count:
            break
    return list(requests)


@torch.no_grad()
def teach(target: CausalLM, codec: ChatCodec, requests: Sequence[str], max_new: int = 48) -> list[Example]:
    """The target's greedy answers as examples, with its `LIKELY` most likely tokens at every answer position."""
    prompts = codec.encode_prompts(requests)
    context = target.shape.max_position_embeddings
    prompts = [prompt for prompt in prompts if len(prompt) < context]
    answers = greedy(target, prompts, end=codec.end, max_new=max_new, batch=512)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(answers[i]))
    examples = []
    device = next(target.parameters()).device
    target.eval()
    for start in range(0, len(order), 128):
        bare = [
            Example(prompts[i] + answers[i], [False] * len(prompts[i]) + [True] * len(answers[i]))
            for i in order[start : start + 128]
        ]
        batch = collate(bare, codec.end).to(device)
        with autocast(device):
            logits = target.head(target.hidden(batch.ids)[batch.predicts]).float()
        top = logits.log_softmax(-1).topk(LIKELY)
        share = (top.values.exp() / top.values.exp().sum(-1, keepdim=True)).cpu().numpy()
        likely = top.indices.cpu().numpy()
        place = 0
        for example in bare:
            end = place + sum(example.answer)
            examples.append(Example(example.ids, example.answer, likely[place:end], share[place:end]))
            place = end
    return examples


def save_examples(path: Path, examples: Sequence[Example]) -> None:
    """Write taught examples to one safetensors file, so that an interrupted distillation need not ask again."""
    arrays = {
        "ids": np.concatenate([np.asarray(example.ids, dtype=np.int32) for example in examples]),
        "answer": np.concatenate([np.asarray(example.answer, dtype=np.uint8) for example in examples]),
        "lengths": np.asarray([len(example.ids) for example in examples], dtype=np.int32),
        "likely": np.concatenate([e.likely for e in examples if e.likely is not None]).astype(np.int32),
        "share": np.concatenate([e.share for e in examples if e.share is not None]).astype(np.float32),
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
                arrays["likely"][answered : answered + count].astype(np.int64),
                arrays["share"][answered : answered + count],
            )
        )
        at, answered = at + length, answered + count
    return examples


def fixed_examples(examples: Sequence[Example], seed: int) -> ExampleSource:
    """The same examples in every epoch, in a new order each time."""

    def source(places: range) -> list[Example]:
        return [examples[index] for index in in_epochs(len(examples), seed, places)]

    return source


def distillation_loss(hard: float = 0.5) -> LossFunction:
    """Cross-entropy with the target's distribution (its likeliest tokens), and with its greedy token at weight `hard`.

    Greedy agreement is what makes a draft useful, hence the second part; the first tells the draft how sure to be.
    """

    def loss(model: CausalLM, batch: Batch) -> Tensor:
        if batch.likely is None or batch.share is None:
            raise ValueError("distillation needs examples with a teacher's probabilities")
        logs = model.head(model.hidden(batch.ids)[batch.predicts]).float().log_softmax(-1)
        soft = -(batch.share * logs.gather(1, batch.likely)).sum(-1).mean()
        exact = -logs.gather(1, batch.targets[:, None]).mean()
        return (1 - hard) * soft + hard * exact

    return loss


@torch.no_grad()
def agreement(draft: CausalLM, taught: Sequence[Example], pad: int) -> float:
    """Share of the target's greedy answer tokens that are also the draft's top token after the same prefix."""
    was_training = draft.training
    draft.eval()
    device = next(draft.parameters()).device
    same = count = 0
    ordered = sorted(taught, key=lambda example: len(example.ids))
    for start in range(0, len(ordered), 64):
        batch = collate(ordered[start : start + 64], pad).to(device)
        with autocast(device):
            top = draft.head(draft.hidden(batch.ids)[batch.predicts]).argmax(-1)
        same += int((top == batch.targets).sum())
        count += batch.targets.numel()
    draft.train(was_training)
    return same / max(1, count)
