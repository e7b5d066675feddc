"""Speed of recorded texts at long contexts, with drafts of the target over few cache slots and without.

A model of a known shape with random weights decodes texts that are given, after caches filled with arbitrary values, so
every pass costs what it costs and drafters that look for repetitions find them. What the target's own drafts would say
cannot come from random weights: after every draft pass its logits are replaced by ones that have the recorded token
with a probability p, and are right in the share p of all positions. Its mean is `--accepted`; at 0 the logits stay
random. Plain decoding, all drafters without `sparse`, and `auto` take turns. Prints a table, then one JSON line.

Example: python benchmarks/sparse_replay.py --model DIR --text aider_sessions.md --contexts 8192 32000
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

import edgerun
from edgerun import GenerateOptions
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.graph.bound_graph import BoundGraph
from edgerun.runtime.measure.pass_timing import pad_cache
from edgerun.runtime.options import Request
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.drafters.sparse_cache import LONG_CONTEXT, SparseCacheDraft
from edgerun.runtime.speculation.replay import Recording, ReplaySampler

_CLASSES: Final = {0.0: (), 0.7: (0.35, 0.8, 0.97), 0.8: (0.5, 0.9, 0.99), 0.9: (0.75, 0.95, 0.99)}
"""Equally frequent probabilities of the draft's first tokens, by about their mean."""


class KnownText:
    """Replaces logits of draft passes.

    Args:
        text: token ids of the prompt and the recorded answer.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self._text: Final = text
        self._random: Final = np.random.default_rng(1).random((len(text), 2))
        self._logits: Final = SparseCacheDraft.logits
        self.probabilities: Sequence[float] = ()

    def logits(self, model: SparseCacheDraft, path: tuple[int, ...]) -> Any:
        """Logits after a path, which are those of the recording unless the path has left it."""
        known = path in model._logits
        found = self._logits(model, path)
        place = len(model._text) + len(path)
        if found is None or known or not self.probabilities or place >= len(self._text):
            return found
        which, drawn = self._random[place]
        probability = self.probabilities[int(which * len(self.probabilities))]
        token = self._text[place] if drawn < probability else (self._text[place] + 1) % 1000
        found.fill(0)
        found[token] = np.log(probability / (1 - probability) * (found.size - 1))
        return found


def answer_seconds(
    engine: edgerun.Engine, bound: BoundGraph, text: Sequence[int], context: int, mode: str
) -> tuple[float, float]:
    """Seconds a token of the recorded answer after its first one, and tokens a pass."""
    arena, prompt, answer = bound.arena, list(text[:context]), text[context:]
    arena.rewind_to(context - 1)
    options = GenerateOptions(speculation=Speculation.parse("suffix,edit" if mode == "without" else "auto"))
    params = SamplingParams()
    recording = Recording(tuple(answer))
    sampler = ReplaySampler(answer, context, Sampler(params, bound.graph_io.vocab_size))
    request = Request(prompt, options, params, recording=recording)
    with engine.model.drafters.answering(request, arena) as found:
        steps = decode(bound, prompt, sampler, DecodeLimits(len(answer)), None if mode == "plain" else found)
        next(steps)
        started = time.perf_counter()
        count = sum(1 for _ in steps)
        return (time.perf_counter() - started) / (len(answer) - 1), (len(answer) - 1) / count


def parts(ids: Sequence[int], count: int, size: int) -> list[list[int]]:
    """So many parts of a text, of so many tokens."""
    step = (len(ids) - size) // count
    return [list(ids[number * step : number * step + size]) for number in range(count)]


def geometric(values: Sequence[float]) -> float:
    """Geometric mean."""
    return float(np.exp(np.mean(np.log(values))))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a bundle with a real tokenizer")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 16384, 32000])
    parser.add_argument("--accepted", type=float, nargs="+", choices=_CLASSES, default=[0.0, 0.7, 0.8, 0.9])
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--answers", type=int, default=3, help="answers of each text")
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    rows = []
    with edgerun.load(arguments.model, context=32768, draft=None, prefill="plain") as engine:
        graph = engine.model._open_graph()
        encode = engine.model.tokenizer.encode_plain
        recordings = [encode(path.read_text(encoding="utf-8")[:600_000]) for path in arguments.text]
        for context in arguments.contexts:
            bound = graph.bind(graph.arena(context + arguments.tokens + 64))
            pad_cache(bound, context)
            texts = [each for ids in recordings for each in parts(ids, arguments.answers, context + arguments.tokens)]
            answer_seconds(engine, bound, texts[0], context, "without")  # measures which graph runs which pass
            for mode in ("without", *map(str, arguments.accepted)):
                drafters = engine.model.drafters
                drafters._load_resources().mixers.clear()  # what was learned with another share
                drafters._idle.clear()
                found = []
                for text in texts:
                    if time.monotonic() > deadline:
                        break
                    known = KnownText(text)
                    known.probabilities = () if mode == "without" else _CLASSES[float(mode)]
                    SparseCacheDraft.logits = lambda model, path, known=known: known.logits(model, path)  # type: ignore[method-assign, misc]
                    plain, _ = answer_seconds(engine, bound, text, context, "plain")
                    seconds, per_pass = answer_seconds(engine, bound, text, context, mode)
                    SparseCacheDraft.logits = known._logits  # type: ignore[method-assign]
                    found.append((1e3 * plain, 1e3 * seconds, per_pass, plain / seconds))
                if found:
                    speeds = [each[3] for each in found]
                    rows.append((context, mode, *np.median(found, axis=0)[:3].tolist(), geometric(speeds), speeds))
    table = Table(title="ms a token and tokens a pass (medians), speed over plain decoding (geometric mean; answers)")
    for name in ("context", "drafts", "plain", "ms", "tokens a pass", "speed", "answers"):
        table.add_column(name, justify="right")
    for context, mode, *figures, speed, speeds in rows:
        cells = [f"{figure:.1f}" for figure in figures]
        table.add_row(str(context), mode, *cells, f"{speed:.2f}", " ".join(f"{each:.2f}" for each in speeds))
    Console(width=110).print(table)
    print(json.dumps({"benchmark": "sparse_replay", "rows": rows, "from": LONG_CONTEXT}))


if __name__ == "__main__":
    main()
