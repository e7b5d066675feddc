"""Cost and gain of structured output: answers of a schema, with and without masks, forced tokens and drafts.

Documents of an extraction set (letters and invoices, made from a seed) are each read as a prompt, and the JSON object
of their ten fields is replayed as the answer at the cost of generating it, in four ways in turn: without a format and
drafts (free), with the format's masks alone (masked), with forced tokens and all drafters (constrained), and with
drafters alone (drafted). The weights may be random, since what is replayed does not come from them; the tokenizer has
to be a real one. With `--llama-python` and `--genai-python`, llama.cpp and ONNX Runtime GenAI generate freely and under
the same schema. Prints tables of medians, then one JSON line.

Examples: python benchmarks/structured.py; python benchmarks/structured.py --documents 10 --model models/my-model
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

import edgerun
from artifacts import bundle
from edgerun import Engine, GenerateOptions, Reply, ResponseFormat, Speculation
from edgerun.runtime.result import DraftCounts
from shapes import SHAPES

_FIRST: Final = ("Anna", "Ben", "Clara", "David", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas")
_LAST: Final = ("Albrecht", "Baker", "Costa", "Dumont", "Eriksen", "Fischer", "García", "Haddad", "Ito", "Jensen")
_STREETS: Final = ("Mill Lane", "High Street", "Station Road", "Church Street", "Park Avenue", "Queen Street")
_CITIES: Final = ("Leeds", "Porto", "Lyon", "Bergen", "Graz", "Utrecht", "Aarhus", "Turin")
_ITEMS: Final = ("office chair", "desk lamp", "laser printer", "label maker", "filing cabinet", "standing desk")

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "document_type": {"enum": ["invoice", "reminder", "quotation"]},
        "number": {"type": "string"},
        "date": {"type": "string", "format": "date"},
        "customer_name": {"type": "string"},
        "street_address": {"type": "string"},
        "city": {"type": "string"},
        "item_description": {"type": "string"},
        "quantity": {"type": "integer"},
        "total_amount": {"type": "number"},
        "already_paid": {"type": "boolean"},
    },
    "required": [
        *("document_type", "number", "date", "customer_name", "street_address", "city", "item_description"),
        *("quantity", "total_amount", "already_paid"),
    ],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Way:
    """A way to generate."""

    formatted: bool
    speculation: Speculation


WAYS: Final = {
    "free": Way(False, Speculation.OFF),
    "masked": Way(True, Speculation.OFF),
    "constrained": Way(True, Speculation.AUTO),
    "drafted": Way(False, Speculation.AUTO),
}


def document(seed: int) -> tuple[str, dict[str, Any]]:
    """A document and its fields."""
    random = np.random.default_rng(seed)

    def one(values: Sequence[str]) -> str:
        return values[int(random.integers(len(values)))]

    kind = one(["invoice", "reminder", "quotation"])
    quantity, price = int(random.integers(1, 40)), round(float(random.uniform(9, 900)), 2)
    paid = bool(random.random() < 0.3)
    fields = {
        "document_type": kind,
        "number": f"{one('ABKRX')}{random.integers(10, 99)}-{random.integers(10_000, 99_999)}",
        "date": f"20{random.integers(18, 27)}-{random.integers(1, 13):02}-{random.integers(1, 29):02}",
        "customer_name": f"{one(_FIRST)} {one(_LAST)}",
        "street_address": f"{random.integers(1, 180)} {one(_STREETS)}",
        "city": one(_CITIES),
        "item_description": one(_ITEMS),
        "quantity": quantity,
        "total_amount": round(quantity * price, 2),
        "already_paid": paid,
    }
    text = (
        f"{fields['customer_name']}\n{fields['street_address']}\n{fields['city']}\n\n{fields['date']}\n\n"
        f"{kind.capitalize()} no. {fields['number']}\n\nDear {str(fields['customer_name']).split()[0]},\n\n"
        f"thank you for your order of {quantity} x {fields['item_description']} at {price} EUR each. "
        f"The total is {fields['total_amount']} EUR. "
        f"{'We have received your payment.' if paid else 'Please pay within 30 days.'}\n\nKind regards\n"
    )
    return text, fields


def prompt_of(text: str) -> str:
    """The prompt for a document."""
    return f"Extract the fields {', '.join(SCHEMA['properties'])} as JSON.\n\nDocument:\n{text}\nJSON:\n"


def replayed(engine: Engine, prompt: str, answer: str, way: Way) -> Reply:
    """Replay an answer in a way."""
    options = GenerateOptions(
        speculation=way.speculation, response_format=ResponseFormat.json_schema(SCHEMA) if way.formatted else None
    )
    prompt_ids, answer_ids = (engine.tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
    return Reply.of(engine.model.replay(None, prompt_ids, answer_ids, options))


def measure(engine: Engine, documents: Iterable[int]) -> dict[str, list[Reply]]:
    """Replay the documents of some seeds in every way, the order turned round for every second one."""
    replies: dict[str, list[Reply]] = {name: [] for name in WAYS}
    names = list(WAYS)
    for seed in documents:
        text, fields = document(seed)
        for name in names if seed % 2 else reversed(names):
            replies[name].append(replayed(engine, prompt_of(text), json.dumps(fields, ensure_ascii=False), WAYS[name]))
    return replies


def decode_s(reply: Reply) -> float:
    """Seconds after the first token, per token."""
    return (reply.stats.total_s - reply.stats.first_token_s) / (reply.stats.completion_tokens - 1)


def ratio(replies: Mapping[str, Sequence[Reply]], name: str, base: str) -> float:
    """Median over the documents of the ratio of the times of two ways."""
    pairs = zip(replies[name], replies[base], strict=True)
    return median(decode_s(one) / decode_s(other) for one, other in pairs)


def peer_slowdown(script: str, python: str, model: Path, threads: int, tokens: int) -> Mapping[str, float]:
    """Milliseconds per token of another runtime, free and under the schema, in a process of its own."""
    command = [python, str(Path(__file__).with_name(script)), str(model), str(threads), str(tokens)]
    done = subprocess.run(command, input=json.dumps(SCHEMA), capture_output=True, check=True, encoding="utf-8")
    found: Mapping[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, and print tables and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--model", type=Path, help="a bundle instead of the shape with random weights")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer for the shape")
    parser.add_argument("--documents", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first document, to measure them in parts")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    parser.add_argument("--llama-python", help="interpreter with llama-cpp-python, to measure llama.cpp too")
    parser.add_argument("--llama-model", type=Path, help="GGUF file for it")
    parser.add_argument("--genai-python", help="interpreter with onnxruntime-genai, to measure it too")
    parser.add_argument("--genai-model", type=Path, help="model folder for it")
    arguments = parser.parse_args()
    model = arguments.model or bundle(arguments.work, SHAPES[arguments.shape], 128, arguments.tokenizer)
    with edgerun.load(model, threads=arguments.threads, draft=None) as engine:
        measure(engine, [10_000])  # what is prepared once: tokenizer, grammar, pass cost
        replies = measure(engine, range(arguments.first, arguments.first + arguments.documents))
        threads = engine.model.compute_threads or 1
    lengths = [reply.stats.completion_tokens for reply in replies["free"]]
    table = Table("way", "ms per token", "tokens per pass", "drafted by the grammar", title=f"{len(lengths)} documents")
    nothing = DraftCounts()
    for name, each in replies.items():
        tokens = sum(reply.stats.completion_tokens - 1 for reply in each)
        passes = sum(reply.stats.decode_passes for reply in each)
        grammar = sum((reply.stats.by_source.get("grammar", nothing) for reply in each), nothing)
        share = f"{grammar.accepted}/{grammar.drafted} of {tokens}" if grammar.drafted else ""
        table.add_row(name, f"{1e3 * median(map(decode_s, each)):.2f}", f"{tokens / passes:.2f}", share)
    result: dict[str, Any] = {
        "documents": len(lengths),
        "answer_tokens": median(lengths),
        "ms_per_token": {name: 1e3 * median(map(decode_s, each)) for name, each in replies.items()},
        "masked_over_free": ratio(replies, "masked", "free"),
        "masked_over_constrained": ratio(replies, "masked", "constrained"),
        "drafted_over_constrained": ratio(replies, "drafted", "constrained"),
        "ms_of_each": {name: [round(1e3 * decode_s(reply), 3) for reply in each] for name, each in replies.items()},
    }
    tokens = int(median(lengths))
    if arguments.llama_python and arguments.llama_model:
        result["llama.cpp"] = peer_slowdown(
            "llama_grammar.py", arguments.llama_python, arguments.llama_model, threads, tokens
        )
    if arguments.genai_python and arguments.genai_model:
        result["genai"] = peer_slowdown(
            "genai_grammar.py", arguments.genai_python, arguments.genai_model, threads, tokens
        )
    console = Console()
    console.print(table)
    console.print(
        f"masks alone: {result['masked_over_free']:.3f} of the time of free generation; with forced tokens and drafts "
        f"{result['masked_over_constrained']:.2f} times as fast as with masks alone"
    )
    for peer in result.keys() & {"llama.cpp", "genai"}:
        console.print(f"{peer}: {result[peer]}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
