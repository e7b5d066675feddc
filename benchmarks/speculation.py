"""Speedup of speculation on recorded conversations, replayed over graphs of known models' shapes.

Weights are random (see checkpoints.py) and every pass is run, while the tokens are those of the recording. So the cost
of every pass is real, and so is the acceptance of drafters that use only the text. Plain decoding, speculation and an
oracle drafter, which proposes the recorded answer, take turns, conversation by conversation. The oracle's drafts are
pruned like others, so its speed is an upper bound. Prints tables, then one JSON line.

Example: python benchmarks/speculation.py --data DIR --tokenizer DIR/tokenizers/qwen2.5

Results are kept in --work conversation by conversation: with --minutes a run ends early, and the next one goes on where
it ended. --limit 0 measures all conversations of the recordings; the categories alternate, so that part of them is a
fair sample. With --variant KEY=VALUE (an argument of edgerun.load) a second engine over the same weights takes turns
with the first, conversation by conversation, and the gain of the first over it is printed. `base_graph=true` is an
engine whose passes run in the model's own graph alone.

With --passes timed no pass runs: each is charged the time that passes of its width and context took on this machine,
and all recordings take minutes in place of hours (timed_passes.py). The times are measured at the start, or before with
--time-passes SECONDS, which may be repeated on a quiet machine, and are kept in --work. --validate N replays N
conversations of each recording, drawn at random, in both ways, and says how far the prediction is from the real speed.
Later runs with --passes timed multiply the host's time by what these conversations show.

DIR/replay holds mt_bench_qwen2.5-7b.jsonl and mt_redundant_qwen2.5-7b.jsonl (github.com/RazvanDu/CopySpec) and
aider_sessions.md (a test fixture of github.com/Aider-AI/aider).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import edgerun
from artifacts import bundle
from edgerun.edge.bench.bench_result import BenchResult
from edgerun.edge.bench.ratios import ModeResult
from edgerun.edge.cli.bench import ratio_text, show
from edgerun.runtime.measure.system_load import LoadMeter
from recording_replay import BASE, ORACLE, REAL, RECORDINGS, RecordingReplay, Variant
from replay_host import RealHost
from shapes import SHAPES
from timed_passes import ChargedPasses, PassDurations, durations_table, measure_durations

_SHAPES: Final = ("qwen2.5-0.5b", "qwen2.5-1.5b")
_TIMING_S: Final = 60.0
"""Seconds to measure durations of passes where none are kept."""


def pass_durations(options: argparse.Namespace, shape: str, model: Path, progress: Console) -> PassDurations:
    """The durations of passes that are kept, with those that are measured now."""
    key = f"{shape}-{options.block}-{options.threads or 'default'}-{options.context}"
    path = options.work / "replay" / f"passes-{key}.json"
    durations = PassDurations.read(path)
    seconds = options.time_passes or (0.0 if durations.turns else _TIMING_S)
    if seconds:
        with BASE.load(model, options) as engine:
            measure_durations(engine, durations, seconds, progress.print)
        durations.write(path)
    return durations


def charged_passes(
    options: argparse.Namespace, shape: str, model: Path, engines: Mapping[str, edgerun.Engine], progress: Console
) -> dict[str, ChargedPasses]:
    """What charges the passes of each engine, but for those whose passes run."""
    if options.passes == "real":
        return {}
    durations = pass_durations(options, shape, model, progress)
    return {name: ChargedPasses(durations, engine) for name, engine in engines.items() if name != REAL.name}


def gain_table(gains: Mapping[tuple[str, str], Mapping[str, ModeResult]]) -> Table:
    """Table of the gain of the engine as it is over each variant, and of its smallest category."""
    table = Table(title="speed as it is divided by that of a variant, or of another mode", title_justify="left")
    for name in ("shape", "recording", "compared", "gain", "smallest category"):
        table.add_column(name)
    for (shape, recording), found in gains.items():
        for name, mode in found.items():
            smallest = min(mode.categories, key=lambda each: each.ratio.value)
            table.add_row(
                shape, recording, name, ratio_text(mode.mean), f"{smallest.name} {ratio_text(smallest.ratio)}"
            )
    return table


def summary(results: dict[tuple[str, str], BenchResult]) -> Table:
    """Table of geometric means, and of the categories with the smallest speedup."""
    table = Table(title="speedup over plain decoding, geometric mean over categories", title_justify="left")
    for name in ("shape", "recording", "mode"):
        table.add_column(name)
    for name in ("speedup", "tokens\nper pass", "smallest", "of the\noracle's gain"):
        table.add_column(name, justify="right")
    for (shape, recording), result in results.items():
        oracle = oracle_of(result)
        for mode in result.modes:
            smallest = min(mode.categories, key=lambda each: each.ratio.value)
            table.add_row(
                shape,
                recording,
                mode.name,
                ratio_text(mode.mean),
                f"{mode.stats.tokens_per_pass:.2f}",
                f"{smallest.ratio.value:.2f} ({smallest.name})",
                "" if oracle is None else f"{gain_share(mode, oracle):.0%}",
            )
        table.add_section()
    return table


def oracle_of(result: BenchResult) -> ModeResult | None:
    """The oracle's figures, if it was measured."""
    return next((mode for mode in result.modes if mode.name == ORACLE), None)


