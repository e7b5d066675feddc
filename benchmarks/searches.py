"""What searches, strategies, votes and checks do for the bundled model's answers to held-out requests.

Example: python benchmarks/searches.py heldout.jsonl --count 400

Each line of the file is an object with `request` and `command`. Prints for every way of answering the fractions of
answers with the first word of the command and of those that equal it, the difference to greedy decoding with its 95 %
interval (paired bootstrap, in points), and the mean number of passes of an answer; then one JSON line. What chooses
among samples gets the same ones, with a temperature of 0.8.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

import edgerun
from edgerun.runtime.strategies.vote import by_vote
from shell_helper import first_word

SAMPLES = 8
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "num_beams=4": {"num_beams": 4},
    "num_beams=4, length_penalty=0": {"num_beams": 4, "length_penalty": 0.0},
    "adadec, entropy=0.5": {"adadec": True, "entropy": 0.5, "temperature": 0.0},
    "adadec, entropy=1.5": {"adadec": True, "entropy": 1.5, "temperature": 0.0},
    "cntp, entropy=0.5": {"cntp": True, "entropy": 0.5, "temperature": 0.8, "seed": 1},
    "cntp, entropy=1.5": {"cntp": True, "entropy": 1.5, "temperature": 0.8, "seed": 1},
    "cad against no request": {"strategies": [edgerun.strategy("cad")], "temperature": 0.0},
    "cad, least_entropy=1": {"strategies": [edgerun.strategy("cad", least_entropy=1.0)], "temperature": 0.0},
    "guidance=1.5 from no request": {"strategies": [edgerun.strategy("negative-prompt")], "temperature": 0.0},
    "dry": {"strategies": [edgerun.strategy("dry")], "temperature": 0.0},
    "momentum": {"strategies": [edgerun.strategy("momentum")], "temperature": 0.0},
}

CHECKS = {"--until 'bash -n'": "(?!)", "--until \"sed 's/<[^>]*>/x/g' | bash -n\"": "<[^>]*>"}
"""What is replaced before `bash -n` reads an answer: nothing, or placeholders such as <file>."""


def answers(llm: edgerun.Engine, request: str) -> dict[str, tuple[str, int]]:
    """The text and the passes of the answer in every way."""
    found = {}
    for name, options in SEARCHES.items():
        reply = llm.generate(request, edgerun.GenerateOptions(max_tokens=128, **options))
        found[name] = reply.text, reply.stats.target_passes
    sampled = edgerun.GenerateOptions(max_tokens=128, temperature=0.8, seed=1, n=SAMPLES, logprobs=0)
    choices = llm.generate(request, sampled).choices
    texts = [each.text for each in choices]
    passes = [each.stats.target_passes for each in choices]
    found["one sample"] = texts[0], passes[0]
    means = [each.stats.mean_logprob or 0.0 for each in choices]
    found[f"best_of={SAMPLES}"] = texts[int(np.argmax(means))], sum(passes)
    for name, expression in ((f"best_of={SAMPLES}, vote", None), (f"best_of={SAMPLES}, vote_by=^\\S+", r"^\S+")):
        weighted = {i: (texts[i], each.stats.logprob_totals.total) for i, each in enumerate(choices)}
        found[name] = texts[next(iter(by_vote(weighted, expression)))], sum(passes)
    for name, hidden in CHECKS.items():
        passing = (i for i, text in enumerate(texts) if is_syntax(re.sub(hidden, "x", text)))
        accepted = next(passing, None)
        tried = sum(passes[: SAMPLES if accepted is None else accepted + 1])
        found[name] = "" if accepted is None else texts[accepted], tried
    return found


def is_syntax(text: str) -> bool:
    """Whether a command is free of syntax errors."""
    return subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True, check=False).returncode == 0


def main() -> None:
    """Answer every request in every way and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heldout", type=Path, help="JSON lines with request and command")
    parser.add_argument("--count", type=int, default=400, help="number of requests")
    parser.add_argument("--progress", type=int, default=0, metavar="N", help="print the table after every N requests")
    arguments = parser.parse_args()
    pairs = [json.loads(line) for line in arguments.heldout.read_text(encoding="utf-8").splitlines()][: arguments.count]
    hits: defaultdict[str, list[tuple[bool, bool, int]]] = defaultdict(list)
    with edgerun.load(draft=None) as llm:
        for number, pair in enumerate(pairs, 1):
            command = pair["command"].strip()
            for name, (text, passes) in answers(llm, pair["request"]).items():
                answer = text.strip()
                hits[name].append((first_word(answer) == first_word(command), answer == command, passes))
            if number == len(pairs) or (arguments.progress and number % arguments.progress == 0):
                print_table({name: np.array(rows, float) for name, rows in hits.items()})
    shares = {
        name: dict(zip(("first_word", "exact"), np.mean(rows, axis=0), strict=False)) for name, rows in hits.items()
    }
    print(json.dumps({"benchmark": "searches", "edgerun": edgerun.__version__, "requests": len(pairs), **shares}))


def print_table(hits: dict[str, np.ndarray]) -> None:
    """Print a row for each way; `hits` has whether the first word and all is right, and the passes."""
    greedy = hits["greedy"]
    print(f"{len(greedy)} requests\n{'':42} {'first word':>32} {'exact':>32} {'passes':>7}")
    for name, rows in hits.items():
        shown = " ".join(f"{interval(rows[:, column], greedy[:, column]):>32}" for column in (0, 1))
        print(f"{name:42} {shown} {rows[:, 2].mean():7.1f}", flush=True)


def interval(hits: np.ndarray, greedy: np.ndarray) -> str:
    """The share of hits, and the difference to greedy decoding with its 95 % interval, in points."""
    differences = hits - greedy
    drawn = np.random.default_rng(0).integers(0, len(hits), (4000, len(hits)))
    low, high = np.percentile(100 * differences[drawn].mean(axis=1), [2.5, 97.5])
    return f"{hits.mean():6.1%} {100 * differences.mean():+5.1f} ({low:+5.1f} to {high:+5.1f})"


if __name__ == "__main__":
    main()
