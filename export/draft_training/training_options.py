"""Options of training a draft, as `edge-run train-draft` has them; they need no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from ...runtime.arguments.argument_types import OptionRecord, option

MOST_HELD_OUT: Final = 128
HELD_OUT_SHARE: Final = 10
"""One conversation in so many is held out."""


class HeadChoice(StrEnum):
    """Values of `--head`."""

    EAGLE3 = "eagle3"


class LossKind(StrEnum):
    """What is minimized at every position of the target's answers."""

    CROSS_ENTROPY = "ce"
    """Cross-entropy of the token that the target wrote."""
    KL = "kl"
    """KL divergence of the draft from the target's distribution."""
    TVD = "tvd++"
    """Total variation distance, whose complement is the probability of acceptance, with normalized rewards."""


@dataclass(frozen=True)
class DraftTrainingOptions(OptionRecord):
    """What is trained, on which answers, and how long."""

    head: HeadChoice | None = option(
        None, "Train a head on the target's hidden states.", choices=HeadChoice, unset="a small model of its own"
    )
    loss: LossKind = option(
        LossKind.KL,
        "ce: the target's own tokens; kl: its probabilities; tvd++: the rate of acceptance, for a draft that "
        "is already good (--init).",
        choices=LossKind,
    )
    layers: int = option(2, "Layers of a draft model.", metavar="N", least=1)
    hidden_size: int | None = option(
        None, "Hidden size of a draft model.", metavar="N", least=32, unset="two fifths of the target's"
    )
    vocabulary: int = option(
        32_000, "Tokens of a head: the target's most frequent ones.", flags=("--draft-vocab",), metavar="N", least=2
    )
    depth: int = option(4, "Number of tokens of a chain with which a head is trained.", metavar="N", least=1, most=16)
    init: Path | None = option(None, "Draft checkpoint to start from.", metavar="DIR", unset="random weights")
    round_to: str | None = option(
        None, "Train a draft model for a weight format, such as 4/128.", flags=("--round",), metavar="BITS/BLOCK"
    )
    max_tokens: int = option(
        256, "Most tokens of an answer of the target.", flags=("-n", "--max-tokens"), metavar="N", least=2
    )
    temperature: float = option(
        0.0, "Temperature of the target's answers.", flags=("-t", "--temperature"), metavar="T", least=0
    )
    limit: int | None = option(None, "Most conversations to take.", metavar="N", least=2, unset="all")
    held_out_count: int | None = option(
        None,
        "Conversations on which acceptance is measured instead.",
        flags=("--held-out",),
        metavar="N",
        least=1,
        unset=f"one in {HELD_OUT_SHARE}, at most {MOST_HELD_OUT}",
    )
    steps: int = option(2000, "Most training steps.", metavar="N", least=1)
    minutes: float | None = option(
        None, "Time limit of the training, in minutes.", metavar="N", within="(0, 100000]", unset="none"
    )
    batch_tokens: int = option(4096, "Tokens of a step.", metavar="N", least=1)
    learning_rate: float = option(3e-3, "Highest learning rate.", metavar="RATE", least=0)
    evaluate_every: int = option(200, "Steps between two measurements of acceptance.", metavar="N", least=1)
    seed: int = option(0, "Seed of answers, weights and batches.", metavar="N", least=0)
    device: str | None = option(None, "Where to train: cpu or cuda.", metavar="NAME", unset="a GPU if PyTorch sees one")
