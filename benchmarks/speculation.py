"""Speedup of speculation on recorded conversations, replayed over graphs of known models' shapes.

Weights are random (see checkpoints.py) and every pass is run, while the tokens are those of the recording. So the cost
of every pass is real, and so is the acceptance of drafters that use only the text. Plain decoding, speculation and an
oracle drafter, which proposes the recorded answer, take turns, conversation by conversation. The oracle's drafts are
pruned like others, so its speed is an upper bound. Prints tables, then one JSON line.

Example: python benchmarks/speculation.py --data DIR --tokenizer DIR/tokenizers/qwen2.5

DIR/replay holds mt_bench_qwen2.5-7b.jsonl and mt_redundant_qwen2.5-7b.jsonl (github.com/RazvanDu/CopySpec) and
aider_sessions.md (a test fixture of github.com/Aider-AI/aider).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import edgerun
from artifacts import bundle
from checkpoints import SHAPES
from edgerun.edge.bench.bench_result import BenchConditions, BenchResult
from edgerun.edge.bench.prompt_sets import count_by_category, limit_per_category
from edgerun.edge.bench.ratios import ModeResult
from edgerun.edge.bench.recordings import read_recording
from edgerun.edge.bench.runner import BenchSettings, DecodingMode, TurnRange, measure_modes
from edgerun.edge.bench.table import ratio_text, show
from edgerun.runtime.measure.system_load import LoadMeter
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.replay import OracleMode

_SHAPES: Final = ("qwen2.5-0.5b", "qwen2.5-1.5b")
_ORACLE: Final = "oracle"
_WRONG: Final = "always wrong"
_CATEGORIES: Final = 8
"""Number of categories of MT-Bench; a recording of one category gets as many conversations as all of them."""


@dataclass(frozen=True)
class Recording:
    """A recording, and the turns of it that are measured."""

    name: str
    file: str
    turns: str = "all"


RECORDINGS: Final = (
    Recording("mt_bench", "mt_bench_qwen2.5-7b.jsonl"),
    Recording("mt_redundant, turn 2", "mt_redundant_qwen2.5-7b.jsonl", "2"),
    Recording("aider", "aider_sessions.md"),
)


def run(engine: edgerun.Engine, recording: Recording, options: argparse.Namespace, console: Console) -> BenchResult:
    """Measure one recording with one model."""
    conversations = read_recording(options.data / "replay" / recording.file)
    each = options.limit * (_CATEGORIES if len(count_by_category(conversations)) == 1 else 1)
    conversations = limit_per_category(conversations, each)
    modes = [DecodingMode(str(choice), choice) for choice in map(Speculation.parse, options.spec or ["auto"])]
    if options.wrong:
        modes.append(DecodingMode(_WRONG, Speculation.AUTO, oracle_mode=OracleMode.WRONG))
    modes.append(DecodingMode(_ORACLE, Speculation.AUTO, oracle_mode=OracleMode.RIGHT))
    plan = BenchSettings(options.max_tokens, TurnRange.parse(recording.turns), replay=True)
    meter = LoadMeter(options.threads or 0)
    with console.status(recording.name) as status:
        found = measure_modes(
            engine,
            conversations,
            modes,
            plan,
            lambda _, fraction: status.update(f"{recording.name}: {fraction:.0%}"),
        )
    conditions = BenchConditions(
        model=engine.bundle.folder.parent.name,
        draft=None,
        device=str(engine.device),
        threads=options.threads,
        context=engine.context,
        source=recording.file,
        replay=True,
        max_tokens=options.max_tokens,
        turns=recording.turns,
        temperature=0.0,
        conversations=len(conversations),
    )
    return BenchResult.of(found, conditions, engine, meter)


def summary(results: dict[tuple[str, str], BenchResult]) -> Table:
    """Table of geometric means, and of the categories with the smallest speedup."""
    table = Table(title="speedup over plain decoding, geometric mean over categories", title_justify="left")
    for name in ("shape", "recording", "mode"):
        table.add_column(name)
    for name in ("speedup", "tokens\nper pass", "smallest", "of the\noracle's gain"):
        table.add_column(name, justify="right")
    for (shape, recording), result in results.items():
        oracle = result.modes[-1]
        for mode in result.modes:
            smallest = min(mode.categories, key=lambda each: each.ratio.value)
            table.add_row(
                shape,
                recording,
                mode.name,
                ratio_text(mode.mean),
                f"{mode.stats.tokens_per_pass:.2f}",
                f"{smallest.ratio.value:.2f} ({smallest.name})",
                f"{gain_share(mode, oracle):.0%}",
            )
        table.add_section()
    return table


def gain_share(mode: ModeResult, oracle: ModeResult) -> float:
    """Fraction of the oracle's gain that a mode has; 0 if the oracle has none."""
    possible = oracle.mean.value - 1
    return (mode.mean.value - 1) / possible if possible > 0 else 0.0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, action="append", help="may be repeated (all)")
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGERUN_DATA"), metavar="DIR")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="folder of the real tokenizer")
    parser.add_argument("--spec", action="append", help="as in edge-run --spec; may be repeated (auto)")
    parser.add_argument("--recording", choices=[each.name for each in RECORDINGS], action="append", help="(all)")
    parser.add_argument("--limit", type=int, default=4, metavar="N", help="conversations of each MT-Bench category (4)")
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="maximum tokens of an answer (1024)")
    parser.add_argument("--context", type=int, default=4096, metavar="N")
    parser.add_argument("--block", type=int, choices=(32, 64, 128), default=128, help="weights that share a scale")
    parser.add_argument(
        "--wrong", action="store_true", help="also measure a drafter that is confident and always wrong"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    parser.add_argument("--reports", type=Path, metavar="DIR", help="folder for an HTML report of each recording")
    options = parser.parse_args()
    if options.data is None:
        parser.error("give --data, or set EDGERUN_DATA")

    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 130
    results: dict[tuple[str, str], BenchResult] = {}
    for shape in options.shape or _SHAPES:
        progress.print(f"preparing {shape}")
        model = bundle(options.work, SHAPES[shape], options.block, options.tokenizer)
        with edgerun.load(model, threads=options.threads, context=options.context, draft=None) as engine:
            for recording in RECORDINGS:
                if options.recording and recording.name not in options.recording:
                    continue
                result = results[shape, recording.name] = run(engine, recording, options, progress)
                show(console, result)
                if options.reports:
                    write(options.reports, f"{shape}-{recording.file}", result)
    console.print(summary(results))
    print(json.dumps({"benchmark": "speculation", "runs": [mapping(*each) for each in results.items()]}))


def write(folder: Path, name: str, result: BenchResult) -> None:
    """Write one HTML report."""
    from edgerun.edge.bench.report import write_report  # noqa: PLC0415  matplotlib is needed for reports only

    folder.mkdir(parents=True, exist_ok=True)
    write_report(folder / f"{Path(name).stem}.html", result)


def mapping(key: tuple[str, str], result: BenchResult) -> dict[str, Any]:
    """One result as a JSON object."""
    oracle = result.modes[-1]
    shares = {mode.name: round(gain_share(mode, oracle), 3) for mode in result.modes}
    return {"shape": key[0], "recording": key[1], "share_of_oracle": shares, **result.to_json()}


if __name__ == "__main__":
    main()
