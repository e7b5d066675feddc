"""Throughput of several clients at a time, and of several answers to one prompt.

Compares edge-run with another version of it (`--before`, the interpreter of its environment), with llama.cpp, whose
continuous batching is run through its C functions, and with the engine of ONNX Runtime GenAI. Every engine runs in its
own process, one at a time in turn; ratios are medians over rounds. Answers are greedy, without drafts, to different
prompts of random tokens; with `--recording`, recorded answers are replayed with drafts and without too. Prints a table,
then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from artifacts import bundle
from peer_models import LlamaTools, genai_model
from processes import Worker
from shapes import SHAPES


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    shape = SHAPES[options.shape]
    most = max(options.clients)
    ours = options.model or bundle(options.work, shape, options.block)
    capacity = 2048 if options.recording else options.prompt + options.tokens + 16
    common: dict[str, Any] = {"threads": options.threads, "capacity": capacity}
    # The graph that reads prompts is otherwise made and measured while the process is idle.
    ours_only: dict[str, Any] = {"parallel": most, "prefill": options.prefill}
    with ExitStack() as stack:
        workers = [Worker("edge-run", "edge-run", ours, **ours_only, **common)]
        if options.before:
            workers.append(Worker("before", "edge-run", ours, python=options.before, **ours_only, **common))
        if options.llama_python:
            tools = LlamaTools(options.llama_source, options.llama_python)
            file = options.llama_model or tools.benchmark_model(options.work, shape, "Q4_0")
            workers.append(
                Worker(
                    "llama.cpp Q4_0",
                    "llama",
                    file,
                    python=tools.python,
                    environment=tools.environment if options.llama_source else None,
                    clients=most,
                    threads=options.threads,
                    capacity=capacity * most,
                )
            )
        if options.genai_python:
            file = options.genai_model or genai_model(options.work, shape, options.block, options.genai_python)
            workers.append(Worker("GenAI", "genai", file, python=options.genai_python, clients=most, **common))
        for worker in workers:
            stack.enter_context(worker)
            worker.call("serve", clients=most, prompt=8, tokens=4, seed=1 << 20)
        found = [_measured(workers, options, clients) for clients in options.clients]
        if options.recording:
            found += [_drafts(workers[0], options, clients) for clients in options.clients]
        if options.answers:
            found.append(_choices([each for each in workers if each.label in ("edge-run", "before")], options))
    for row in found:
        print(*(f"{name}: {value}" for name, value in row.items()), sep="  ")
    print(json.dumps({"shape": options.shape, "prompt": options.prompt, "tokens": options.tokens, "rows": found}))


def _measured(workers: list[Worker], options: argparse.Namespace, clients: int) -> dict[str, Any]:
    """Tokens per second and first tokens of that many clients."""
    rates: dict[str, list[float]] = {worker.label: [] for worker in workers}
    first_s: dict[str, list[float]] = {worker.label: [] for worker in workers}
    for number in range(options.rounds):
        for worker in workers if number % 2 == 0 else workers[::-1]:
            seed = 1000 * (number + 1) + 100_000 * clients
            result = worker.call("serve", clients=clients, prompt=options.prompt, tokens=options.tokens, seed=seed)
            rates[worker.label].append(clients * options.tokens / result["seconds"])
            first_s[worker.label] += result["first_s"]
    row: dict[str, Any] = {"clients": clients}
    for label, values in rates.items():
        ratios = [mine / other for mine, other in zip(rates["edge-run"], values, strict=True)]
        row[label] = {
            "tokens_s": round(statistics.median(values), 1),
            "first_token_p95_s": round(float(np.percentile(first_s[label], 95)), 3),
            "edge-run / this": [round(float(each), 3) for each in np.percentile(ratios, (50, 25, 75))],
        }
    return row


def _drafts(worker: Worker, options: argparse.Namespace, clients: int) -> dict[str, Any]:
    """The gain of drafts over none, where that many clients get recorded answers."""
    ratios = []
    for number in range(options.rounds):
        seconds = {}
        for mode in ("off", "auto") if number % 2 == 0 else ("auto", "off"):
            turns = {"file": str(options.recording), "turn": options.turn, "first": clients * number}
            seconds[mode] = worker.call("replay", clients=clients, speculation=mode, **turns)
        ratios.append(seconds["off"] / seconds["auto"])
    quartiles = [round(float(each), 3) for each in np.percentile(ratios, (50, 25, 75))]
    return {"clients": clients, "recording": options.recording.name, "off / auto": quartiles}


def _choices(workers: list[Worker], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of several answers to one prompt."""
    seconds: dict[str, list[float]] = {worker.label: [] for worker in workers}
    for number in range(options.rounds):
        for worker in workers if number % 2 == 0 else workers[::-1]:
            seconds[worker.label].append(
                worker.call("choices", count=options.answers, prompt=64, tokens=200, seed=number)
            )
    return {"answers": options.answers, **{label: round(statistics.median(each), 2) for label, each in seconds.items()}}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    made.add_argument("--block", type=int, default=128, help="weights that share a scale")
    made.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    made.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8], metavar="N")
    made.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of a prompt")
    made.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens of an answer")
    made.add_argument("--answers", type=int, default=4, metavar="N", help="answers to one prompt; 0 for none")
    made.add_argument("--recording", type=Path, metavar="FILE", help="replay it with drafts and without")
    made.add_argument("--turn", type=int, default=1, metavar="N", help="turn of the recorded conversations")
    made.add_argument("--rounds", type=int, default=5, metavar="N")
    made.add_argument("--prefill", default="plain", metavar="MODE", help="what reads edge-run's prompts (plain)")
    made.add_argument("--before", metavar="PYTHON", help="interpreter with another version of edge-run")
    made.add_argument("--llama-python", metavar="PYTHON", help="interpreter with llama-cpp-python")
    made.add_argument("--llama-source", type=Path, metavar="FOLDER", help="llama.cpp's source, built in build/")
    made.add_argument("--llama-model", type=Path, metavar="FILE", help="a GGUF file of the shape, if it is there")
    made.add_argument("--genai-python", metavar="PYTHON", help="interpreter with onnxruntime-genai")
    made.add_argument("--genai-model", type=Path, metavar="FOLDER", help="its model of the shape, if it is there")
    made.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    made.add_argument("--model", type=Path, metavar="FOLDER", help="a bundle of the shape, if it is there")
    return made


if __name__ == "__main__":
    main()
