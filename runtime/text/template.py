"""Chat templates: Jinja text from a model's files, rendered in a sandbox.

The dialect is the one `transformers` renders: trimmed blocks, loop controls, a `tojson` that keeps non-ASCII text, and
the functions `raise_exception` and `strftime_now`. A template is untrusted: it runs in Jinja's immutable sandbox, which
reaches no Python internals; its output, its ranges, and what it makes by multiplication are bounded. How long it
computes is not: a template can waste time, as a model can.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...edge.errors import TemplateError
from ...models.bundle import Bundle
from .tokenizer import TextTokenizer

Message: TypeAlias = Mapping[str, Any]
"""One turn: `{"role": "user", "content": "..."}`, and whatever else the template reads."""

_MOST_CHARACTERS: Final = 8_000_000
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_HINT: Final = "repair the model's chat template, or use --raw"


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile `source`; `special_tokens` are the variables `bos_token`, `eos_token` and so on.

        Raises:
            TemplateError: it is not valid Jinja.
        """
        self._variables = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except (JinjaError, RecursionError, SyntaxError, MemoryError) as error:
            raise TemplateError(f"the chat template is not valid: {error}", _HINT) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        Raises:
            TemplateError: the template refuses the messages, reaches outside the sandbox, or writes without end.
        """
        context = {
            **self._variables,
            **variables,
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > _MOST_CHARACTERS:
                    raise TemplateError(f"the chat template writes over {_MOST_CHARACTERS} characters", _HINT)
        except JinjaError as error:
            raise TemplateError(f"the chat template failed: {error}", _HINT) from error
        except (
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as error:
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}", _HINT) from error
        return "".join(pieces)


def load_template(bundle: Bundle, tokenizer: TextTokenizer) -> ChatTemplate | None:
    """The bundle's chat template: `chat_template.jinja`, else the one in tokenizer_config.json, else None.

    Raises:
        TemplateError: there is one, and it cannot be read.
    """
    path = bundle.file("chat_template.jinja")
    source = _default_source(tokenizer.config.get("chat_template")) if path is None else _read(path)
    if source is None:
        return None
    special = {name: text for name in _SPECIAL_TOKENS if (text := tokenizer.token_text(name))}
    return ChatTemplate(source, special)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path} cannot be read: {error}", _HINT) from error


def _default_source(value: Any) -> str | None:
    """A template is a string, or a list of named ones of which `default` counts."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise TemplateError("chat_template in tokenizer_config.json is not text", _HINT)
    return value


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, in which multiplication and powers cannot fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left * right` or `left ** right`, of small operands only."""
        numbers = [value for value in (left, right) if isinstance(value, (int, float))]
        sizes = [len(value) for value in (left, right) if hasattr(value, "__len__")]
        bound = _MOST_CHARACTERS if operator == "*" else 1000
        if any(abs(value) > bound for value in numbers) or (sizes and sizes[0] * int(numbers[0]) > bound):
            raise JinjaError(f"the operands of {operator} are too large")
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=False, **options)


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
