"""Stand-ins for `BundleTimer`, for machines whose times are known instead of measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from edgerun.export import WeightFormat
from edgerun.export.allocation.linear_times import linear_kind
from edgerun.models.bundle import open_bundle
from edgerun.runtime.measure.bundle_timing import BundleTimer, PassNodeTimes


class KnownMachine:
    """Times that follow from the plan, the layers and the width of a pass."""

    conditions = "known"
    _LAYER_S = 0.001
    _PASS_S = 0.002
    _PROFILING_S = 0.0005

    def __init__(self) -> None:
        self.timed_bundles: list[int] = []
        """Number of bundles of each call."""
        self.rounds = 0
        """Number of rounds of the last call."""
        self.slow = 1.0
        """Factor of all times."""

    def linear(self, kind: str, form: WeightFormat, width: int) -> float:
        """Seconds of one linear of a pass."""
        first = ("qkv", "conv_in", "delta_in", "delta_gates", "mamba_in", "router", "gate")
        last = ("o", "conv_out", "delta_out", "mamba_out")
        places = {**dict.fromkeys(first, 1), **dict.fromkeys(last, 2), "gate_up": 3, "down": 4, "head": 5}
        kind = kind.removeprefix("shared_")
        if form.bits == 32:
            return self.slow * 1e-4 * places[kind] * 32 * width
        return self.slow * 1e-4 * places[kind] * (form.bits + 64 / form.block) * width

    def rest(self, layers: int, width: int) -> float:
        """Seconds of a pass without its linears."""
        return self.slow * (self._PASS_S + self._LAYER_S * layers) * width

    def pass_of(self, plan: Mapping[str, WeightFormat], layers: int, width: int) -> float:
        """Seconds of a pass."""
        linears = sum(self.linear(linear_kind(name), form, width) for name, form in plan.items() if name != "embedding")
        return self.rest(layers, width) + linears

    def time_passes(self, bundles: Sequence[Path], widths: Sequence[int], rounds: int) -> list[Mapping[int, float]]:
        """As `BundleTimer.time_passes`."""
        timed = self.time_nodes(bundles, widths, rounds)
        return [{width: times.seconds for width, times in by_width.items()} for by_width in timed]

    def time_nodes(
        self, bundles: Sequence[Path], widths: Sequence[int], rounds: int
    ) -> list[Mapping[int, PassNodeTimes]]:
        """As `BundleTimer.time_nodes`."""
        assert rounds > 0
        self.rounds = rounds
        self.timed_bundles.append(len(bundles))
        found = []
        for path in bundles:
            manifest = open_bundle(path).manifest
            plan, layers = manifest.weights, manifest.architecture.layers
            nodes = {name: "logits" if name == "head" else name for name in plan if name != "embedding"}
            found.append(
                {
                    width: PassNodeTimes(
                        self.pass_of(plan, layers, width),
                        {
                            "embedded": 1.0,
                            "layers.0.qkv.product": 0.0,
                            "head.product": self.linear("head", plan["head"], width) + self.slow * self._PROFILING_S,
                            **{
                                node: self.linear(linear_kind(name), plan[name], width) + self.slow * self._PROFILING_S
                                for name, node in nodes.items()
                            },
                        },
                    )
                    for width in widths
                }
            )
        return found


class BytesMachine(KnownMachine):
    """A `KnownMachine` whose whole passes take a second per megabyte of weights, whatever their width."""

    def time_passes(self, bundles: Sequence[Path], widths: Sequence[int], rounds: int) -> list[Mapping[int, float]]:
        """As `BundleTimer.time_passes`."""
        assert rounds > 0
        return [dict.fromkeys(widths, open_bundle(bundle).weight_bytes / 1e6) for bundle in bundles]


def use_machine(monkeypatch: pytest.MonkeyPatch, machine: KnownMachine) -> None:
    """Let every `BundleTimer` give the times of a known machine."""
    monkeypatch.setattr(BundleTimer, "conditions", machine.conditions)
    for name in ("time_passes", "time_nodes"):
        measured = getattr(machine, name)
        monkeypatch.setattr(BundleTimer, name, lambda _, *arguments, measured=measured: measured(*arguments))
