"""What `decode.py` measures: engines, settings, series of measurements, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from rounds import IdleLoad, Series, join, median_ratio, spread

CONTEXT: Final = 128
"""Number of cached tokens before wide passes, and the context after which memory is read."""
EDGE: Final = "edge-run"
BARE: Final = "bare loop"


@dataclass(frozen=True)
class DecodeSettings:
    """What is measured, and how often."""

    threads: int = 1
    contexts: Sequence[int] = (128, 2048, 8192)
    """Numbers of cached tokens after which decoding is measured."""
    prompts: Sequence[int] = (128, 1024, 4096)
    """Lengths of prompts."""
    widths: Sequence[int] = (1, 2, 3, 4, 6, 8, 16)
    """Numbers of tokens of the passes whose cost is measured."""
    restarts: int = 3
    """Number of times that all processes are restarted: memory placement changes their speed by several per cent."""
    rounds: int = 6
    tokens: int = 32
    """Number of tokens per decode measurement."""
    passes: int = 5
    """Number of passes whose median is one measurement."""

    def quick(self) -> DecodeSettings:
        """The same with few rounds and no restarts."""
        return replace(self, restarts=1, rounds=3, tokens=12, passes=3)


@dataclass(frozen=True)
class MeasuredEngine:
    """An engine and the model it runs."""

    label: str
    engine: str
    model: Path
    """A folder, or a GGUF file."""
    python: str | None = None
    """Interpreter of its environment; None for that of the benchmark."""
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further arguments of its loop."""
    prompts_only: bool = False
    """Whether only its prompts are measured."""

    @property
    def weights_bytes(self) -> int:
        """Size of its model files on disk."""
        if self.model.is_file():
            return self.model.stat().st_size
        files = [*self.model.glob("*.onnx*"), *self.model.glob("openvino_model.*")]
        return sum(file.stat().st_size for file in files)


@dataclass
class Measurements:
    """All measurements, with one `Series` per restart."""

    settings: DecodeSettings
    decode: dict[int, list[Series]] = field(init=False)
    """By context."""
    prefill: dict[int, list[Series]] = field(init=False)
    """By length of the prompt."""
    widths: dict[int, list[Series]] = field(init=False)
    """By width of the pass."""
    load_s: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    first_load_s: float = 0.0
    """Seconds of edge-run's first load of the bundle, which prepares the weights for this machine."""
    idle_load: IdleLoad = field(default_factory=IdleLoad)

    def __post_init__(self) -> None:
        self.decode = {context: [] for context in self.settings.contexts}
        self.prefill = {count: [] for count in self.settings.prompts}
        self.widths = {width: [] for width in self.settings.widths}


def summarize(found: Measurements, engines: Sequence[MeasuredEngine]) -> dict[str, Any]:
    """Medians, and ratios of each engine's time to edge-run's with quartiles."""
    decode = {context: join(parts) for context, parts in found.decode.items()}
    prefill = {count: join(parts) for count, parts in found.prefill.items()}
    widths = {width: join(parts) for width, parts in found.widths.items()}
    figures = {}
    for each in engines:
        label = each.label
        figures[label] = {
            "weights_mib": each.weights_bytes / 2**20,
            "load_s": statistics.median(found.load_s[label]),
            "resident_mib": found.memory[label],
            "decode": {
                str(context): {"ms": 1e3 * statistics.median(series[label]), **_ratio(series, label)}
                for context, series in decode.items()
                if label in series
            },
            "prefill": {
                str(count): {"tokens_per_s": count / statistics.median(series[label]), **_ratio(series, label)}
                for count, series in prefill.items()
            },
        }
    figures[EDGE]["first_load_s"] = found.first_load_s
    cost = {
        label: {
            str(width): {
                "ms": 1e3 * statistics.median(series[label]),
                "by_one_token": statistics.median(
                    many / one for many, one in zip(series[label], widths[1][label], strict=True)
                ),
            }
            for width, series in widths.items()
        }
        for label in (EDGE, BARE)
        if widths
    }
    return {"engines": figures, "pass_cost": cost, "idle_core_share": found.idle_load.idle_core_share}


