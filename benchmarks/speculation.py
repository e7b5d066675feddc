"""What speculation gains on real answers: replay of recorded conversations over graphs of known models' shapes.

Weights are random (see checkpoints.py) and every pass over them really runs, while the tokens are those of the
recording: the cost of every pass is real, and so is the acceptance of the drafters that look at the text alone. Plain
decoding, speculation and a drafter that knows the answer take turns, conversation by conversation. That last one goes
through the same pruning, so it shows what no drafter can surpass here. Prints tables, then one JSON line.

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
from edgerun.runtime.measure.machine import load as machine_load
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.replay import OracleMode

_SHAPES: Final = ("qwen2.5-0.5b", "qwen2.5-1.5b")
_CEILING: Final = "knows the answer"
_WRONG: Final = "always wrong"
_CATEGORIES: Final = 8
"""Of MT-Bench; a recording of one category gets as many conversations as its eight together."""


@dataclass(frozen=True)
class Recording:
    """A recording and the turns of it that are measured."""

    name: str
    file: str
    turns: str = "all"


RECORDINGS: Final = (
    Recording("mt_bench", "mt_bench_qwen2.5-7b.jsonl"),
    Recording("mt_redundant, turn 2", "mt_redundant_qwen2.5-7b.jsonl", "2"),
    Recording("aider", "aider_sessions.md"),
)


def run(engine: edgerun.Engine, recording: Recording, options: argparse.Namespace, console: Console) -> BenchResult:
    """One recording over one model."""
    conversations = read_recording(options.data / "replay" / recording.file)
    each = options.limit * (_CATEGORIES if len(count_by_category(conversations)) == 1 else 1)
    conversations = limit_per_category(conversations, each)
    modes = [DecodingMode(str(choice), choice) for choice in map(Speculation.parse, options.spec or ["auto"])]
    if options.wrong:
        modes.append(DecodingMode(_WRONG, Speculation.AUTO, oracle_mode=OracleMode.WRONG))
    modes.append(DecodingMode(_CEILING, Speculation.AUTO, oracle_mode=OracleMode.RIGHT))
    plan = BenchSettings(options.max_tokens, TurnRange.parse(recording.turns), replay=True)
    busy = machine_load()
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
    return BenchResult.of(found, conditions, engine, busy)


def summary(results: dict[tuple[str, str], BenchResult]) -> Table:
    """Geometric means, and the category that gained least."""
    table = Table(title="times plain decoding, geometric mean over categories", title_justify="left")
    for name in ("shape", "recording", "mode"):
        table.add_column(name)
    for name in ("ratio", "tokens\na pass", "least", "of the\nceiling's gain"):
        table.add_column(name, justify="right")
    for (shape, recording), result in results.items():
        ceiling = result.modes[-1]
        for mode in result.modes:
            least = min(mode.categories, key=lambda each: each.ratio.value)
            table.add_row(
                shape,
                recording,
                mode.name,
                ratio_text(mode.mean),
                f"{mode.stats.tokens_per_pass:.2f}",
                f"{least.ratio.value:.2f} ({least.name})",
                f"{gain_share(mode, ceiling):.0%}",
            )
        table.add_section()
    return table


def gain_share(mode: ModeResult, ceiling: ModeResult) -> float:
    """How much of what the all-knowing drafter gains this one gains; 0 where nothing can be gained."""
    most = ceiling.mean.value - 1
    return (mode.mean.value - 1) / most if most > 0 else 0.0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, action="append", help="may be repeated (all)")
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGERUN_DATA"), metavar="DIR")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="folder of the real tokenizer")
    parser.add_argument("--spec", action="append", help="as edge-run --spec; may be repeated (auto)")
    parser.add_argument("--recording", choices=[each.name for each in RECORDINGS], action="append", help="(all)")
    parser.add_argument("--limit", type=int, default=4, metavar="N", help="conversations of each MT-Bench category (4)")
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="most tokens an answer (1024)")
    parser.add_argument("--context", type=int, default=4096, metavar="N")
    parser.add_argument("--block", type=int, choices=(32, 64, 128), default=128, help="weights that share a scale")
    parser.add_argument("--wrong", action="store_true", help="also a drafter that is sure of itself and never right")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    parser.add_argument("--reports", type=Path, metavar="DIR", help="write an HTML report of each part here")
    options = parser.parse_args()
    if options.data is None:
        parser.error("--data is needed where EDGERUN_DATA is not set")

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
    """One report."""
    from edgerun.edge.bench.report import write_report  # noqa: PLC0415  matplotlib is needed for reports alone

    folder.mkdir(parents=True, exist_ok=True)
    write_report(folder / f"{Path(name).stem}.html", result)


def mapping(key: tuple[str, str], result: BenchResult) -> dict[str, Any]:
    """One part, for JSON."""
    ceiling = result.modes[-1]
    shares = {mode.name: round(gain_share(mode, ceiling), 3) for mode in result.modes}
    return {"shape": key[0], "recording": key[1], "share_of_ceiling": shares, **result.to_json()}


if __name__ == "__main__":
    main()
