"""Compares how fast several models answer the same requests.

Example: python benchmarks/answers.py old/shell-helper models/bundled/shell-helper --requests heldout.jsonl

The models may differ in their weights, and so in their answers: what is compared is the time per token after the first
one. The models answer a few requests each in turn, in the opposite order every other time, with and without
speculation. Each line of the file is an object with `request`; without a file, the requests of `edge-run bench` are
used. Prints a table (medians and quartiles over the turns, relative to plain decoding with the first model), then one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Final

import edgerun
from rounds import Series, median_ratio, spread
from shell_requests import shell_requests

_SETTLE_S: Final = 0.05
"""Pause before a turn: the threads of the previous model spin for some time after their last task."""
_MAX_TOKENS: Final = 96
_MODES: Final = (edgerun.Speculation.OFF, edgerun.Speculation.AUTO)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="model folders; the others are compared with the first")
    parser.add_argument("--requests", type=Path, metavar="FILE", help="JSON lines with `request`")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="requests (200)")
    parser.add_argument("--turn", type=int, default=5, metavar="N", help="requests per turn (5)")
    options = parser.parse_args()
    requests = shell_requests(options.requests, options.limit)
    turns = [requests[start : start + options.turn] for start in range(0, len(requests), options.turn)]

    series: Series = {}
    with ExitStack() as stack:
        engines = [stack.enter_context(edgerun.load(model)) for model in options.models]
        runs = list(product(range(len(engines)), _MODES))
        for which, mode in runs:  # weights are packed and passes are timed in the first run
            seconds_per_token(engines[which], turns[0], mode)
        for number, asked in enumerate(turns):
            for which, mode in runs if number % 2 == 0 else reversed(runs):
                time.sleep(_SETTLE_S)
                seconds = seconds_per_token(engines[which], asked, mode)
                series.setdefault(label_of(options.models[which], mode), []).append(seconds)

    base = label_of(options.models[0], _MODES[0])
    results = []
    print(f"{'':44} {'ms/token':>10} {'ratio':>13} {'quartiles':>15}")
    for label, times in series.items():
        ratio, (lower, upper) = median_ratio(series, label, base), spread(series, label, base)
        median = 1e3 * statistics.median(times)
        print(f"{label:44} {median:10.4f} {ratio:13.3f} {lower:8.3f} {upper:6.3f}")
        results.append({"model": label, "ms": median, "ratio": ratio, "quartiles": [lower, upper]})
    print(json.dumps({"benchmark": "answers", "edgerun": edgerun.__version__, "results": results}))


def seconds_per_token(engine: edgerun.Engine, requests: Sequence[str], mode: edgerun.Speculation) -> float:
    """Mean seconds per token of greedy answers, without their first tokens."""
    seconds, tokens = 0.0, 0
    for request in requests:
        stats = engine.generate(request, temperature=0.0, max_tokens=_MAX_TOKENS, speculation=mode).stats
        seconds += stats.total_s - stats.first_token_s
        tokens += stats.completion_tokens - 1
    return seconds / tokens


def label_of(model: Path, mode: edgerun.Speculation) -> str:
    """Name of a row of the table."""
    return f"{model.parent.name}/{model.name} {mode}"


if __name__ == "__main__":
    main()
