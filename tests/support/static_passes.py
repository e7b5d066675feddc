"""Passes of static graphs that are recorded on the CPU and repeated on another provider."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgerun.models.bundle import Bundle
from edgerun.runtime.graph.ort import load_session, session_options
from edgerun.runtime.graph.static_variants import StaticSession, static_graph_io
from edgerun.runtime.kv.buffers import StackedBuffers
from support.devices import run_json_script

_CHILD = Path(__file__).with_name("static_passes_child.py")


class StaticPass(NamedTuple):
    """What a pass of a static graph returned."""

    next_ids: npt.NDArray[np.int32]
    """Id of the largest logit of each token with logits, [R]."""
    logits: npt.NDArray[np.float16]
    """[R, vocabulary]."""
    new_slots: dict[str, npt.NDArray[np.float16]]
    """New keys and values by the name of their cache input, [1, kv_heads, m, head_dim] of the m tokens of the pass."""


class StaticGraph:
    """Runs passes of one static graph as the runtime does, over caches of the caller."""

    def __init__(self, path: Path) -> None:
        session = load_session(str(path), session_options())
        shapes = {value.name: value.shape for value in session.get_inputs()}
        self._io = static_graph_io(session, Bundle(path.parent, path, None), str(path))
        self._width, self._capacity = shapes["input_ids"][1], shapes[self._io.cache[0].past][2]
        self._wide = "logit_rows" in shapes
        self._session = StaticSession(session, self._io, self._width, self._capacity)

    def empty_cache(self) -> StackedBuffers:
        return StackedBuffers(self._io.tensor_types, self._capacity)

    def run(
        self,
        cache: StackedBuffers,
        length: int,
        tokens: Sequence[int],
        positions: Sequence[int] | None = None,
        sees: npt.NDArray[np.bool_] | None = None,
    ) -> StaticPass:
        """Run a pass over tokens after `length` slots, and write their slots; `sees` is causal by default."""
        count = len(tokens)
        places = np.arange(length, length + count) if positions is None else np.array(positions)
        visible = np.tri(count, dtype=np.bool_) if sees is None else sees
        wanted = [count - 1] if self._wide else range(count)
        ids, earlier = np.array(tokens, np.int64), np.zeros(0, np.int64)
        logits, next_ids = (
            self._session.run(cache, length, ids, places, visible, earlier, wanted, logits=wants_logits)[part].copy()
            for part, wants_logits in enumerate((True, False))
        )
        names = [tensor.past for tensor in self._io.cache]
        slots = [array[:, :, length : length + count].copy() for array in cache.arrays]
        return StaticPass(next_ids, logits, dict(zip(names, slots, strict=True)))

    def feeds(self, cache: StackedBuffers) -> dict[str, npt.NDArray[Any]]:
        """The inputs of the last pass by name, with a cache."""
        names = [tensor.past for tensor in self._io.cache]
        return {**self._session._inputs, **dict(zip(names, cache.arrays, strict=True))}


class Repeated(NamedTuple):
    """What a provider made of the recorded passes."""

    nodes: Mapping[str, int]
    """Number of nodes that each provider took, of all graphs together."""
    milliseconds: Mapping[str, float]
    """Duration of the last pass of each graph, by file name."""
    worst_logit: float
    """Largest logit difference to the CPU, relative to the standard deviation of the logits of that graph's bundle."""
    worst_slot: float
    """Largest difference of a new key or value to the CPU, relative to the largest magnitude of its tensor."""
    next_ids: list[tuple[int, int, float]]
    """For each token: the CPU's next token, the provider's, and how far the CPU's logits of the two lie apart."""


class RecordedPasses:
    """Runs passes on the CPU, and keeps their inputs and outputs."""

    def __init__(self) -> None:
        self._graphs: list[str] = []
        self._feeds: dict[str, npt.NDArray[Any]] = {}
        self._results: list[StaticPass] = []

    def record(self, bundle: Path, capacity: int, tokens: list[int]) -> None:
        """Run a prefill, two passes of widths 4 and 1, and a tree of 4 of a bundle's graphs of widths 40, 4 and 1."""
        paths = {width: bundle / f"model_npu_w{width}_c{capacity}.onnx" for width in (40, 4, 1)}
        graphs = {width: StaticGraph(path) for width, path in paths.items()}
        cache, length = graphs[1].empty_cache(), 0
        for width, count in ((40, 18), (4, 4), (1, 1), (4, 3), (1, 1)):
            part = tokens[length : length + count]
            self._results.append(graphs[width].run(cache, length, part))
            self._keep(paths[width], graphs[width].feeds(cache))
            length += count
        # A root, its two children, and a child of the first child.
        sees = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], np.bool_)
        positions = [length, length + 1, length + 1, length + 2]
        self._results.append(graphs[4].run(cache, length, tokens[length : length + 4], positions, sees))
        self._keep(paths[4], graphs[4].feeds(cache))

    def _keep(self, graph: Path, feeds: Mapping[str, npt.NDArray[Any]]) -> None:
        self._feeds |= {f"{len(self._graphs)}/{name}": value.copy() for name, value in feeds.items()}
        self._graphs.append(str(graph))

    def repeat(self, folder: Path, provider: Mapping[str, Any], interpreter: str = sys.executable) -> Repeated:
        """Run the same passes on a provider, in a process of its own, without fallback to the CPU.

        Args:
            folder: an empty folder for the passes.
            provider: `name`, `options` and, for a plugin, `library`.
            interpreter: the Python that has the provider.
        """
        np.savez(folder / "passes.npz", graphs=np.array(self._graphs), **self._feeds)
        said = run_json_script(
            _CHILD, folder / "passes.npz", json.dumps(provider), environment={}, interpreter=interpreter
        )
        logit, slot, next_ids = 0.0, 0.0, []
        with np.load(folder / "outputs.npz") as outputs:
            for number, expected in enumerate(self._results):
                rows = len(expected.logits)
                wanted = expected.logits.astype(np.float64)
                logits = outputs[f"{number}/logits"][:rows].astype(np.float64)
                logit = max(logit, _largest(logits - wanted) / float(wanted.std()))
                for name, value in expected.new_slots.items():
                    got = outputs[f"{number}/{name.replace('past_key_values', 'present')}"][:, :, : value.shape[2]]
                    slot = max(slot, _largest(got.astype(np.float64) - value) / _largest(value.astype(np.float64)))
                for row, (ours, theirs) in enumerate(
                    zip(expected.next_ids.tolist(), outputs[f"{number}/next_ids"][:rows].tolist(), strict=True)
                ):
                    next_ids.append((ours, theirs, float(wanted[row, ours] - wanted[row, theirs])))
        return Repeated(said["nodes"], said["milliseconds"], logit, slot, next_ids)


def _largest(value: npt.NDArray[np.float64]) -> float:
    """Largest magnitude; infinite where a value is not a number."""
    return float(np.nan_to_num(np.abs(value), nan=np.inf).max())
