"""Checks that an upgraded graph computes what its source computes.

There are two checks, as for an export from a checkpoint (`export.check.parity`), with the source graph as reference:

1. Is the graph correct? Both run with the weights of the source and float activations (accuracy level 1). They must
   agree to float rounding (`TOLERANCE`; half precision: `HALF_TOLERANCE`) in one pass over random tokens, in single
   steps over the cache, and over a small token tree, each of whose branches the source reads as a separate sequence.
2. What did rounding the weights cost? Mean KL(source || upgraded) and top-1 agreement over these tokens are reported. A
   correlation below `MIN_CORRELATION` fails the upgrade, since rounding does not explain it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from onnx import ModelProto, TensorProto, helper

from ...models.progress import Progress, silent
from ..check.contract_session import TOLERANCE, ContractSession, ModelSession, require_close
from ..check.parity import Parity, require_correlation, with_float_activations
from ..check.reference import TokenArray
from ..checkpoint.source import Float32Array
from ..graph import inputs_outputs
from .contract_inputs import AttentionShape
from .decoder_io import TOKENS, CacheTensor, PassShape, input_value
from .editable import EditableGraph
from .graph_parts import Array, in_place

HALF_TOLERANCE: Final = 5e-2
"""`TOLERANCE` for a source that computes in half precision."""
MIN_CORRELATION: Final = 0.5
"""Smallest correlation of the shipped logits with the source's. Rounding to 4 bits lowers it by a hundredth for a
trained model and by an eighth for random weights in 24 layers; with misplaced weights it is about 0."""

_SAME_POSITION: Final = 1e-2
"""Largest difference of a logit that different kernels for different pass widths explain, in half precision too."""
_PROMPT: Final = 16
_STEPS: Final = 4
POSITIONS_READ: Final = _PROMPT + _STEPS
"""Number of positions that the check reads, even if the context is shorter."""


class Reference(NamedTuple):
    """Logits of the source graph for two sequences that share their first `_PROMPT` tokens."""

    tokens: TokenArray
    """Token ids of the longer sequence, [_PROMPT + _STEPS]."""
    sibling: int
    """Last token id of the shorter sequence, which has one token more than the shared part."""
    logits: Float32Array
    """Logits after every token of the longer sequence, [tokens, vocabulary]."""
    sibling_logits: Float32Array
    """Logits after the shorter sequence, [vocabulary]."""
    half: bool
    """Whether the source computes in half precision."""

    @property
    def tolerance(self) -> float:
        """Largest difference of a logit that float rounding explains."""
        return (HALF_TOLERANCE if self.half else TOLERANCE) * max(1.0, float(self.logits.std(dtype=np.float64)))


def run_reference(
    graph: EditableGraph, caches: tuple[CacheTensor, ...], shape: AttentionShape, vocab_size: int
) -> Reference:
    """Run the unchanged source graph, except for float activations and caches that keep all slots.

    Args:
        graph: the source after `identify_io` and before any other pass.
        caches: its caches.
        shape: the shape of them.
        vocab_size: number of tokens that both embedding and LM head have.

    Raises:
        ExportError: ONNX Runtime cannot run it.
    """
    for node in graph.nodes_of("GroupQueryAttention"):
        graph.set_attribute(node, "sliding_window_cache", None)
    half = graph.element_type(caches[0].past) != TensorProto.FLOAT
    session = ModelSession(with_float_activations(graph.model(in_place)), graph.folder)
    outputs = [inputs_outputs.LOGITS, *(cache.present for cache in caches)]
    empty: dict[str, Array] = {}
    """Caches without slots, or with the number of slots that the graph fixes."""
    for cache in caches:
        info = graph.inputs[cache.past].type.tensor_type
        slots = info.shape.dim[2].dim_value if len(info.shape.dim) == 4 else 0
        dtype = helper.tensor_dtype_to_np_dtype(info.elem_type)
        empty[cache.past] = np.zeros((1, shape.kv_heads, slots, shape.head_dim), dtype)

    def run(tokens: TokenArray, cached: Mapping[str, Array], past: int) -> tuple[Float32Array, dict[str, Array]]:
        lengths = PassShape(len(tokens), past)
        feeds = {name: input_value(info, lengths) for name, info in graph.inputs.items()} | dict(cached)
        feeds[TOKENS] = tokens[None].astype(feeds[TOKENS].dtype)
        logits, *presents = session.run(outputs, feeds)
        flat = logits.reshape(-1, logits.shape[-1]).astype(np.float32)
        return flat, dict(zip(empty, presents, strict=True))

    def logits_of(tokens: TokenArray) -> Float32Array:
        """Logits after every token, [tokens, vocabulary].

        Tokens are read one by one if the graph returns logits of the last position only, or was traced with one token
        and so does not mask later positions: then the logits of the first position depend on what follows.
        """
        logits, _ = run(tokens, empty, 0)
        alone, _ = run(tokens[:1], empty, 0)
        tolerance = _SAME_POSITION * max(1.0, float(logits.std(dtype=np.float64)))
        if len(logits) == len(tokens) and np.abs(logits[0] - alone[0]).max() <= tolerance:
            return logits
        cached, steps = empty, []
        for index in range(len(tokens)):
            logits, cached = run(tokens[index : index + 1], cached, index)
            steps.append(logits[-1])
        return np.stack(steps)

    drawn = np.random.default_rng(0).integers(0, vocab_size, _PROMPT + _STEPS + 1)
    tokens, sibling = drawn[:-1], int(drawn[-1])
    sibling_logits = logits_of(np.append(tokens[:_PROMPT], sibling))[-1]
    return Reference(tokens, sibling, logits_of(tokens), sibling_logits, half)


def require_same(folder: Path, model: ModelProto, reference: Reference, progress: Progress = silent) -> float:
    """Compare a contract graph that has the source's weights with its source.

    Args:
        folder: folder of the model's external data.
        model: the graph; it is run with float activations.
        reference: logits of the source.
        progress: receives the stage "checking".

    Returns:
        The largest difference of a logit.

    Raises:
        ExportError: they differ by more than `Reference.tolerance`.
    """
    progress("checking", 0.0)
    session = ContractSession(folder, len(reference.tokens) + 2, with_float_activations(model))
    differences = [
        require_close(
            found,
            expected,
            f"the upgraded graph differs from the source {where}",
            "run the model as it is, and please report it",
            reference.tolerance,
        )
        for where, found, expected in _passes(session, reference)
    ]
    progress("checking", 0.5)
    return max(differences)


def measure(folder: Path, reference: Reference, difference: float) -> Parity:
    """Compare the bundle in `folder`, with rounded weights and activations, with its source.

    Raises:
        ExportError: its logits hardly correlate with the source's.
    """
    session = ContractSession(folder, len(reference.tokens))
    shipped = session.forward(reference.tokens, np.arange(len(reference.tokens)))
    what = "the upgraded graph's logits correlate by only {:.2f} with the source's"
    hint = "keep more bits: --weights int8, or --weights fp32"
    require_correlation(shipped, reference.logits, MIN_CORRELATION, what, hint)
    return Parity.of(difference, reference.logits, shipped)


def _passes(session: ContractSession, reference: Reference) -> Iterator[tuple[str, Float32Array, Float32Array]]:
    """Yield in which way tokens were read, their logits, and those of the source.

    The tree has the next token of the longer sequence, its sibling, and the child of the former.
    """
    tokens, logits = reference.tokens, reference.logits
    yield "in one pass", session.forward(tokens, np.arange(len(tokens))[::-1].copy())[::-1], logits
    session.length = _PROMPT
    steps = [session.forward(tokens[each : each + 1], np.array([0]))[0] for each in range(_PROMPT, len(tokens))]
    yield "step by step", np.stack(steps), logits[_PROMPT:]
    session.length = _PROMPT
    drafted = np.array([tokens[_PROMPT], reference.sibling, tokens[_PROMPT + 1]])
    seen = np.hstack([np.ones((3, _PROMPT), np.bool_), np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], np.bool_)])
    bias = np.where(seen, np.float32(0), np.float32(-1e9))
    found = session.run(drafted, np.array([_PROMPT, _PROMPT, _PROMPT + 1]), bias, np.arange(3))
    yield "over a token tree", found, np.stack([logits[_PROMPT], reference.sibling_logits, logits[_PROMPT + 1]])
