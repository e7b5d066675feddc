"""Speed of plain decoding, prefill and wide passes, memory, and load time.

Compares edge-run with a bare onnxruntime loop over the same graph and, where they are installed, with ONNX Runtime
GenAI, llama.cpp and OpenVINO GenAI, each with models made by its own tools from the same checkpoint. Every engine runs
in its own process, and they are measured one at a time in turn; ratios are medians over rounds. Weights are random (see
checkpoints.py): speed does not depend on them. Prints tables, then one JSON line; `--markdown FILE` writes one table
for a document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console

from artifacts import bundle, checkpoint
from decode_tables import (
    BARE,
    CONTEXT,
    EDGE,
    DecodeSettings,
    MeasuredEngine,
    Measurements,
    markdown,
    show,
    summarize,
)
from peer_models import LlamaTools, genai_model, openvino_model
from processes import Worker
from rounds import Series, alternate, join, restarted
from shapes import SHAPES, Shape

_SPARE: Final = 128
"""Slots of the cache beyond the longest context: those of the tokens that are generated."""
_SHORT_CONTEXT: Final = 2048
"""Rounds over longer contexts and prompts are fewer: they take seconds each, and vary less."""


def measure(
    engines: Sequence[MeasuredEngine],
    settings: DecodeSettings,
    report: Callable[[str], None],
) -> Measurements:
    """Run all measurements."""
    found = Measurements(settings)
    by_label = {each.label: each for each in engines}
    with start(by_label[EDGE], settings) as worker:
        found.first_load_s = worker.loaded["seconds"]
    for restart, workers in enumerate(restarted(engines, settings.restarts, lambda each: start(each, settings))):
        report(f"processes {restart + 1} of {settings.restarts}: loaded")
        decoding = [worker for worker in workers if not by_label[worker.label].prompts_only]
        _Round(workers, decoding, settings, found, report, restart).run()
    return found


def start(engine: MeasuredEngine, settings: DecodeSettings) -> Worker:
    """Start an engine's process and load its model."""
    longest = max(*settings.contexts, *settings.prompts, *settings.widths)
    return Worker(
        engine.label,
        engine.engine,
        engine.model,
        python=engine.python,
        environment=engine.environment,
        threads=settings.threads,
        capacity=longest + _SPARE,
        **engine.settings,
    )


