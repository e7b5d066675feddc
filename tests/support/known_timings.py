"""A machine whose times are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edgerun.export import WeightFormat
from edgerun.export.allocation.linear_times import kind_of
from edgerun.export.workbench import PassTimes
from edgerun.models.bundle import open_bundle


class KnownMachine:
    """A stopwatch of a machine whose times are known: a stand-in for one that is measured."""

    conditions = "known"
    _LAYER = 0.001
    _PASS = 0.002
    _NOTING = 0.0005

    def __init__(self) -> None:
        self.bundles: list[int] = []
        """How many there were in each call."""
        self.slow = 1.0

    def linear(self, kind: str, form: WeightFormat, rows: int) -> float:
        """Seconds."""
        places = {"qkv": 1, "o": 2, "gate_up": 3, "down": 4, "head": 5}
        return self.slow * 1e-4 * places[kind] * (form.bits + 64 / form.block + form.rank / 24) * rows

    def rest(self, layers: int, rows: int) -> float:
        """Seconds."""
        return self.slow * (self._PASS + self._LAYER * layers) * rows

    def pass_of(self, plan: Mapping[str, WeightFormat], layers: int, rows: int) -> float:
        """Seconds."""
        linears = sum(self.linear(kind_of(name), form, rows) for name, form in plan.items() if name != "embedding")
        return self.rest(layers, rows) + linears

    def whole(self, bundles: Sequence[Path], rows: Sequence[int], rounds: int) -> list[Mapping[int, float]]:
        """A `Stopwatch` of the same machine."""
        return [{each: times.seconds for each, times in found.items()} for found in self(bundles, rows, rounds)]

    def __call__(self, bundles: Sequence[Path], rows: Sequence[int], rounds: int) -> list[Mapping[int, PassTimes]]:
        self.bundles.append(len(bundles))
        found = []
        for path in bundles:
            manifest = open_bundle(path).manifest
            assert manifest is not None
            plan, layers = manifest.weights, manifest.architecture.layers
            names = {name: "logits" if name == "head" else name for name in plan if name != "embedding"}
            found.append(
                {
                    each: PassTimes(
                        self.pass_of(plan, layers, each),
                        {
                            "embedded": 1.0,
                            "layers.0.qkv.product": 0.0,
                            **{
                                node: self.linear(kind_of(name), plan[name], each) + self.slow * self._NOTING
                                for name, node in names.items()
                            },
                        },
                    )
                    for each in rows
                }
            )
        return found


def by_bytes(bundles: Sequence[Path], rows: Sequence[int], rounds: int) -> list[Mapping[int, float]]:
    """A `Stopwatch` of a machine that takes a second for a megabyte and nothing for more rows."""
    assert rounds > 0
    return [dict.fromkeys(rows, open_bundle(bundle).weight_bytes / 1e6) for bundle in bundles]