def gain_share(mode: ModeResult, oracle: ModeResult) -> float:
    """Fraction of the oracle's gain that a mode has; 0 if the oracle has none."""
    possible = oracle.mean.value - 1
    return (mode.mean.value - 1) / possible if possible > 0 else 0.0


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), action="append", help=f"may be repeated ({' and '.join(_SHAPES)})"
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGERUN_DATA"), metavar="DIR")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="folder of the real tokenizer")
    parser.add_argument("--spec", action="append", help="as in edge-run --spec; may be repeated (auto)")
    parser.add_argument("--recording", choices=[each.name for each in RECORDINGS], action="append", help="(all)")
    parser.add_argument(
        "--limit", type=int, default=4, metavar="N", help="conversations of each MT-Bench category (4); 0 for all"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="begin no conversation after this time (no limit)"
    )
    parser.add_argument(
        "--variant", action="append", metavar="KEY=VALUE", help="also measure an engine loaded so; may be repeated"
    )
    parser.add_argument(
        "--passes", choices=("real", "timed"), default="real", help="run passes, or charge what they took before (real)"
    )
    parser.add_argument(
        "--time-passes",
        type=float,
        metavar="SECONDS",
        help="only measure the durations of passes, so long, and keep them",
    )
    parser.add_argument(
        "--validate",
        type=int,
        metavar="N",
        help="compare charged passes with real ones: N conversations of each recording",
    )
    parser.add_argument("--no-oracle", action="store_true", help="leave out the oracle drafter")
    parser.add_argument("--prepare", action="store_true", help="only make the models that are missing")
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="maximum tokens of an answer (1024)")
    parser.add_argument("--context", type=int, default=4096, metavar="N")
    parser.add_argument("--block", type=int, choices=(32, 64, 128), default=128, help="weights that share a scale")
    parser.add_argument(
        "--wrong", action="store_true", help="also measure a drafter that is confident and always wrong"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    return parser


def main() -> None:
    """Command line."""
    parser = command_line()
    options = parser.parse_args()
    if options.data is None:
        parser.error("give --data, or set EDGERUN_DATA")
    if (options.validate is not None or options.time_passes is not None) and options.passes != "timed":
        parser.error("--validate and --time-passes need --passes timed")

    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 130
    deadline = time.monotonic() + 60 * options.minutes
    variants = [BASE, *map(Variant.parse, options.variant or []), *([REAL] if options.validate is not None else [])]
    results: dict[tuple[str, str], BenchResult] = {}
    gains: dict[tuple[str, str], dict[str, ModeResult]] = {}
    for shape in options.shape or _SHAPES:
        progress.print(f"preparing {shape}")
        model = bundle(options.work, SHAPES[shape], options.block, options.tokenizer)
        if options.time_passes:
            console.print(durations_table(pass_durations(options, shape, model, progress), shape))
        elif not options.prepare:
            measure_shape(model, shape, variants, options, deadline, (console, progress), (results, gains))
    if results:
        console.print(summary(results))
    if any(gains.values()):
        console.print(gain_table(gains))
    runs = [{**mapping(key, result), "gains": gains_json(gains[key])} for key, result in results.items()]
    print(json.dumps({"benchmark": "speculation", "runs": runs}))


def measure_shape(
    model: Path,
    shape: str,
    variants: Sequence[Variant],
    options: argparse.Namespace,
    deadline: float,
    consoles: tuple[Console, Console],
    figures: tuple[dict[tuple[str, str], BenchResult], dict[tuple[str, str], dict[str, ModeResult]]],
) -> None:
    """Replay the recordings over one shape; adds the results and the gains over variants to `figures`."""
    (console, progress), (results, gains) = consoles, figures
    real_host = RealHost(options.work / "replay" / f"host-{shape}.json")
    with ExitStack() as stack:
        engines = {each.name: stack.enter_context(each.load(model, options)) for each in variants}
        charged = charged_passes(options, shape, model, engines, progress)
        for recording in RECORDINGS:
            if options.recording and recording.name not in options.recording:
                continue
            meter = LoadMeter(options.threads or 0)
            replay = RecordingReplay(engines, charged, recording, options, shape)
            found = replay.run(variants, deadline, progress)
            if not found:
                progress.print(f"{shape}, {recording.name}: nothing measured yet")
                continue
            if options.validate is not None:
                real_host.keep(recording.name, [each for each in found if each.variant == REAL.name])
            if options.passes == "timed":
                factors = real_host.factors(recording.name, [each for each in found if each.variant == BASE.name])
                console.print(f"{shape}, {recording.name}: {factors}")
                if options.validate is None:
                    found = factors.applied(found)
            key = shape, recording.name
            result = results[key] = replay.summarized(found, BASE.name, meter)
            gains[key] = replay.gains(found, variants)
            show(console, result)
            console.print(f"{result.conditions.conversations} of {replay.conversations} conversations measured")


def gains_json(gains: Mapping[str, ModeResult]) -> dict[str, Any]:
    """Gains as plain values."""
    return {name: mode.to_json() for name, mode in gains.items()}


def mapping(key: tuple[str, str], result: BenchResult) -> dict[str, Any]:
    """One result as a JSON object."""
    oracle = oracle_of(result)
    shares = {} if oracle is None else {mode.name: round(gain_share(mode, oracle), 3) for mode in result.modes}
    return {"shape": key[0], "recording": key[1], "share_of_oracle": shares, **result.to_json()}


if __name__ == "__main__":
    main()
