"""How long the nodes of several models' graphs take, beside the passes as a whole.

Nodes are timed by ONNX Runtime itself, in a session of its own beside the one whose passes are timed: noting a node
takes time. The two take turns on the same weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from ..export.workbench import PassTimes
from ..runtime.device import choose_device
from ..runtime.facts import facts_of
from ..runtime.node_times import read_passes
from ..runtime.processor import machine
from ..runtime.session import RUNTIME_VERSION, GraphSession, SessionConfig
from .stopwatch import FIRST_PASSES, PASSES, faster, packed_graphs, ready, take_turns, undisturbed


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
        with packed_graphs(bundles) as graphs, tempfile.TemporaryDirectory() as folder:
            noting = [replace(self._config, profile=Path(folder) / str(number)) for number in range(len(graphs))]
            sessions = [
                GraphSession(graph, config, facts_of(bundle))
                for (bundle, graph), own in zip(graphs, noting, strict=True)
                for config in (self._config, own)
            ]
            opened = [bundle for bundle, _ in graphs for _ in range(2)]
            times = take_turns([ready(*each) for each in zip(sessions, opened, strict=True)], rows, rounds)
            profiles = [read_passes(session.end_profile()) for session in sessions[1::2]]
        return [
            {each: PassTimes(undisturbed(passes[each]), nodes[each]) for each in rows}
            for passes, nodes in zip(times[::2], (_by_rows(profile, rows) for profile in profiles), strict=True)
        ]


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
