"""Whether an upgraded graph computes what its source does.

Two questions, as for an export from a checkpoint (`export.parity`), with the source graph for a reference:

1. Is the graph the model? Both run with the weights of the source and float activations (accuracy level 1). They must
   agree to float rounding (`TOLERANCE`; half precision: `HALF_TOLERANCE`) in one pass over random tokens, in single
   steps over the cache, and over a small token tree, each of whose branches the source reads as a text of its own.
2. What did rounding cost? Where weights were rounded: mean KL(source || upgraded) and top-1 agreement over the same
   tokens, reported; a breach of `LEAST_CORRELATION` fails the upgrade, since no rounding explains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper

from ...errors import ExportError
from ..check.contract_session import CacheShape, ContractSession, ModelSession
from ..check.float_activations import with_float_activations
from ..check.parity import Parity, mean_kl
from .decoder_io import MASK, POSITIONS, TOKENS, Ports
from .edit.editable import EditableGraph
from .edit.write import InPlace
from .patterns.subgraph_probe import Moment, mask_value

TOLERANCE: Final = 1e-3
"""Largest difference of a logit, in units of the logits' spread where that exceeds 1."""
LEAST_CORRELATION: Final = 0.5
"""Of the logits as shipped with the source's. Rounding to 4 bits costs a trained model a hundredth, and one of random
weights in 24 layers an eighth; weights in wrong places leave nothing."""
HALF_TOLERANCE: Final = 5e-2
"""The same where the source computes in half precision."""

Float32Array = npt.NDArray[np.float32]
TokenArray = npt.NDArray[np.int64]

_NOTHING: Final = 1e-2
"""Difference of a logit that other kernels for other widths explain, in half precision too."""
_PROMPT: Final = 16
_STEPS: Final = 4
POSITIONS_READ: Final = _PROMPT + _STEPS
"""Positions that the check reads, whatever context is asked for."""


@dataclass(frozen=True)
class Reference:
    """What the source graph says of two texts that share their first `_PROMPT` tokens."""

    tokens: TokenArray
    """The longer text, [_PROMPT + _STEPS]."""
    sibling: int
    """The token that follows the shared part in the shorter text."""
    logits: Float32Array
    """After every token of the longer text, [tokens, vocabulary]."""
    sibling_logits: Float32Array
    """After the shorter text, [vocabulary]."""
    half: bool
    """Whether the source computes in half precision."""

    @property
    def allowed(self) -> float:
        """Largest difference of a logit that rounding explains."""
        return (HALF_TOLERANCE if self.half else TOLERANCE) * max(1.0, float(self.logits.std(dtype=np.float64)))


def reference_of(graph: EditableGraph, ports: Ports, form: CacheShape, vocabulary: int) -> Reference:
    """Run the source graph as it stands, but for float activations and sliding caches that forget nothing.

    Args:
        graph: the source after `settle_ports` and before any pass.
        ports: its inputs and outputs.
        form: its caches.
        vocabulary: tokens that embedding and head have.

    Raises:
        ExportError: ONNX Runtime does not run it.
    """
    for node in graph.nodes_of("GroupQueryAttention"):
        graph.set_attribute(node, "sliding_window_cache", None)
    source = _Source(graph, ports, form)
    drawn = np.random.default_rng(0).integers(0, vocabulary, _PROMPT + _STEPS + 1)
    tokens, sibling = drawn[:-1], int(drawn[-1])
    logits = source.logits(tokens)
    other = source.logits(np.append(tokens[:_PROMPT], sibling))[-1]
    return Reference(tokens, sibling, logits, other, source.half)


def require_same(folder: Path, form: CacheShape, model: ModelProto, reference: Reference) -> float:
    """Compare a contract graph that has the source's weights with its source; returns the largest difference.

    Args:
        folder: where the model's external data lies.
        form: its caches.
        model: the graph; its activations are made float here.
        reference: of the source.

    Raises:
        ExportError: they differ.
    """
    session = ContractSession(folder, form, len(reference.tokens) + 2, with_float_activations(model))
    differences = {
        "in one pass": _in_one_pass(session, reference),
        "step by step": _step_by_step(session, reference),
        "over a token tree": _over_a_tree(session, reference),
    }
    for what, difference in differences.items():
        if not difference <= reference.allowed:
            raise ExportError(
                f"the upgraded graph differs from the source {what} by {difference:.2g} in a logit, "
                f"{reference.allowed:.2g} is allowed",
                "run the model as it is, and please report it",
            )
    return max(differences.values())


def measure(folder: Path, form: CacheShape, reference: Reference, difference: float) -> Parity:
    """Compare the bundle in `folder`, as it is shipped, with its source.

    Raises:
        ExportError: its logits have too little to do with the source's.
    """
    session = ContractSession(folder, form, len(reference.tokens))
    shipped = session.forward(reference.tokens, np.arange(len(reference.tokens))).astype(np.float64)
    original = reference.logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # of logits that are all the same
        correlation = float(np.corrcoef(shipped.ravel(), original.ravel())[0, 1])
    if not correlation >= LEAST_CORRELATION:
        raise ExportError(
            f"the upgraded graph's logits correlate by only {correlation:.2f} with the source's",
            "keep more bits: --weights int8, or --weights fp32",
        )
    agreement = float(np.mean(shipped.argmax(-1) == original.argmax(-1)))
    return Parity(difference, mean_kl(original, shipped), agreement)


