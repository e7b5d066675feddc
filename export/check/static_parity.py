"""Checks that static graphs compute what model.onnx does, within the precision of float16.

The check runs random tokens through a static graph on the CPU and compares the logits with the ones of model.onnx at
float activations, which agrees with the float64 reference (`parity`). A wrong mask, rotation or norm changes logits by
about their standard deviation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from ...models.progress import Progress
from ...runtime.graph.ort import load_session, session_options
from ..checkpoint.config import DecoderConfig
from ..npu.static_shapes import StaticShape
from .contract_session import ContractSession, export_errors, require_close
from .parity import with_float_activations

MASKED: Final = np.float16(-30000)
"""Added to the scores of slots that a token must not see: far below every score, and far from float16's limit."""
TOLERANCE: Final = 0.25
"""Largest allowed logit difference, relative to the standard deviation of the logits."""
NUM_TOKENS: Final = 24
_STAGE: Final = "checking NPU graphs"

Array = npt.NDArray[Any]


class StaticPass(NamedTuple):
    """What a pass of a static graph returned."""

    next_ids: npt.NDArray[np.int32]
    """Id of the largest logit of each token with logits, [R]."""
    logits: npt.NDArray[np.float16]
    """[R, vocabulary]."""
    new_slots: dict[str, npt.NDArray[np.float16]]
    """New keys and values by the name of their cache input, [1, kv_heads, m, head_dim] of the m tokens of the pass."""


class StaticContractSession:
    """Runs a static graph (docs/graph-contract.md) with full control of masks and positions."""

    def __init__(self, path: Path) -> None:
        """Load a graph on the CPU, and read width and capacity from its inputs.

        Raises:
            ExportError: ONNX Runtime cannot load it.
        """
        with export_errors(f"ONNX Runtime cannot load {path.name}"):
            self._session = load_session(str(path), session_options())
        shapes = {value.name: value.shape for value in self._session.get_inputs()}
        self.width: Final = int(shapes["input_ids"][1])
        self._masks = [name for name in shapes if name.startswith("attention_mask")]
        self.caches: Final = {name: tuple(shape) for name, shape in shapes.items() if name.startswith("past")}
        self.capacity: Final = int(next(iter(self.caches.values()))[2])
        self._selects_logits = "logit_rows" in shapes

    def empty_cache(self) -> dict[str, npt.NDArray[np.float16]]:
        """Cache buffers by the name of their input, zeros."""
        return {name: np.zeros(shape, np.float16) for name, shape in self.caches.items()}

    def logits_of(self, tokens: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Logits of some tokens of a text that fits into the cache, float32 [r, vocabulary].

        The graph has to be one that gives the logits of all tokens.
        """
        cache, starts = self.empty_cache(), range(0, len(tokens), self.width)
        passes = [self.extend(cache, start, tokens[start : start + self.width]).logits for start in starts]
        return np.concatenate(passes)[rows].astype(np.float32)

    def run(
        self,
        cache: dict[str, npt.NDArray[np.float16]],
        length: int,
        tokens: Sequence[int] | Array,
        positions: Sequence[int] | Array | None = None,
        sees: Array | None = None,
    ) -> StaticPass:
        """Run a pass over tokens [m], m at most the width, without writing to the cache; arguments as in `feeds`.

        Returns:
            Logits of all tokens, or of the last one where the graph has logits of one token.

        Raises:
            ExportError: the graph does not run.
        """
        count = len(tokens)
        with export_errors("the static graph cannot be run"):
            values = self._session.run(None, self.feeds(cache, length, tokens, positions, sees))
        outputs = dict(zip((value.name for value in self._session.get_outputs()), values, strict=True))
        new_slots = {name: outputs[name.replace("past_key_values", "present")][:, :, :count] for name in self.caches}
        rows = slice(None) if self._selects_logits else slice(count)
        return StaticPass(outputs["next_ids"][rows], outputs["logits"][rows], new_slots)

    def feeds(
        self,
        cache: Mapping[str, npt.NDArray[np.float16]],
        length: int,
        tokens: Sequence[int] | Array,
        positions: Sequence[int] | Array | None = None,
        sees: Array | None = None,
    ) -> dict[str, Array]:
        """The inputs of a pass by name.

        Args:
            cache: the cache buffers by the name of their input.
            length: number of committed slots in them.
            tokens: the new tokens, m at most the width.
            positions: their rotary positions [m]; None for those after the committed slots.
            sees: which new tokens each new token attends to, bool [m, m]; None for itself and all before it.
        """
        count = len(tokens)
        ids, places = np.zeros((2, 1, self.width), np.int32)
        ids[0, :count] = tokens
        places[0, :count] = np.arange(length, length + count) if positions is None else positions
        visible = np.zeros((self.width, self.capacity + self.width), np.bool_)
        visible[:count, :length] = True
        new = slice(self.capacity, self.capacity + count)
        visible[:count, new] = np.tri(count, dtype=np.bool_) if sees is None else sees
        feeds: dict[str, Array] = {"input_ids": ids, "position_ids": places, **cache}
        slots = np.concatenate([np.arange(self.capacity), places[0]])
        for name in self._masks:
            window = name.removeprefix("attention_mask").removeprefix("_")
            near = visible & (places[0][:, None] - slots < int(window)) if window else visible
            feeds[name] = np.where(near, np.float16(0), MASKED)[None, None]
        if self._selects_logits:
            feeds["logit_rows"] = np.array([count - 1], np.int32)
        return feeds

    def extend(
        self, cache: dict[str, npt.NDArray[np.float16]], length: int, tokens: Sequence[int] | Array
    ) -> StaticPass:
        """Run a pass over tokens and write their keys and values into the cache."""
        result = self.run(cache, length, tokens)
        for name, slots in result.new_slots.items():
            cache[name][:, :, length : length + len(tokens)] = slots
        return result


def check_static_graphs(
    folder: Path, config: DecoderConfig, model: ModelProto, shapes: Sequence[StaticShape], progress: Progress
) -> None:
    """Compare static graphs with model.onnx.

    Args:
        folder: the bundle's folder.
        config: the architecture.
        model: model.onnx, whose accuracy levels are changed.
        shapes: the graphs to check, each over a cache of its own.
        progress: receives the stage.

    Raises:
        ExportError: a graph differs by more than `TOLERANCE`.
    """
    longest = min(NUM_TOKENS, shapes[0].capacity)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, longest)
    contract = ContractSession(folder, longest, with_float_activations(model))
    expected = contract.forward(tokens, np.arange(longest)).astype(np.float64)
    for number, shape in enumerate(shapes, 1):
        session = StaticContractSession(folder / shape.file)
        cache, found, wanted = session.empty_cache(), [], []
        for start in range(0, longest, session.width):
            part = tokens[start : start + session.width]
            found.append(session.extend(cache, start, part).logits)
            wanted.append(expected[start : start + len(part)][-len(found[-1]) :])
        require_close(
            np.concatenate(found),
            np.concatenate(wanted),
            f"{shape.file} differs from model.onnx",
            "the model may need more range than float16 has: leave --device npu out, and report the checkpoint",
            TOLERANCE * float(expected.std()),
        )
        progress(_STAGE, number / len(shapes))
