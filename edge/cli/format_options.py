"""Options that say what an answer has to look like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from ...errors import InputError
from ...models.text_files import read_text
from ...runtime.structure.response_format import ResponseFormat

JsonSchema: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Let the answer be JSON of the schema in FILE, on one line. This, the next three options and "
        "--grammar-aligned need the extra structured.",
    ),
]
Regex: TypeAlias = Annotated[
    str | None, typer.Option(metavar="PATTERN", help="Let the whole answer match a regular expression.")
]
GrammarFile: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Let the answer follow the Lark or GBNF grammar in FILE.")
]
Choices: TypeAlias = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Let the answer be this text; repeat it for other choices.")
]


def response_format_of(
    schema: Path | None, regex: str | None, grammar: Path | None, choices: Sequence[str] | None
) -> ResponseFormat | None:
    """What the answer has to look like; None for free text.

    Args:
        schema: file with a JSON schema.
        regex: what the whole answer matches.
        grammar: file with a grammar.
        choices: texts of which the answer is one.

    Raises:
        InputError: several of them are given, or a file cannot be read.
    """
    given = {"--json-schema": schema, "--regex": regex, "--grammar": grammar, "--choice": choices or None}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InputError(f"{named[0]} and {named[1]} are both given", "an answer has one format: give one of them")
    if schema is not None:
        return ResponseFormat.json_schema(read_text(schema, "give a file with a JSON schema"))
    if grammar is not None:
        return ResponseFormat.grammar(read_text(grammar, "give a file with a Lark or GBNF grammar"))
    if regex is not None:
        return ResponseFormat.regex(regex)
    return ResponseFormat.choice(choices) if choices else None
