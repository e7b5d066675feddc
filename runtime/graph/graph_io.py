"""Description of a decoder graph's inputs and outputs.

`introspect` derives it from a loaded graph. The graphs that edge-run exports follow `docs/graph-contract.md`. Other
graphs may keep their cache in tensors that grow with every pass, take a mask over the tokens instead of lengths, or
compute more logits than needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...models.manifest import BlockDiffusion
from ..kv.buffers import CacheTensorType
from ..kv.state_buffers import StateType

Floats: TypeAlias = npt.NDArray[np.float32]

GraphForm: TypeAlias = tuple[Path, bytes | None]
"""A file with weights beside it, and the serialized graph where it is another one than in the file."""
BASE_GRAPH: Final = "base"
"""Name of the model's own graph, which runs every pass that no further graph takes; see `graph_choice.py`."""
SLOTS_TOGETHER: Final = 256
"""Number of slots by which the part of a cache moves on that layers with a sliding window take. Sums over slots are
formed in blocks of at most so many, so leaving out hidden ones by this number changes no bit (docs/log.md, "Caches of
sliding layers")."""


NUMPY_TYPES: Final[Mapping[str, np.dtype[Any]]] = {
    f"tensor({name})": np.dtype({"float": "float32"}.get(name, name))
    for name in ("float", "float16", "double", "int8", "uint8", "int32", "int64", "bool")
}
"""NumPy dtypes by ONNX Runtime's names of tensor types."""


@dataclass(frozen=True)
class GraphValue:
    """One graph input or output."""

    name: str
    type: str
    """ONNX type string, such as `tensor(float)`."""
    shape: tuple[int | str | None, ...]
    """Dimensions: sizes, symbolic names, or None where the graph says nothing."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype of the elements; that of objects where NumPy has none for them."""
        return NUMPY_TYPES.get(self.type, np.dtype(object))


class InputRole(Enum):
    """Meaning of a graph input. A pass has M new tokens after T - M cached ones; the batch size is one."""

    TOKENS = auto()
    """`[1, M]`: ids of the new tokens."""
    POSITIONS = auto()
    """`[1, M]`, or `[k, 1, M]` with k equal rows (rotary positions of text in models that also take images)."""
    MASK = auto()
    """`[1, T]`: ones for cached and new tokens."""
    BIAS = auto()
    """`[1, 1, M, T]`: which tokens each new token attends to, as a number added to attention scores or as a boolean."""
    LAST_SLOT = auto()
    """`T - 1` (`seqlens_k` of GroupQueryAttention)."""
    TOTAL_LENGTH = auto()
    """`T`."""
    LOGIT_POSITIONS = auto()
    """`[R]`: indices of the new tokens whose logits are computed (`logit_rows`)."""
    LOGITS_TO_KEEP = auto()
    """Number of trailing new tokens whose logits are computed."""
    USE_CACHE = auto()
    """Whether there are cached tokens: merged graphs have a branch for each case."""


class LogitsMode(StrEnum):
    """Which token positions of a pass get logits."""

    SELECTED = auto()
    """Those listed in an input (`InputRole.LOGIT_POSITIONS`)."""
    ALL = auto()
    LAST_N = auto()
    """The trailing ones, as many as an input says (`InputRole.LOGITS_TO_KEEP`)."""
    LAST = auto()


class CacheMode(StrEnum):
    """How a graph returns its cache."""

    IN_PLACE = auto()
    """Past and present are one buffer with free slots after the cached ones."""
    GROWING = auto()
    """Present is a new tensor: past followed by the new slots."""
    NEW_SLOTS = auto()
    """Present holds the new slots only, which the caller stores. All shapes are fixed."""


@dataclass(frozen=True)
class CacheTensor:
    """One cache tensor of a graph."""

    past: str
    """Name of the input."""
    present: str
    """Name of the output."""
    tensor_type: CacheTensorType
    window: int = 0
    """Number of tokens of the layer's sliding window, where passes take its cache from `first_slot` on; else 0."""


@dataclass(frozen=True)
class StateTensor:
    """A state of one layer without attention, or its updates; see `cache_io`."""

    past: str
    """Name of the input."""
    present: str
    """Name of the output."""
    layer: int
    kind: str
    """Kind of layer that keeps it, such as "convolution" or "recurrent"; states of one type are of one kind."""
    advanced: str | None = None
    """Name of the output with the state before the pass, to which the graph has applied updates; see `StatePart`."""


@dataclass(frozen=True)
class TopOutputs:
    """Outputs with the highest logits of each row, highest first; of equal ones the lowest id comes first."""

    ids: GraphValue
    """Token ids, `[R, count]`."""
    values: GraphValue
    """Their logits, `[R, count]`."""
    count: int


