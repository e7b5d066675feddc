"""Grammars that make a model call functions, with arguments of their schemas: Lark, in the dialect of llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...errors import InputError
from .answer_parts import ReasoningTags
from .calls import OfferedTools
from .formats import ToolFormat

_LAYOUT: Final = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""JSON on one line, as chat templates write it."""
_ANY_TEXT: Final = r"/(.|\n)*/"
_LINE_ENDS: Final = r"/\n{0,2}/"
"""What models write after their reasoning; white space without a limit could go on for ever."""
_TEXT_TYPES: Final = ("string",)


@dataclass(frozen=True)
class CallGrammar:
    """Makes the grammar of an answer that has to call.

    Args:
        tool_format: how the model writes calls.
        tags: what stands around its reasoning, which may come first; None for nothing.
        special_id: the id of a special token by its text, or None.
        in_reasoning: whether the prompt ended with the opening tag of reasoning.
        template: text of the chat template, which decides between older and newer forms.
    """

    tool_format: ToolFormat
    tags: ReasoningTags | None
    special_id: Callable[[str], int | None]
    in_reasoning: bool = False
    template: str = ""

    def lark(self, tools: OfferedTools, *, several: bool) -> str:
        """The grammar.

        Args:
            tools: the functions of which one has to be called.
            several: whether further calls may follow.

        Raises:
            InputError: calls in this format cannot be enforced.
        """
        rules = _Rules(self.special_id)
        names = list(tools.schemas)
        calls = self._calls(rules, tools, names, several=several)
        rules.add("start", f"{self._reasoning(rules)} {calls}")
        return rules.text()

    def _reasoning(self, rules: _Rules) -> str:
        """What may come before the calls."""
        if self.tool_format.is_harmony:
            rules.add_until("thought", "<|end|>")
            begin = rules.texts("<|channel|>", "analysis", "<|message|>")
            return f"({begin} thought {rules.texts('<|start|>', 'assistant')})?"
        if self.tags is None:
            return ""
        rules.add_until("thought", self.tags.closing)
        if self.in_reasoning:
            return f"thought {_LINE_ENDS}"
        return f"({rules.texts(self.tags.opening)} thought {_LINE_ENDS})?"

    def _calls(self, rules: _Rules, tools: OfferedTools, names: Sequence[str], *, several: bool) -> str:
        """The expression of all calls."""
        name = self.tool_format.name
        if name == "harmony":
            end = ("<|constrain|>", "json", "<|message|>")
            heads = {each: rules.texts("<|channel|>", f"commentary to=functions.{each} ", *end) for each in names}
            return rules.one_of(f"{head} {rules.json(tools.schemas[each])}" for each, head in heads.items())
        if name == "qwen3-coder":
            call = rules.one_of(_xml_call(rules, tools, each) for each in names)
            return _repeated(f"{rules.texts('<tool_call>')} {call} {rules.texts('</tool_call>')}", r'"\n"', several)
        if name == "llama3":
            return rules.one_of(_json_call(rules, tools, each, "parameters") for each in names)
        call = rules.one_of(_json_call(rules, tools, each, "arguments") for each in names)
        if name == "hermes":
            whole = f'{rules.texts("<tool_call>")} "\\n" {call} "\\n" {rules.texts("</tool_call>")}'
            return _repeated(whole, r'"\n"', several)
        if name == "mistral" and "[ARGS]" in self.template:
            named = rules.one_of(f"{rules.texts(each, '[ARGS]')} {rules.json(tools.schemas[each])}" for each in names)
            return _repeated(f"{rules.texts('[TOOL_CALLS]')} {named}", '""', several)
        if name in {"mistral", "granite", "phi4"}:
            opening = self.tool_format.openings[0]
            closing = rules.texts(self.tool_format.closing) if name == "phi4" else ""
            return f'{rules.texts(opening)} "[" {_repeated(call, json.dumps(", "), several)} "]" {closing}'
        raise InputError(
            f"calls in the format {name} cannot be required", "leave tool_choice at auto, or name another --tool-format"
        )


def _json_call(rules: _Rules, tools: OfferedTools, name: str, key: str) -> str:
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return f'{_quoted(head)} {rules.json(tools.schemas[name])} "}}"'


def _xml_call(rules: _Rules, tools: OfferedTools, name: str) -> str:
    """A function element: its required parameters, and any of the others, in the order of the schema."""
    required = tools.schemas[name].get("required", ())
    parts = []
    for key, schema in tools.properties(name).items():
        is_text = isinstance(schema, Mapping) and schema.get("type") in _TEXT_TYPES and "enum" not in schema
        end = "\n</parameter>\n"
        value = rules.until(end) if is_text else f"{rules.json(schema)} {_quoted(end)}"
        part = f"{_quoted(f'<parameter={key}>' + chr(10))} {value}"
        parts.append(part if key in required else f"({part})?")
    return f"{_quoted(f'{chr(10)}<function={name}>{chr(10)}')} {' '.join(parts)} {_quoted(f'</function>{chr(10)}')}"


def _repeated(expression: str, separator: str, several: bool) -> str:
    return f"{expression} ({separator} {expression})*" if several else expression


def _quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


class _Rules:
    """The rules of a grammar that is being made.

    Args:
        special_id: the id of a special token by its text, or None.
    """

    def __init__(self, special_id: Callable[[str], int | None]) -> None:
        self._special_id = special_id
        self._rules: dict[str, str] = {}

    def add(self, name: str, expression: str) -> None:
        """Add a rule."""
        self._rules[name] = expression

    def texts(self, *texts: str) -> str:
        """Texts that follow each other; those of special tokens stand for the tokens."""
        return " ".join(
            _quoted(text) if (token := self._special_id(text)) is None else f"<[{token}]>" for text in texts
        )

    def one_of(self, expressions: Any) -> str:
        """One of several expressions."""
        return f"({' | '.join(expressions)})"

    def json(self, schema: Any) -> str:
        """A JSON value of a schema, as a rule of its own."""
        name = f"json_{len(self._rules)}"
        described = {**schema, **_LAYOUT} if isinstance(schema, Mapping) else schema
        if isinstance(described, dict) and len(described) == len(_LAYOUT):
            described["type"] = "object"  # a function without a schema takes any arguments
        self._rules[name] = f"%json {json.dumps(described, ensure_ascii=False)}"
        return name

    def until(self, end: str) -> str:
        """Any text up to `end`, which is read too, as a rule of its own."""
        name = f"text_{len(self._rules)}"
        self.add_until(name, end)
        return name

    def add_until(self, name: str, end: str) -> None:
        """Add a rule of any text up to `end`, which is read too."""
        token = self._special_id(end)
        if token is None:
            self._rules[f"{name}[suffix={_quoted(end)}]"] = _ANY_TEXT
        else:  # text never has a special token in it
            self._rules[f"{name}_body"] = _ANY_TEXT
            self._rules[name] = f"{name}_body <[{token}]>"

    def text(self) -> str:
        """The grammar."""
        return "%llguidance {}\n" + "\n".join(f"{name}: {rule}" for name, rule in self._rules.items()) + "\n"
