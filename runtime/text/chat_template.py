"""Chat templates: Jinja text from a model's files, rendered in a sandbox.

The dialect is that of `transformers`: trimmed blocks, loop controls, a `tojson` filter that keeps non-ASCII text, the
functions `raise_exception` and `strftime_now`, and a second template for tools where a model has one. Templates are
untrusted: they run in Jinja's immutable sandbox, which gives no access to Python internals. The size of their output,
their ranges and their products is bounded; their running time is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from jinja2 import Template, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import TemplateError
from ...models.bundle import Bundle
from .tokenizer import TextTokenizer

Message: TypeAlias = Mapping[str, Any]
"""One message: `{"role": "user", "content": "..."}`, and whatever else the template reads."""

_MAX_CHARACTERS: Final = 8_000_000
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_HINT: Final = "repair the model's chat template, or use --raw"


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, with_tools: str | None = None
    ) -> None:
        """Compile a template.

        Args:
            source: the template.
            special_tokens: texts of `bos_token`, `eos_token` and so on, by name.
            with_tools: the template to use instead when there are tools; None to use `source`.

        Raises:
            TemplateError: a template is not valid Jinja.
        """
        self._variables = dict(special_tokens or {})
        self._template = _compiled(source)
        self._with_tools = self._template if with_tools is None else _compiled(with_tools)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render the prompt of a conversation.

        Args:
            messages: messages so far. One of an assistant may have `tool_calls`, and one of a `tool` answers them.
            tools: functions the model may call, as JSON schemas: `{"type": "function", "function": {"name": ...}}`.
            documents: documents to answer from, usually each with a `title` and a `text`.
            add_generation_prompt: whether to end with the header of the assistant's answer.
            variables: whatever else the template reads, such as `enable_thinking` or `date_string`.

        Raises:
            TemplateError: the template rejects the messages, leaves the sandbox, or its output is too long.
        """
        context = {
            **self._variables,
            **variables,
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in (self._template if tools is None else self._with_tools).generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > _MAX_CHARACTERS:
                    raise TemplateError(f"the chat template writes over {_MAX_CHARACTERS} characters", _HINT)
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
    """Load the chat template: `chat_template.jinja`, or the one in tokenizer_config.json, or None.

    Raises:
        TemplateError: the template cannot be read or is not valid Jinja.
    """
    named = _named_sources(tokenizer.config.get("chat_template"))
    for name, file in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
        if (path := bundle.file(file)) is not None:
            named[name] = _read(path)
    if "default" not in named:
        return None
    special = {name: text for name in _SPECIAL_TOKENS if (text := tokenizer.token_text(name))}
    return ChatTemplate(named["default"], special, with_tools=named.get("tool_use"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path} cannot be read: {error}", _HINT) from error


def _named_sources(value: Any) -> dict[str, str]:
    """Templates by name: tokenizer_config.json holds one, or a list of named ones such as default and tool_use."""
    entries = value if isinstance(value, list) else [] if value is None else [{"name": "default", "template": value}]
    named: dict[Any, Any] = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise TemplateError("chat_template in tokenizer_config.json is not text", _HINT)
    return named


def _compiled(source: str) -> Template:
    try:
        return _environment().from_string(source)
    except (JinjaError, RecursionError, SyntaxError, MemoryError) as error:
        raise TemplateError(f"the chat template is not valid: {error}", _HINT) from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with bounded products and powers, which could fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left * right` or `left ** right` if both operands are small."""
        numbers = [value for value in (left, right) if isinstance(value, (int, float))]
        sizes = [len(value) for value in (left, right) if hasattr(value, "__len__")]
        bound = _MAX_CHARACTERS if operator == "*" else 1000
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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML; takes the options that templates give."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)  # without a time zone: `%z` has to stay empty