def _in_one_pass(session: ContractSession, reference: Reference) -> float:
    """A prefill of all tokens that asks for its rows in reverse."""
    session.length = 0
    rows = np.arange(len(reference.tokens))[::-1].copy()
    return _largest(session.forward(reference.tokens, rows)[::-1], reference.logits)


def _step_by_step(session: ContractSession, reference: Reference) -> float:
    session.length = _PROMPT
    steps = [
        session.forward(reference.tokens[row : row + 1], np.array([0]))[0]
        for row in range(_PROMPT, len(reference.tokens))
    ]
    return _largest(np.stack(steps), reference.logits[_PROMPT:])


def _over_a_tree(session: ContractSession, reference: Reference) -> float:
    """The tree: the longer text's next token, its sibling, and the former's child, in one pass."""
    session.length = _PROMPT
    tokens = np.array([reference.tokens[_PROMPT], reference.sibling, reference.tokens[_PROMPT + 1]])
    positions = np.array([_PROMPT, _PROMPT, _PROMPT + 1])
    seen = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], np.bool_)
    bias = np.where(np.hstack([np.ones((3, _PROMPT), np.bool_), seen]), np.float32(0), np.float32(-1e9))
    logits = session.run(tokens, positions, bias, np.arange(3))
    expected = np.stack([reference.logits[_PROMPT], reference.sibling_logits, reference.logits[_PROMPT + 1]])
    return _largest(logits, expected)


def _largest(found: Float32Array, expected: Float32Array) -> float:
    return float(np.abs(found.astype(np.float64) - expected).max())


class _Source:
    """The source graph with a cache that starts empty and grows."""

    def __init__(self, graph: EditableGraph, ports: Ports, form: CacheShape) -> None:
        self._ports = ports
        self._form = form
        self._inputs = {
            name: (helper.tensor_dtype_to_np_dtype(graph.element_type(name)), graph.shape(name) or ())
            for name in graph.inputs
        }
        self.half = graph.element_type(ports.caches[0].past) != TensorProto.FLOAT
        self._session = ModelSession(with_float_activations(graph.model(InPlace())), graph.folder)

    def logits(self, tokens: TokenArray) -> Float32Array:
        """After every token, [tokens, vocabulary].

        Read token by token where the graph gives only the last one's, or was traced with one and lets several see
        each other: then the first one's logits depend on what follows.
        """
        logits, _ = self._pass(tokens, self._empty(), 0)
        alone, _ = self._pass(tokens[:1], self._empty(), 0)
        allowed = _NOTHING * max(1.0, float(logits.std(dtype=np.float64)))
        if len(logits) == len(tokens) and np.abs(logits[0] - alone[0]).max() <= allowed:
            return logits
        caches, rows = self._empty(), []
        for index in range(len(tokens)):
            logits, caches = self._pass(tokens[index : index + 1], caches, index)
            rows.append(logits[-1])
        return np.stack(rows)

    def _pass(
        self, tokens: TokenArray, caches: Mapping[str, npt.NDArray[np.generic]], past: int
    ) -> tuple[Float32Array, dict[str, npt.NDArray[np.generic]]]:
        feeds = dict(caches)
        for name, (dtype, shape) in self._inputs.items():
            if name not in feeds:
                feeds[name] = self._value(name, shape, tokens, past).astype(dtype)
        outputs = [self._ports.logits, *(port.present for port in self._ports.caches)]
        logits, *presents = self._session.run(outputs, feeds)
        rows = logits.reshape(-1, logits.shape[-1]).astype(np.float32)
        return rows, dict(zip((port.past for port in self._ports.caches), presents, strict=True))

    def _value(self, name: str, shape: tuple[int | str, ...], tokens: TokenArray, past: int) -> npt.NDArray[np.generic]:
        total = past + len(tokens)
        if name == TOKENS:
            return tokens[None]
        if name == MASK:
            return mask_value(self._inputs[name][0], len(shape), Moment(len(tokens), past))
        if name == POSITIONS:
            positions = np.arange(past, total)
            return np.broadcast_to(positions, (3, 1, len(tokens)) if len(shape) == 3 else (1, len(tokens)))
        if "past" in name or "total" in name:  # lengths
            return np.full([extent if isinstance(extent, int) else 1 for extent in shape], total - ("past" in name))
        # A count of logits to keep, or a switch.
        return np.full([extent if isinstance(extent, int) else 1 for extent in shape], len(tokens))

    def _empty(self) -> dict[str, npt.NDArray[np.generic]]:
        """Caches without rows, or of the number that the graph fixes."""
        empty = {}
        for port in self._ports.caches:
            dtype, declared = self._inputs[port.past]
            rows = declared[2] if len(declared) == 4 and isinstance(declared[2], int) else 0
            empty[port.past] = np.zeros((1, self._form.kv_heads, rows, self._form.head_dim), dtype)
        return empty