def _ratio(series: Series, label: str) -> dict[str, Any]:
    return {"time_ratio": median_ratio(series, label, EDGE), "time_ratio_quartiles": spread(series, label, EDGE)}


def show(console: Console, result: dict[str, Any], title: str) -> None:
    """Print the tables."""
    first = result["engines"][EDGE]
    speed = Table(title=f"{title}: speed; in brackets, edge-run's speed divided by this one (median over rounds)")
    speed.add_column("")
    for name in (
        *(f"ms per token\nafter {context}" for context in first["decode"]),
        *(f"tokens/s, prompt\nof {count}" for count in first["prefill"]),
    ):
        speed.add_column(name, justify="right")
    memory = Table(title="load time and resident memory, MiB")
    memory.add_column("")
    for name in ("weights on disk", "load, s", "loaded", "decoding", "of that anonymous", "prompts", "peak"):
        memory.add_column(name, justify="right")
    for label, row in result["engines"].items():
        speed.add_row(
            label,
            *(_decode_cell(row, context, 2, 3) for context in first["decode"]),
            *(f"{each['tokens_per_s']:.0f} ({each['time_ratio']:.3f})" for each in row["prefill"].values()),
        )
        resident = row["resident_mib"]
        stages = [resident[name] for name in ("loaded", "decoding", "decoding_anonymous", "prompts", "peak")]
        memory.add_row(label, f"{row['weights_mib']:.0f}", f"{row['load_s']:.2f}", *(f"{size:.0f}" for size in stages))
    console.print(speed)
    console.print(memory)
    if result["pass_cost"]:
        console.print(_pass_cost_table(result["pass_cost"]))
    console.print(f"edge-run's first load, which prepares the weights for this machine: {first['first_load_s']:.2f} s")
    share = result["idle_core_share"]
    if share > 0.02:
        console.print(f"[yellow]waiting processes used {share:.0%} of a core while others were measured[/yellow]")


def _pass_cost_table(pass_cost: Mapping[str, Any]) -> Table:
    passes = Table(title=f"pass over m tokens after {CONTEXT}, with all logits: ms (ratio to a pass over one token)")
    for name in ("m", *pass_cost):
        passes.add_column(name, justify="right")
    for width in next(iter(pass_cost.values())):
        cells = [cost[width] for cost in pass_cost.values()]
        passes.add_row(width, *(f"{cell['ms']:.2f} ({cell['by_one_token']:.2f})" for cell in cells))
    return passes


def markdown(result: dict[str, Any], title: str) -> str:
    """One table for a document: milliseconds a token, tokens a second of prompts, peak memory and size of the model.

    Ratios are edge-run's speed divided by that of the engine in the row.
    """
    first = result["engines"][EDGE]
    columns = [
        "",
        *(f"ms a token after {int(context):,}" for context in first["decode"]),
        *(f"tokens/s, prompt of {int(count):,}" for count in first["prefill"]),
        *(f"memory {stage}, MiB" for stage in ("decoding", "reading prompts", "at most")),
        "model, MiB",
    ]
    lines = [f"{title}. In brackets, edge-run's speed divided by this engine's.", ""]
    lines += ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    for label, row in result["engines"].items():
        cells = [
            *(_decode_cell(row, context, 1, 2) for context in first["decode"]),
            *(f"{each['tokens_per_s']:.0f} ({each['time_ratio']:.2f})" for each in row["prefill"].values()),
            *(f"{row['resident_mib'][stage]:,.0f}" for stage in ("decoding", "prompts", "peak")),
            f"{row['weights_mib']:,.0f}",
        ]
        lines.append("| " + " | ".join([label, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _decode_cell(row: Mapping[str, Any], context: str, digits: int, ratio_digits: int) -> str:
    """Milliseconds of a token and the ratio; empty where only prompts were measured."""
    found = row["decode"].get(context)
    return "" if found is None else f"{found['ms']:.{digits}f} ({found['time_ratio']:.{ratio_digits}f})"
