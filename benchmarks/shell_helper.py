"""Quality of the bundled model: its greedy answers to held-out requests.

Example: python benchmarks/shell_helper.py heldout.jsonl

Each line of the file is an object with `source`, `request` and `command`. Prints the fractions of answers that equal
the command, and of answers with the first word of the command, by source, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import edgerun


def main() -> None:
    """Answer every request and print the fractions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heldout", type=Path, help="JSON lines with source, request and command")
    parser.add_argument("--model", type=Path, default=None, help="model folder (default: the bundled model)")
    parser.add_argument(
        "--lossy", default=None, metavar="RULE", help="let the draft model choose tokens, as edge-run does"
    )
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the first N answers")
    arguments = parser.parse_args()
    pairs = [json.loads(line) for line in arguments.heldout.read_text(encoding="utf-8").splitlines()]
    exact: defaultdict[str, list[bool]] = defaultdict(list)
    first: defaultdict[str, list[bool]] = defaultdict(list)
    lossy, speculation = arguments.lossy, edgerun.Speculation.AUTO if arguments.lossy else edgerun.Speculation.OFF
    options = edgerun.GenerateOptions(temperature=0.0, max_tokens=128, logprobs=0, speculation=speculation, lossy=lossy)
    stats: list[edgerun.Stats] = []
    with edgerun.load(arguments.model, draft="auto" if lossy else None) as llm:
        for index, pair in enumerate(pairs):
            reply = llm.generate(pair["request"], options)
            answer = reply.text.strip()
            stats.append(reply.stats)
            groups = [pair["source"], "all"] + ["first 150"] * (index < 150)
            for group in groups:
                exact[group].append(answer == pair["command"].strip())
                first[group].append(first_word(answer) == first_word(pair["command"]))
            if index < arguments.show:
                print(f"{pair['request']}\n  expected {pair['command']}\n  answered {answer}")
    print(f"{'':12} {'requests':>8} {'first word':>10} {'exact':>6}")
    for group in exact:
        print(f"{group:12} {len(exact[group]):8} {share(first[group]):10.1%} {share(exact[group]):6.1%}")
    total = edgerun.Stats.total(stats)
    print(f"mean log-probability {total.mean_logprob:.3f}, tokens by model {dict(total.by_model) or 'the target only'}")
    results: dict[str, object] = {
        group: {"first_word": share(first[group]), "exact": share(exact[group])} for group in exact
    }
    results |= {"lossy": lossy, "mean_logprob": total.mean_logprob, "tokens_by_model": dict(total.by_model)}
    print(json.dumps({"benchmark": "shell_helper", "edgerun": edgerun.__version__, **results}))


def first_word(command: str) -> str:
    """The program that a command runs first."""
    words = command.split()
    return words[0] if words else ""


def share(hits: Sequence[bool]) -> float:
    """Fraction of hits."""
    return statistics.fmean(hits)


if __name__ == "__main__":
    main()
