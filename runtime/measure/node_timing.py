"""How long the nodes of several models' graphs take, beside the passes as a whole.

Nodes are timed by ONNX Runtime itself, in sessions of their own, since noting a node takes time. Those whose passes are
timed as a whole run after them, on the same weights. Both are loaded several times, in turn: one load of a model is
some percent faster than another, whatever its weights are, and the machine is faster in one minute than in the next.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Final

from ...export.workbench import PassTimes
from ...models.bundle import Bundle
from ..devices.processor import machine
from ..devices.providers import choose_device
from ..graph.bound_session import BoundSession
from ..graph.metadata import metadata_of
from ..graph.session import RUNTIME_VERSION, GraphSession, SessionConfig
from .bundle_timing import FIRST_PASSES, PASSES, faster, packed_graphs, ready, take_turns, undisturbed
from .node_profile import read_passes

_LOADS: Final = 4


class BundleNodeStopwatch:
    """Times nodes of bundles with onnxruntime on this machine's CPU; a `NodeStopwatch` for the exporter."""

    def __init__(self, threads: int = 0) -> None:
        """`threads`: 0 for one per physical core."""
        self._config = SessionConfig(choose_device("cpu"), threads)

    @property
    def conditions(self) -> str:
        """See `NodeStopwatch`."""
        return "\0".join((self._config.device.provider, str(self._config.threads), RUNTIME_VERSION, machine()))

    def __call__(self, bundles: Sequence[Path], rows: Sequence[int], rounds: int) -> list[Mapping[int, PassTimes]]:
        """Times of a pass by its rows, for each bundle; see `NodeStopwatch`.

        Raises:
            BundleError: one of them is damaged, or no model that edge-run can decode with.
            EdgeError: ONNX Runtime failed.
        """
        count = min(_LOADS, rounds)
        turns = -(-rounds // count)
        with packed_graphs(bundles) as graphs:
            # Sessions of the second kind are loaded when those of the first are gone: each counts all pages it has
            # mapped as its own.
            loads = [(self._nodes(graphs, rows, turns), self._passes(graphs, rows, turns)) for _ in range(count)]
        return [
            {each: _means([PassTimes(passes[at][each], nodes[at][each]) for nodes, passes in loads]) for each in rows}
            for at in range(len(bundles))
        ]

    def _passes(
        self, graphs: Sequence[tuple[Bundle, Path]], rows: Sequence[int], rounds: int
    ) -> list[dict[int, float]]:
        """Seconds of a pass by rows, for each bundle."""
        sessions = [GraphSession(graph, self._config, metadata_of(bundle)) for bundle, graph in graphs]
        times = take_turns(_ready(sessions, graphs), rows, rounds)
        return [{each: undisturbed(passes) for each, passes in of_one.items()} for of_one in times]

    def _nodes(
        self, graphs: Sequence[tuple[Bundle, Path]], rows: Sequence[int], rounds: int
    ) -> list[dict[int, dict[str, float]]]:
        """Seconds by rows and node, for each bundle."""
        with tempfile.TemporaryDirectory() as folder:
            sessions = [
                GraphSession(graph, replace(self._config, profile=Path(folder) / str(number)), metadata_of(bundle))
                for number, (bundle, graph) in enumerate(graphs)
            ]
            take_turns(_ready(sessions, graphs), rows, rounds)
            return [_by_rows(read_passes(session.end_profile()), rows) for session in sessions]


def _ready(sessions: Sequence[GraphSession], graphs: Sequence[tuple[Bundle, Path]]) -> list[BoundSession]:
    return [ready(session, bundle) for session, (bundle, _) in zip(sessions, graphs, strict=True)]


def _means(loads: Sequence[PassTimes]) -> PassTimes:
    return PassTimes(
        fmean(load.seconds for load in loads),
        {node: fmean(load.nodes[node] for load in loads) for node in loads[0].nodes},
    )


def _by_rows(passes: Sequence[Mapping[str, float]], rows: Sequence[int]) -> dict[int, dict[str, float]]:
    """Seconds by node of the passes over each number of rows; `passes` are those of `take_turns`.

    They are means over the same passes for all nodes, so that they add up to the time of a pass that occurred.
    """
    turn = FIRST_PASSES + len(rows) * PASSES
    found = {}
    for place, each in enumerate(rows):
        first = FIRST_PASSES + place * PASSES
        counted = [one for number, one in enumerate(passes) if 0 <= number % turn - first < PASSES]
        chosen = [counted[index] for index in faster([sum(one.values()) for one in counted])]
        found[each] = {node: fmean(one[node] for one in chosen) for node in chosen[0]}
    return found
