"""Chat templates: Jinja text from a model's files, rendered in a sandbox.

The dialect is the one `transformers` renders: trimmed blocks, loop controls, a `tojson` that keeps non-ASCII text, the
functions `raise_exception` and `strftime_now`, and a template of its own for tools where a model has one. A template is
untrusted: it runs in Jinja's immutable sandbox, which reaches no Python internals; its output, its ranges, and what it
makes by multiplication are bounded. How long it computes is not: a template can waste time, as a model can.
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
"""One turn: `{"role": "user", "content": "..."}`, and whatever else the template reads."""

_MOST_CHARACTERS: Final = 8_000_000
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_HINT: Final = "repair the model's chat template, or use --raw"


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, with_tools: str | None = None
    ) -> None:
        """Compile `source`, and `with_tools` which takes its place when there are tools.

        `special_tokens` are the variables `bos_token`, `eos_token` and so on.

        Raises:
            TemplateError: it is not valid Jinja.
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
        """The prompt for a conversation.

        Args:
            messages: the turns so far. An assistant's may have `tool_calls`, and a role `tool` may answer them.
            tools: what the model may call, as JSON schemas: `{"type": "function", "function": {"name": ...}}`.
            documents: what the model is to answer from, usually each with a `title` and a `text`.
            add_generation_prompt: whether the assistant's turn is opened.
            variables: whatever else the template reads, such as `enable_thinking` or `date_string`.

        Raises:
            TemplateError: the template refuses the messages, reaches outside the sandbox, or writes without end.
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
    """Templates by name: tokenizer_config.json has one text, or a list of named ones such as default and tool_use."""
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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not. The options are those that templates may give."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # without a zone, as `%z` has to stay empty
