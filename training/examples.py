"""Training examples of the target, and its loss."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional

from ..export.draft_training.torch_llama import CausalLM
from ..export.draft_training.training_batches import Batch, Example, ExampleSource, in_epochs
from .corpus import Pair
from .tasks import TaskMaker
from .tokenizer import ChatCodec


def task_examples(pairs: Sequence[Pair], maker: TaskMaker, codec: ChatCodec, seed: int) -> ExampleSource:
    """Conversations that are made anew from the pairs in every epoch; place k always gives the same conversation."""

    def source(places: range) -> list[Example]:
        chats = [
            maker.make(pairs[index], random.Random(f"{seed}/{place}"))
            for place, index in zip(places, in_epochs(len(pairs), seed, places), strict=True)
        ]
        return [Example(ids, answer) for ids, answer in codec.encode_chats(chats)]

    return source


def answer_cross_entropy(
    model: CausalLM, lead_weight: float = 1.0, label_smoothing: float = 0.0
) -> Callable[[Batch], Tensor]:
    """Mean cross-entropy of the answer tokens, with weight `lead_weight` for the first few of an answer.

    Logits are computed at these positions only.
    """

    def loss(batch: Batch) -> Tensor:
        logits = model.head(model.hidden(batch.ids)[batch.predicts])
        each = functional.cross_entropy(
            logits.float(), batch.targets, label_smoothing=label_smoothing, reduction="none"
        )
        weight = 1.0 + (lead_weight - 1.0) * batch.leads
        return (each * weight).sum() / weight.sum()

    return loss
