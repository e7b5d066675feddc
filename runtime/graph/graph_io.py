"""What a decoder graph's inputs and outputs are: the description that the rest of the runtime works with.

`introspect` finds it by looking at a loaded graph. The graphs that edge-run exports follow `docs/graph-contract.md`;
others keep their cache in tensors that grow, take a mask over the tokens instead of lengths, or score more rows than
one would like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

from ..kv.arena import TensorForm


@dataclass(frozen=True)
class GraphValue:
    """One graph input or output: ONNX type string such as `tensor(float)`, dimensions as numbers or symbols."""

    name: str
    type: str
    shape: tuple[int | str | None, ...]


class Role(Enum):
    """What a graph input is told. M new rows meet T - M cached ones; shapes are those of a batch of one."""

    TOKENS = auto()
    """`[1, M]`: ids of the new tokens."""
    POSITIONS = auto()
    """`[1, M]`, or `[k, 1, M]` with k equal rows (rotary positions of text in models that also see images)."""
    MASK = auto()
    """`[1, T]`: ones, of cached and new rows."""
    BIAS = auto()
    """`[1, 1, M, T]`: what each new row sees, as a number added to scores or as a truth value."""
    LAST_ROW = auto()
    """`T - 1` (GroupQueryAttention's `seqlens_k`)."""
    TOTAL = auto()
    """`T`."""
    LOGIT_ROWS = auto()
    """`[R]`: which of the M rows are scored."""
    LOGITS_TO_KEEP = auto()
    """How many of the last rows are scored."""
    USE_CACHE = auto()
    """Whether there are cached rows: merged graphs have a branch for each case."""


class LogitsMode(Enum):
    """Of which new rows a pass gives logits."""

    CHOSEN = auto()
    """Those asked for (`Role.LOGIT_ROWS`)."""
    ALL = auto()
    SUFFIX = auto()
    """As many of the last ones as asked for (`Role.LOGITS_TO_KEEP`)."""
    LAST = auto()


class CacheMode(Enum):
    """How a graph hands its cache back."""

    IN_PLACE = auto()
    """Past and present are one buffer with room behind the rows."""
    GROWING = auto()
    """Present is past with the new rows behind."""


@dataclass(frozen=True)
class CacheTensor:
    """One of a graph's cache tensors."""

    past: str
    """Name of the input."""
    present: str
    """Name of the output."""
    form: TensorForm


@dataclass(frozen=True)
class GraphIO:
    """The ports of a decoder graph."""

    vocab_size: int
    """Tokens the head tells apart: the last dimension of the logits."""
    input_vocab: int
    """Tokens the embedding has; more than `vocab_size` where the head of a draft model is trimmed."""
    cache: tuple[CacheTensor, ...]
    layers: int
    sharing: CacheMode
    capacity: int | None
    """Rows of a cache whose size the graph fixes."""
    inputs: Mapping[Role, GraphValue]
    logits: GraphValue
    scores: LogitsMode
    causal: bool
    """Whether masking the new rows from each other is the graph's own doing; `Role.BIAS` says it otherwise."""
    wide: bool = True
    """Whether several new rows may follow cached ones in one pass. Some graphs were traced with a single one, and let
    new rows see each other."""

    @property
    def takes_positions(self) -> bool:
        """Whether positions are an input: tree siblings can then share one."""
        return Role.POSITIONS in self.inputs

    @property
    def takes_bias(self) -> bool:
        """Whether what each row sees is an input."""
        return Role.BIAS in self.inputs

    @property
    def verifies(self) -> bool:
        """Whether one pass can score several guesses."""
        return self.wide and self.scores is not LogitsMode.LAST

    @property
    def trees(self) -> bool:
        """Whether these may be a tree."""
        return self.verifies and self.takes_bias and self.takes_positions

    @property
    def forms(self) -> tuple[TensorForm, ...]:
        """Of the cache tensors, in order."""
        return tuple(tensor.form for tensor in self.cache)

    @property
    def row_bytes(self) -> int:
        """Bytes of cache a token takes."""
        return sum(form.row_bytes for form in self.forms)


_ELEMENTS: Mapping[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(double)": np.dtype(np.float64),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(uint8)": np.dtype(np.uint8),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(bool)": np.dtype(np.bool_),
}


def element_type(port: GraphValue) -> np.dtype[Any] | None:
    """NumPy's name for the type of a port's elements; None where it has none."""
    return _ELEMENTS.get(port.type)