@dataclass(frozen=True)
class HeadInputs:
    """Inputs of a draft head besides a decoder's inputs. The first tokens of a pass have features of the target, the
    others have states that the head computed for the token before."""

    features: GraphValue
    """`[F, f]`: the target's features, of the first F tokens."""
    states: GraphValue
    """`[M - F, d]`: the head's own states, of the others."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of features and of states."""
        return int(self.features.shape[-1] or 0), int(self.states.shape[-1] or 0)


@dataclass(frozen=True)
class GraphIO:
    """The inputs and outputs of a decoder graph."""

    vocab_size: int
    """Size of the last dimension of the logits."""
    input_vocab: int
    """Number of token embeddings; larger than `vocab_size` for a draft model with a trimmed LM head."""
    cache: tuple[CacheTensor, ...]
    layers: int
    cache_mode: CacheMode
    capacity: int | None
    """Number of cache slots if the graph fixes it."""
    inputs: Mapping[InputRole, GraphValue]
    logits: GraphValue
    logits_mode: LogitsMode
    causal: bool
    """Whether the graph itself applies the causal mask among new tokens; otherwise `InputRole.BIAS` has to."""
    blocks: BlockDiffusion | None = None
    """How blocks of masked tokens are filled; None for a model that generates token by token."""
    supports_wide_passes: bool = True
    """Whether a pass may have several new tokens after cached ones. Some graphs were traced with a single new token
    and let new tokens attend to each other in both directions."""
    window_biases: Mapping[int, GraphValue] = field(default_factory=dict)
    """Biases of layers with a sliding window, by its size in tokens: as `InputRole.BIAS`, but each also hides what
    lies at least so many positions back."""
    hidden_states: GraphValue | None = None
    """The states that the LM head reads, where the graph gives them: `[1, M, d]` of all new tokens, or `[R, d]` of
    those in `InputRole.LOGIT_POSITIONS`."""
    draft_features: GraphValue | None = None
    """Hidden states for a draft head, where the graph gives them: `[M, f]` of all new tokens, or `[R, f]` of those in
    `InputRole.LOGIT_POSITIONS`."""
    head: HeadInputs | None = None
    """The inputs of a draft head; None for a whole language model."""
    widths: tuple[int, ...] | None = None
    """Numbers of new tokens that passes may have if shapes are fixed, ascending: a pass over fewer tokens than its
    width is padded and takes as long as a full one. None if any number is possible."""

    states: tuple[StateTensor, ...] = ()
    """States of layers without attention, by type and layer; empty for a model with attention alone."""
    state_types: tuple[StateType, ...] = ()
    """Types of these states, in the same order."""
    top: TopOutputs | None = None
    """The highest logits, where the graph gives them of the tokens in `InputRole.LOGIT_POSITIONS`."""
    widest_pass: int | None = None
    """Number of tokens above which the device was seen to compute passes wrongly; wider ones run in parts."""
    trees_correct: bool = True
    """False where the device was seen to compute token trees wrongly, for example because it ignores positions."""

    @property
    def hidden_size(self) -> int | None:
        """Size of a hidden state; None if the graph does not give them."""
        return _last_size(self.hidden_states)

    @property
    def feature_size(self) -> int | None:
        """Number of features of a token for a draft head; None if the graph does not give them."""
        return _last_size(self.draft_features)

    @property
    def supports_verification(self) -> bool:
        """Whether one pass can verify several draft tokens."""
        return self.supports_wide_passes and self.logits_mode is not LogitsMode.LAST

    @property
    def supports_trees(self) -> bool:
        """Whether the draft tokens of a pass may form a tree."""
        # Siblings share a position, so positions must be an input.
        inputs = InputRole.BIAS in self.inputs and InputRole.POSITIONS in self.inputs
        return self.supports_verification and inputs and self.trees_correct and not self.states

    @property
    def tensor_types(self) -> tuple[CacheTensorType, ...]:
        """Types of the cache tensors, in order."""
        return tuple(tensor.tensor_type for tensor in self.cache)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of cache per token, over all layers."""
        return sum(tensor_type.slot_bytes for tensor_type in self.tensor_types)


def first_slot(window: int, base: int) -> int:
    """The first cache slot that a layer with a sliding window takes in a pass behind `base` cached tokens.

    It follows from `base` alone, so that passes are repeatable.
    """
    return max(base - window + 1, 0) // SLOTS_TOGETHER * SLOTS_TOGETHER


def _last_size(value: GraphValue | None) -> int | None:
    size = None if value is None else value.shape[-1]
    return size if isinstance(size, int) else None
