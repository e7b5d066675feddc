"""Speedup of a draft model for a larger target: the bundled pair's answers replayed over a larger graph.

The bundled target answers requests greedily. These answers are replayed over a graph of another model's shape with the
bundled vocabulary and random weights, and with the bundled draft model. Acceptance is real, because text and draft are,
and so is the cost of every pass. Modes are compared with plain decoding, request by request, in one run.

Example: python benchmarks/model_drafting.py --requests heldout.jsonl --spec auto --spec model --spec suffix

Each line of the file is an object with `request`; without a file, the shell requests of `edge-run bench` are used.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final

from rich.console import Console

import edgerun
from artifacts import bundle
from edgerun.edge.bench.bench_result import BenchConditions, BenchResult
from edgerun.edge.bench.prompt_sets import read_recording
from edgerun.edge.bench.runner import BenchSettings, DecodingMode, measure_modes, parse_turns
from edgerun.edge.cli.bench import show
from edgerun.models.find import bundled_folder
from edgerun.runtime.measure.system_load import LoadMeter
from edgerun.runtime.speculation.choice import Speculation
from shapes import SHAPES
from shell_requests import shell_requests

_SHAPE: Final = "qwen2.5-0.5b"
_MAX_TOKENS: Final = 96


def record(requests: list[str], path: Path) -> None:
    """Write the bundled model's greedy answers as a recording."""
    with edgerun.load(draft=None) as engine, path.open("w", encoding="utf-8") as file:
        for number, request in enumerate(requests):
            answer = engine.generate(request, temperature=0.0, max_tokens=_MAX_TOKENS, speculation=Speculation.OFF).text
            turns = [{"prompt": request, "response": answer}]
            file.write(json.dumps({"id": number, "category": "shell", "turns": turns}) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=Path, metavar="FILE", help="JSON lines with `request`")
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="requests (100)")
    parser.add_argument("--spec", action="append", help="as in edge-run --spec; may be repeated (auto)")
    parser.add_argument("--block", type=int, choices=(32, 64, 128), default=128, help="weights that share a scale")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    options = parser.parse_args()

    requests = shell_requests(options.requests, options.limit)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    options.work.mkdir(parents=True, exist_ok=True)
    recording = options.work / "shell-answers.jsonl"
    record(requests, recording)
    folder = bundled_folder()
    shape = replace(SHAPES[_SHAPE], name=f"{_SHAPE}-shell", vocab=4096, context=2048)
    model = bundle(options.work, shape, options.block, folder)
    with edgerun.load(model, draft=folder / "draft") as engine:
        modes = [DecodingMode(str(each), each) for each in map(Speculation.parse, options.spec or ["auto"])]
        plan = BenchSettings(_MAX_TOKENS, parse_turns("all"), replay=True)
        meter = LoadMeter()
        conversations = read_recording(recording)
        found = list(chain.from_iterable(measure_modes(engine, dict(enumerate(conversations)), modes, plan)))
        conditions = BenchConditions(
            model=shape.name,
            draft=f"{folder.name}/draft",
            device=str(engine.device),
            threads=None,
            context=engine.context,
            source="answers of the bundled model",
            replay=True,
            max_tokens=_MAX_TOKENS,
            turns="all",
            temperature=0.0,
            conversations=len(conversations),
        )
        result = BenchResult.of(found, conditions, meter)
    show(console, result)
    print(json.dumps({"benchmark": "model_drafting", **result.to_json()}))


if __name__ == "__main__":
    main()
