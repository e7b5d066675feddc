"""Accuracy against tokens per pass of the rules by which models fill blocks of masked tokens.

A model that fills blocks (SDAR's layout) and one that generates token by token, both of a million parameters, are
trained on the same tasks with lists of eight letters, as in ParallelBench (arXiv 2510.04767): copying, reversing,
sorting, and shuffling, where every order of the letters is right and the places depend on each other. Then both answer
held-out requests, sampled at a temperature of 1, the first one by every rule. Training needs torch and transformers;
models are kept in `--work`. Prints a table, then one JSON line; `--plot FILE` needs matplotlib.

Examples: python benchmarks/blocks.py --train-python ~/torch/bin/python --steps 2000; python benchmarks/blocks.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

import edgerun
from block_training import LENGTH, TASKS, VOCABULARY, request
from edgerun.export import FP32, ExportRecipe, export_checkpoint

_TRAINING: Final = Path(__file__).with_name("block_training.py")
_RULES: Final = (
    *("in-order:1", "in-order:2", "in-order:4", "in-order:8", "fixed:1", "fixed:2", "fixed:4"),
    *("threshold:0.95", "threshold:0.9", "threshold:0.7", "threshold:0.5", "factor:0.5", "factor:1", "factor:2"),
    *("entropy:0.1", "entropy:0.5", "nll:0.1", "nll:0.5", "prophet:1", "prophet:0.5", "local-leap", "stable"),
    *("unit:0.9", "unit:0.7", "unit:0.5", "learned:{folder}/network.safetensors,0.9"),
    *("learned:{folder}/network.safetensors,0.7", "learned:{folder}/network.safetensors,0.5"),
)


def is_right(task: str, prompt: list[int], answer: list[int]) -> bool:
    """Whether an answer is a right one."""
    items = prompt[-1 - LENGTH : -1]
    expected = {"copy": items, "reverse": items[::-1], "sort": sorted(items)}
    return answer == expected[task] if task in expected else sorted(answer) == sorted(items)


class Found(NamedTuple):
    """What a rule came to in a task."""

    right: float
    """Share of right answers."""
    tokens_per_pass: float


def measure(model: Path, rule: str | None, requests: int) -> dict[str, Found]:
    """What a rule comes to in every task."""
    random = np.random.default_rng(2)
    right, passes = dict.fromkeys(TASKS, 0), dict.fromkeys(TASKS, 0)
    with edgerun.load(model, threads=1, cache=False) as engine:
        for number in range(requests * len(TASKS)):
            task = TASKS[number % len(TASKS)]
            prompt, _ = request(task, random)
            reply = engine.generate(
                " ".join(VOCABULARY[each] for each in prompt),
                raw=True,
                max_tokens=LENGTH,
                temperature=1.0,
                seed=number,
                ignore_eos=True,
                speculation=edgerun.Speculation.OFF,
                block_rule=rule,
            )
            answer = [VOCABULARY.index(word) for word in reply.text.split()]
            right[task] += is_right(task, prompt, answer)
            passes[task] += reply.stats.decode_passes + (rule is None)  # the prompt's pass gives the first token
    return {task: Found(right[task] / requests, LENGTH * requests / passes[task]) for task in TASKS}


def plot(results: dict[str, dict[str, Found]], file: Path) -> None:
    """Draw the right answers of each task over the tokens per pass; rules of one name are joined."""
    from matplotlib import pyplot  # noqa: PLC0415 -- only here

    _, axes = pyplot.subplots(1, len(TASKS), figsize=(16, 4.5), sharey=True, layout="tight")
    for axis, task in zip(axes, TASKS, strict=True):
        for name in dict.fromkeys(rule.partition(":")[0] for rule in results):
            points = sorted(
                (found[task].tokens_per_pass, found[task].right)
                for rule, found in results.items()
                if rule.partition(":")[0] == name
            )
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
        axis.set(title=task, xlabel="tokens per pass", ylim=(-0.03, 1.03))
    axes[0].set_ylabel("right answers")
    axes[-1].legend(fontsize=8)
    pyplot.savefig(file)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks" / "blocks")
    parser.add_argument("--train-python", default=sys.executable, help="interpreter with torch and transformers")
    parser.add_argument("--steps", type=int, default=2000, help="of training, for each model")
    parser.add_argument("--requests", type=int, default=100, help="for each task and rule")
    parser.add_argument("--plot", type=Path, help="picture of accuracy against tokens per pass, .svg or .png")
    options = parser.parse_args()
    results = {}
    for kind in ("sdar", "qwen3"):
        if not (options.work / kind / "config.json").is_file():
            arguments = [kind, str(options.work / kind), str(options.steps)]
            subprocess.run([options.train_python, str(_TRAINING), *arguments], check=True)
        if not (bundle := options.work / f"{kind}-bundle").is_dir():
            export_checkpoint(options.work / kind, bundle, ExportRecipe(FP32))
        for rule in _RULES if kind == "sdar" else (None,):
            name = (rule or "token by token").replace("{folder}/network.safetensors,", "")
            given = None if rule is None else rule.replace("{folder}", str(options.work / kind))
            results[name] = measure(bundle, given, options.requests)
    table = Table("rule", *TASKS, title="right answers, and tokens per pass")
    for rule, found in results.items():
        table.add_row(rule, *(f"{found[each].right:.2f} {found[each].tokens_per_pass:.2f}" for each in TASKS))
    Console().print(table)
    if options.plot is not None:
        plot(results, options.plot)
    print(json.dumps({"benchmark": "blocks", "requests": options.requests, "results": results}))


if __name__ == "__main__":
    main()
