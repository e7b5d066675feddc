"""Passes of static graphs that are recorded on the CPU and repeated on another provider."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgerun.export.check.static_parity import StaticContractSession, StaticPass
from support.devices import run_json_script

_CHILD = Path(__file__).with_name("static_passes_child.py")


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
        graphs = {width: StaticContractSession(path) for width, path in paths.items()}
        cache, length = graphs[1].empty_cache(), 0
        for width, count in ((40, 18), (4, 4), (1, 1), (4, 3), (1, 1)):
            part = tokens[length : length + count]
            self._keep(paths[width], graphs[width].feeds(cache, length, part))
            self._results.append(graphs[width].extend(cache, length, part))
            length += count
        # A root, its two children, and a child of the first child.
        sees = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], np.bool_)
        tree = (cache, length, tokens[length : length + 4], [length, length + 1, length + 1, length + 2], sees)
        self._keep(paths[4], graphs[4].feeds(*tree))
        self._results.append(graphs[4].run(*tree))

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
