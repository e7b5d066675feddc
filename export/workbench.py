"""What an export asks of whoever runs models: text in a model's own words, the time of passes, accepted drafts.

The exporter makes bundles and never opens the runtime; whoever starts an export hands in these functions, which run a
bundle the way its users will. The command line's are in `edge/workbench.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int64]


class Writer(Protocol):
    """Lets a model write."""

    def __call__(
        self, bundle: Path, tokens: int, longest: int, seed: int, done: Callable[[float], None] = ...
    ) -> list[TokenArray]:
        """Texts that the model samples at temperature 1, in its chat template where it has one.

        Args:
            bundle: the model's folder.
            tokens: how many there are to be in all, at least.
            longest: most tokens of one text.
            seed: the same seed gives the same texts.
            done: hears the share that is written, 0 to 1.

        Returns:
            Token ids, int64 [n], template and prompt included.
        """
        ...


class Reader(Protocol):
    """Reads a text file the way a model reads it."""

    def __call__(self, bundle: Path, file: Path, tokens: int, longest: int) -> list[TokenArray]:
        """Texts of a file: each line's `messages` in the chat template where it is a .jsonl file, else the text itself,
        cut into pieces of `longest` tokens.

        At least as many as have `tokens` in all, or all there are; conversations are taken from all over the file.

        Raises:
            InputError: the file cannot be read, or holds no text.
        """
        ...


class Stopwatch(Protocol):
    """Times passes of several models in turn, so that a busy machine disturbs all alike."""

    def __call__(self, bundles: Sequence[Path], rows: Sequence[int], rounds: int) -> list[Mapping[int, float]]:
        """Seconds of a pass by its rows, for each bundle, the logits of all rows included.

        Of the passes of `rounds` turns the faster third is averaged: what disturbs a pass makes it slower. The weights
        lie in memory as they do when the model is used: packed for this machine and mapped.
        """
        ...


class NodeStopwatch(Protocol):
    """Times passes of several models in turn, and what the nodes of their graphs take of them."""

    @property
    def conditions(self) -> str:
        """What the times depend on besides the models: machine, device, threads, version of the runtime."""
        ...

    def __call__(self, bundles: Sequence[Path], rows: Sequence[int], rounds: int) -> list[Mapping[int, PassTimes]]:
        """Times of a pass by its rows, for each bundle; like those of `Stopwatch`."""
        ...


@dataclass(frozen=True)
class PassTimes:
    """Where the time of a pass goes."""

    seconds: float
    """Of the pass as it is run in use."""
    nodes: Mapping[str, float]
    """Seconds by node, from passes of their own. Measuring adds a few microseconds to each, whatever it computes."""


class Judge(Protocol):
    """Measures how much speculation gains with a bundle's own draft."""

    def __call__(self, bundle: Path, texts: Sequence[TokenArray]) -> Acceptance:
        """Replay the texts; each ends with what a model answered."""
        ...


@dataclass(frozen=True)
class Acceptance:
    """How a draft did."""

    agreement: float
    """Share of positions where target and draft prefer the same token."""
    tokens_per_pass: float
    """Mean tokens of a round."""
    plain_seconds: float
    """Of a token without speculation."""
    speculative_seconds: float
    """Of a token with it."""


@dataclass(frozen=True)
class Workbench:
    """All of them together."""

    write: Writer
    read: Reader
    time: Stopwatch
    time_nodes: NodeStopwatch
    judge: Judge
    machine: Mapping[str, str]
    """Names and versions that times depend on, for a reader."""