class _Round:
    """All measurements with running processes."""

    def __init__(
        self,
        workers: Sequence[Worker],
        decoding: Sequence[Worker],
        settings: DecodeSettings,
        found: Measurements,
        report: Callable[[str], None],
        restart: int,
    ) -> None:
        self._workers = workers
        self._decoding = decoding
        self._settings = settings
        self._found = found
        self._report = report
        self._seed = 1000 * restart
        """Number of the next prompt: an engine that keeps the cache of earlier prompts must not know it."""

    def run(self) -> None:
        for worker in self._workers:
            self._found.load_s.setdefault(worker.label, []).append(worker.loaded["seconds"])
            worker.call("decode", context=CONTEXT, tokens=4)  # first passes allocate
            now = worker.call("memory")
            self._found.memory[worker.label] = {
                "before": worker.loaded["before"]["resident"],
                "loaded": worker.loaded["after"]["resident"],
                "decoding": now["resident"],
                "decoding_anonymous": now["anonymous"],
            }
        for context in self._settings.contexts:
            self._decode(context)
        if self._settings.widths:
            self._passes()
        before = {worker.label: worker.call("memory", reset=True)["peak"] for worker in self._workers}
        for count in self._settings.prompts:
            self._prefill(count)
        for worker in self._workers:
            prompts = worker.call("memory")["peak"]
            self._found.memory[worker.label] |= {"prompts": prompts, "peak": max(prompts, before[worker.label])}

    def _decode(self, context: int) -> None:
        self._report(f"  decoding after {context} tokens")
        settings = self._settings

        def decode(worker: Worker) -> float:
            return float(worker.call("decode", context=context, tokens=settings.tokens))

        for worker in self._decoding:
            worker.call("decode", context=context, tokens=2)  # reads the prompt, which every engine keeps
        self._found.decode[context].append(alternate(self._decoding, settings.rounds, decode, self._found.idle_load))

    def _passes(self) -> None:
        settings, found = self._settings, self._found
        same_graph = [worker for worker in self._workers if worker.label in (EDGE, BARE)]
        widths = settings.widths
        parts: dict[int, list[Series]] = {width: [] for width in widths}
        for number in range(settings.rounds):
            self._report(f"  passes of {widths[0]} to {widths[-1]} tokens, round {number + 1}")
            for width in widths if number % 2 == 0 else reversed(widths):

                def run_pass(worker: Worker, width: int = width) -> float:
                    return float(worker.call("passes", context=CONTEXT, width=width, repeats=settings.passes))

                order = same_graph if number % 2 == 0 else same_graph[::-1]
                parts[width].append(alternate(order, 1, run_pass, found.idle_load))
        for width in widths:
            found.widths[width].append(join(parts[width]))

    def _prefill(self, count: int) -> None:
        self._report(f"  prompts of {count} tokens")
        rounds = self._settings.rounds
        if count > CONTEXT:
            rounds = max(1 if count > _SHORT_CONTEXT else 2, rounds // (6 if count > _SHORT_CONTEXT else 2))
        parts = []
        for number in range(rounds):
            self._seed += 1

            def prefill(worker: Worker) -> float:
                return float(worker.call("prefill", tokens=count, seed=self._seed))

            order = self._workers if number % 2 == 0 else self._workers[::-1]
            parts.append(alternate(order, 1, prefill, self._found.idle_load))
        self._found.prefill[count].append(join(parts))


def engines_of(options: argparse.Namespace, shape: Shape) -> list[MeasuredEngine]:
    """The engines that were asked for, with their models, which are made where they are missing."""
    ours = bundle(options.work, shape, options.block)
    first, *others = [{"prefill": mode} for mode in options.prefill] or [{}]
    engines = [MeasuredEngine(EDGE, "edge-run", ours, settings=first)]
    for settings in others:
        label = f"{EDGE}, --prefill {settings['prefill']}"
        engines.append(MeasuredEngine(label, "edge-run", ours, settings=settings, prompts_only=True))
    if not options.peers_only:
        engines.append(MeasuredEngine(BARE, "bare", ours))
    if options.genai_python:
        for block in options.genai_blocks or sorted({options.block, 32}, reverse=True):
            model = genai_model(options.work, shape, block, options.genai_python)
            label = f"GenAI, block {block}" + (" (its default)" if block == 32 else "")
            engines.append(MeasuredEngine(label, "genai", model, options.genai_python))
    if options.llama_python:
        tools = LlamaTools(options.llama_source, options.llama_python)
        for quantization in options.llama_formats:
            file = tools.benchmark_model(options.work, shape, quantization)
            engines.append(MeasuredEngine(f"llama.cpp {quantization}", "llama", file, tools.python, tools.environment))
    if options.openvino_python:
        folder = options.work / shape.name / "openvino-int4-128"
        model = openvino_model(checkpoint(options.work, shape), folder, options.openvino_python)
        engines.append(MeasuredEngine("OpenVINO GenAI, int4", "openvino", model, options.openvino_python))
    return engines


def conditions(shape: Shape, block: int, settings: DecodeSettings) -> dict[str, Any]:
    """The conditions of the measurement."""
    return {
        "shape": shape.name,
        "weights": f"random, int4, block {block}",
        "contexts": settings.contexts,
        "threads": settings.threads,
        "cores": psutil.cpu_count(logical=False),
        "cpu": _cpu_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "onnxruntime": version("onnxruntime"),
        "restarts": settings.restarts,
        "rounds": settings.rounds,
    }


def _rounded(value: Any) -> Any:
    """Round every number to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/decode.py --shape qwen2.5-0.5b --genai-python ~/genai/bin/python",
    )
    default = DecodeSettings()
    made.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    made.add_argument("--block", type=int, choices=(32, 64, 128), default=128, help="weights that share a scale")
    made.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    made.add_argument("--contexts", type=int, nargs="+", metavar="N", default=default.contexts)
    made.add_argument("--prompts", type=int, nargs="+", metavar="N", default=default.prompts)
    made.add_argument(
        "--prefill",
        nargs="+",
        metavar="MODE",
        default=[],
        help="what reads edge-run's prompts, as in edge-run --prefill; for further modes only prompts are measured",
    )
    made.add_argument("--quick", action="store_true", help="few rounds, no restarts")
    made.add_argument("--restarts", type=int, metavar="N", help="restarts of all processes (3; quick: 1)")
    made.add_argument("--rounds", type=int, metavar="N", help="rounds of a restart (6; quick: 3)")
    made.add_argument("--peers-only", action="store_true", help="leave out the bare loop and the cost of wide passes")
    made.add_argument("--prepare", action="store_true", help="only make the models that are missing")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="also write one table for a document")
    made.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    made.add_argument("--genai-python", metavar="PATH", help="interpreter that has onnxruntime-genai, psutil and numpy")
    made.add_argument("--genai-blocks", type=int, nargs="+", metavar="N", help="(that of --block, and GenAI's 32)")
    made.add_argument("--llama-python", metavar="PATH", help="interpreter that has llama-cpp-python, psutil and numpy")
    made.add_argument("--llama-source", type=Path, metavar="DIR", help="llama.cpp's source, built in DIR/build")
    made.add_argument("--llama-formats", nargs="+", metavar="NAME", default=["Q4_0", "Q4_K_M"])
    made.add_argument("--openvino-python", metavar="PATH", help="interpreter that has openvino-genai, optimum-intel")
    return made


def main() -> None:
    """Command line."""
    command = parser()
    options = command.parse_args()
    if options.llama_python and not options.llama_source:
        command.error("--llama-python needs --llama-source")
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 140
    shape = SHAPES[options.shape]
    settings = DecodeSettings(threads=options.threads, contexts=tuple(options.contexts), prompts=tuple(options.prompts))
    if options.quick:
        settings = settings.quick()
    if options.peers_only:
        settings = replace(settings, widths=())
    if options.restarts:
        settings = replace(settings, restarts=options.restarts)
    if options.rounds:
        settings = replace(settings, rounds=options.rounds)
    progress.print("preparing models")
    engines = engines_of(options, shape)
    if options.prepare:
        return
    cache = options.work / "cache"  # an empty one, so that the first load packs the weights
    shutil.rmtree(cache, ignore_errors=True)
    os.environ["EDGERUN_CACHE"] = str(cache.absolute())
    found = measure(engines, settings, progress.print)
    run_conditions = conditions(shape, options.block, settings)
    result = {"benchmark": "decode", "conditions": run_conditions, **summarize(found, engines)}
    title = f"{shape.name}, int4 block {options.block}, {options.threads} threads, {run_conditions['cpu']}"
    show(console, result, title)
    if options.markdown:
        options.markdown.write_text(markdown(result, title), encoding="utf-8")
    print(json.dumps(_rounded(result)))


if __name__ == "__main__":
    main()
