"""What `peer_quality.py` measured of models, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

EXACT: Final = "llama.cpp F32"
"""Label of the model without loss, whose bytes say how many weights there are."""


@dataclass(frozen=True)
class MeasuredModel:
    """A model in one format, and what was measured."""

    label: str
    engine: str
    path: Path
    bytes: int
    kl: float
    top1: float
    p99: float = 0.0
    text_kl: Sequence[float] = ()
    """Sum of KL over the positions of each text."""
    decode_ms: float = 0.0

    @property
    def is_ours(self) -> bool:
        """Whether edge-run exported it."""
        return self.engine == "edge-run"


def better_plan(
    theirs: MeasuredModel, models: Sequence[MeasuredModel], *, no_slower: bool = True
) -> MeasuredModel | None:
    """edge-run's plan of lowest KL with at most the bytes, and unless told otherwise the time, of another model."""
    fitting = [
        each
        for each in models
        if each.is_ours and each.bytes <= theirs.bytes and (not no_slower or each.decode_ms <= theirs.decode_ms)
    ]
    return min(fitting, key=lambda each: each.kl, default=None)


def show(console: Console, models: Sequence[MeasuredModel], weights: int) -> None:
    """Print both tables."""
    table = Table(title="loss against float32 over held-out text, size of all tensors, and time of a token")
    table.add_column("")
    for name in ("MB", "bits per weight", "mean KL", "p99", "top-1", "ms a token"):
        table.add_column(name, justify="right")
    for each in sorted(models, key=lambda model: model.bytes):
        table.add_row(
            each.label,
            f"{each.bytes / 1e6:.3f}",
            f"{8 * each.bytes / weights:.2f}",
            f"{each.kl:.5f}",
            f"{each.p99:.4f}",
            f"{each.top1:.4f}",
            f"{each.decode_ms:.3f}",
        )
    console.print(table)
    answer = Table(title="edge-run's plan of lowest KL with no more bytes that is no slower")
    for name in ("model", "KL", "MB", "ms", "edge-run", "KL", "MB", "ms", "KL / theirs"):
        answer.add_column(name, justify="left" if name in ("model", "edge-run") else "right")
    for each in models:
        if each.is_ours or each.label == EXACT:
            continue
        ours = better_plan(each, models)
        cells = (
            ("none", "", "", "", "")
            if ours is None
            else (
                ours.label.removeprefix("edge-run "),
                f"{ours.kl:.5f}",
                f"{ours.bytes / 1e6:.3f}",
                f"{ours.decode_ms:.3f}",
                _ratio(ours, each),
            )
        )
        answer.add_row(
            each.label,
            f"{each.kl:.5f}",
            f"{each.bytes / 1e6:.3f}",
            f"{each.decode_ms:.3f}",
            *cells,
        )
    console.print(answer)


def draw(file: Path, models: Sequence[MeasuredModel], weights: int) -> None:
    """Draw the mean KL over bits per weight, with a line through what no other model of the engine is better than."""
    from matplotlib.figure import Figure  # noqa: PLC0415 -- only this needs it

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    groups: dict[str, list[MeasuredModel]] = {}
    for each in models:
        if each.label != EXACT:
            groups.setdefault(each.label.split()[0], []).append(each)
    for (name, group), marker in zip(groups.items(), "osD^", strict=False):
        points = sorted((8 * each.bytes / weights, each.kl) for each in group)
        best = [(bits, kl) for bits, kl in points if kl <= min(other for at, other in points if at <= bits)]
        (line,) = axes.plot(*zip(*best, strict=True), linewidth=1)
        axes.plot(*zip(*points, strict=True), marker, color=line.get_color(), label=name, markersize=5)
    axes.set(xlabel="bits per weight, all tensors of the file", ylabel="mean KL divergence from float32, nats")
    axes.set_yscale("log")
    axes.grid(visible=True, which="both", linewidth=0.3)
    axes.legend()
    figure.savefig(file, metadata={"Date": None})


def _ratio(ours: MeasuredModel, theirs: MeasuredModel) -> str:
    """The ratio of both KL, with the 95 % interval of a bootstrap over the texts."""
    pairs = np.array([ours.text_kl, theirs.text_kl])
    drawn = pairs[:, np.random.default_rng(0).integers(0, pairs.shape[1], (2000, pairs.shape[1]))].sum(axis=2)
    low, high = np.quantile(drawn[0] / drawn[1], (0.025, 0.975))
    return f"{ours.kl / theirs.kl:.2f} [{low:.2f}, {high:.2f}]"


def as_json(model: MeasuredModel) -> Mapping[str, Any]:
    """One model as plain values."""
    return {name: value for name, value in asdict(model).items() if name != "path"}
