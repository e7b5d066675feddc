"""What completions cost while somebody types: a request with every key, over a file that has a gap.

The gap is in the middle of a source file and is filled with what the file really has there, character by character.
Every request has some text before the cursor and some after the gap, and asks for a suggestion of 12 tokens. The prompt
has the order prefix, suffix, middle, or the suffix first. Two passes over the keys: in the first every request comes
to its end, in the second it is cancelled where the next key comes first. With --replay the suggestion is the file's own
text, which drafts meet as they would meet a good model's; otherwise the model's own. With llama.cpp, whose cache keeps
the common beginning of two prompts, both get the same token ids in turn, some keys each; then one JSON line.

Example: python benchmarks/typing_trace.py --model my-coder --llama-python PYTHON --llama-model coder-q4_0.gguf
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from edgerun.models.bundle import Bundle
from edgerun.runtime.text.infill import InfillTokens
from edgerun.runtime.text.tokenizer import TextTokenizer
from processes import Worker

_ORDERS: Final = {"prefix first": False, "suffix first": True}
_KEYS_A_TURN: Final = 4
"""Keys that an engine gets before the other one gets them."""


def trace(model: Path, options: argparse.Namespace, *, suffix_first: bool) -> list[tuple[list[int], list[int]]]:
    """The prompt of every key, and the tokens of the suggestion that the file has."""
    text = options.file.read_text(encoding="utf-8")
    start = text.index("\n", len(text) // 2) + 1
    end = start + options.keys
    begin = text.rindex("\n", 0, start - options.before) + 1
    tokenizer = TextTokenizer(Bundle(model, model / "model.onnx", None), 1 << 20)
    infill = InfillTokens.of(tokenizer)
    after = text[end : end + options.after]
    made = []
    for cursor in range(start, end):
        prompt = infill.prompt_ids(text[begin:cursor], after, suffix_first=suffix_first)
        following = tokenizer.encode_plain(text[cursor : cursor + 20 * options.tokens])
        made.append((prompt, following[: options.tokens]))
    return made


def measure(
    engines: dict[str, Worker], keys: list[tuple[list[int], list[int]]], budget_s: float, *, replay: bool
) -> dict[str, list[dict[str, Any]]]:
    """What `fill` returns for every key, by engine; the first request, which reads all, is made before."""
    for engine in engines.values():
        engine.call("fill", prompt=keys[0][0], answer=keys[0][1], budget_s=0.0, replay=replay)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for turn, first in enumerate(range(0, len(keys), _KEYS_A_TURN)):
        for name in sorted(engines, reverse=bool(turn % 2)):
            for prompt, answer in keys[first : first + _KEYS_A_TURN]:
                done = engines[name].call("fill", prompt=prompt, answer=answer, budget_s=budget_s, replay=replay)
                found[name].append({**done, "prompt": len(prompt)})
    return found


def figures(whole: list[dict[str, Any]], paced: list[dict[str, Any]]) -> dict[str, float]:
    """Median time to a suggestion, share of prompt tokens that were read, and cancelled requests."""
    return {
        "ms": round(1e3 * statistics.median(each["seconds"] for each in whole), 1),
        "read": round(sum(each["read"] for each in whole) / sum(each["prompt"] for each in whole), 4),
        "cancelled": sum(not each["ended"] for each in paced),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a bundle with tokens for it")
    parser.add_argument("--file", type=Path, default=Path(textwrap.__file__), help="source file, of Python by default")
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=12, help="tokens of a suggestion")
    parser.add_argument("--before", type=int, default=4000, help="characters before the gap")
    parser.add_argument("--after", type=int, default=1000, help="characters after the gap")
    parser.add_argument("--interval", type=float, default=150.0, help="milliseconds between keys of the second pass")
    parser.add_argument("--replay", action="store_true", help="suggest the file's own text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-python", help="interpreter with llama-cpp-python")
    parser.add_argument("--llama-model", type=Path, help="GGUF file of the same vocabulary")
    options = parser.parse_args()
    settings = {"threads": options.threads, "capacity": 4096}
    results: dict[str, dict[str, dict[str, float]]] = {}
    with ExitStack() as stack:
        engines = {"edge-run": stack.enter_context(Worker("edge-run", "edge-run", options.model, **settings))}
        if options.llama_python:
            llama = Worker("llama.cpp", "llama", options.llama_model, python=options.llama_python, **settings)
            engines["llama.cpp"] = stack.enter_context(llama)
        for order, suffix_first in _ORDERS.items():
            keys = trace(options.model, options, suffix_first=suffix_first)
            whole = measure(engines, keys, 0.0, replay=options.replay)
            paced = measure(engines, keys, options.interval / 1e3, replay=options.replay)
            results[order] = {name: figures(whole[name], paced[name]) for name in engines}
            print(json.dumps({order: results[order]}), file=sys.stderr)  # the run takes long, and may be interrupted
    table = Table(
        "order", "engine", "ms to a suggestion", "tokens read anew", "requests cancelled", title=f"{options.keys} keys"
    )
    for order, by_engine in results.items():
        for name, found in by_engine.items():
            table.add_row(order, name, f"{found['ms']:.1f}", f"{found['read']:.1%}", str(found["cancelled"]))
    Console().print(table)
    shown = {name: getattr(options, name) for name in ("keys", "tokens", "before", "after", "interval", "replay")}
    print(json.dumps({**shown, "prompt": len(keys[0][0]), **results}))


if __name__ == "__main__":
    main()
