"""Writes tables of docs/ and the keywords of options: `python tests/support/generated_texts.py`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from edgerun.edge.server.protocols import anthropic, llamacpp, ollama, openai, rerank
from edgerun.edge.service.responses_body import ResponsesBody
from edgerun.edge.service.text_bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from edgerun.runtime.arguments.argument_types import options_of
from edgerun.runtime.arguments.load_options import LoadOptions
from edgerun.runtime.options import GenerateOptions
from edgerun.runtime.strategies.strategy import STRATEGIES, strategy_class

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "request-fields.md"
STRATEGY_PAGE = ROOT / "docs" / "strategies.md"
EXPORT_PAGE = ROOT / "docs" / "guide" / "export.md"
MODULE = ROOT / "runtime" / "arguments" / "option_keywords.py"
BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/embeddings": EmbeddingBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/rerank": rerank.RerankBody,
    "/v1/score": rerank.ScoreBody,
    "/v1/models/load": openai.LoadBody,
    "/v1/messages": anthropic.MessagesBody,
    "/infill": llamacpp.InfillBody,
    "/api/chat": ollama.OllamaChatBody,
    "/api/generate": ollama.OllamaTextBody,
    "Options of /api/chat and /api/generate": ollama.OllamaOptions,
    "/api/embed": ollama.OllamaEmbedBody,
    "/api/pull": ollama.OllamaPullBody,
}
"""Bodies by the heading of their table."""


def row(name: str, field: dict[str, Any]) -> str:
    """The row of a field: its name, the types or values that it may have, and its description."""
    if field.get("type") == "null":
        kinds = "refused"
    elif "enum" in field:
        kinds = ", ".join(f"`{json.dumps(value)}`" for value in field["enum"] if value is not None)
    else:
        kinds = ", ".join(kind_of(option) for option in field.get("anyOf", [field]) if option.get("type") != "null")
    return f"| `{name}` | {kinds} | {field['description']} |"


def kind_of(option: dict[str, Any]) -> str:
    """The type of a value, in a word."""
    if option.get("type") == "array":
        most = f", at most {option['maxItems']}" if "maxItems" in option else ""
        return (f"array of {kind_of(option['items'])}" if option["items"].get("type") else "array") + most
    return str(option.get("type", "object"))


def with_tables(page: str) -> str:
    """The text of the page with the tables of the schemas."""
    for heading, kind in BODIES.items():
        fields = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
        table = "".join(f"{row(name, field)}\n" for name, field in fields.items())
        before, title, section = page.partition(f"## {heading}\n")
        page = (
            before
            + title
            + re.sub(r"(?:^\| `.*\n)+", lambda _, table=table: table, section, count=1, flags=re.MULTILINE)
        )
    return page


def with_export_options(page: str) -> str:
    """The text of the page with the table of all options of an export."""
    from edgerun.export.recipe import ExportRecipe

    rows = ["| option | default | |\n|---|---|---|\n"]
    for name, declared in options_of(ExportRecipe).items():
        value = "|".join(declared.choices) if declared.choices else declared.metavar or ""
        default = declared.unset or getattr(ExportRecipe, name)
        shown = "" if default is None or default is False else default
        written = f"--{name} {value}".rstrip().replace("_", "-").replace("|", "\\|")
        rows.append(f"| `{written}` | {shown} | {declared.help} |\n")
    before, title, _ = page.partition("## All options\n\n")
    return before + title + "".join(rows)


_HEAD = '''\
"""Options by name, which type checkers and editors read; written by tests/support/generated_texts.py."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ..blocks.commit_rules import CommitRule
from ..speculation.choice import DraftSampling, Speculation
from ..strategies.lossy import LossyRule
from ..strategies.strategy import Strategy
from ..structure.response_format import ResponseFormat
'''


def with_strategies(page: str) -> str:
    """The text of the page with the table of all strategies."""
    rows = ["| name | what it is good for | options | passes a token | source |\n|---|---|---|---|---|\n"]
    for name in STRATEGIES:
        kind = strategy_class(name)
        options = [f"`{option}` {getattr(kind, option)!r}: {each.help}" for option, each in options_of(kind).items()]
        purpose = kind.purpose + (" Needs a temperature." if kind.filters else "")
        rows.append(f"| `{name}` | {purpose} | {'<br>'.join(options)} | {kind.passes} | {kind.source} |\n")
    before, title, section = page.partition("## Strategies\n\n")
    return before + title + "".join(rows) + "\n" + section[section.index("## ") :]


def keywords(name: str, record: type[Any]) -> str:
    """The class of the keywords of a record's options."""
    lines = [f"    {each.name}: {each.type}" for each in dataclasses.fields(record)]
    head = f'class {name}(TypedDict, total=False):\n    """The options of `{record.__name__}` by name."""'
    return f"\n\n{head}\n\n" + "\n".join(lines) + "\n"


def module_text() -> str:
    """The text of the module."""
    return _HEAD + keywords("LoadKeywords", LoadOptions) + keywords("GenerateKeywords", GenerateOptions)


if __name__ == "__main__":
    STRATEGY_PAGE.write_text(with_strategies(STRATEGY_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    EXPORT_PAGE.write_text(with_export_options(EXPORT_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    MODULE.write_text(module_text(), encoding="utf-8")
