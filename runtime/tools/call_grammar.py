"""Grammars that make a model call functions, with arguments of their schemas: Lark, in the dialect of llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class CallGrammar:
    """Makes the grammar of an answer that has to call."""

    tools: OfferedTools
    """The functions of which one has to be called."""
    tool_format: ToolFormat
    """How the model writes calls."""
    tags: ReasoningTags | None
    """What stands around its reasoning, which may come first; None for nothing."""
    special_id: Callable[[str], int | None]
    """The id of a special token by its text, or None."""
    in_reasoning: bool = False
    """Whether the prompt ended with the opening tag of reasoning."""
    _rules: dict[str, str] = field(init=False, default_factory=dict)

    def lark(self, template: str, *, several: bool) -> str:
        """The grammar.

        Args:
            template: text of the chat template, which decides between older and newer forms.
            several: whether further calls may follow.

        Raises:
            InputError: calls in this format cannot be enforced.
        """
        calls = self._calls(template, several)
        self._rules["start"] = f"{self._reasoning()} {calls}"
        return "%llguidance {}\n" + "\n".join(f"{name}: {rule}" for name, rule in self._rules.items()) + "\n"

    def _reasoning(self) -> str:
        """What may come before the calls."""
        if self.tool_format.is_harmony:
            self._add_until("thought", "<|end|>")
            begin = self._texts("<|channel|>", "analysis", "<|message|>")
            return f"({begin} thought {self._texts('<|start|>', 'assistant')})?"
        if self.tags is None:
            return ""
        self._add_until("thought", self.tags.closing)
        if self.in_reasoning:
            return f"thought {_LINE_ENDS}"
        return f"({self._texts(self.tags.opening)} thought {_LINE_ENDS})?"

    def _calls(self, template: str, several: bool) -> str:
        """The expression of all calls."""
        name, tools, texts = self.tool_format.name, self.tools, self._texts
        if name == "harmony":
            end = ("<|constrain|>", "json", "<|message|>")
            heads = {each: texts("<|channel|>", f"commentary to=functions.{each} ", *end) for each in tools}
            return _one_of(f"{head} {self._json(tools[each])}" for each, head in heads.items())
        if name == "qwen3-coder":
            call = _one_of(map(self._xml_call, tools))
            return _repeated(f"{texts('<tool_call>')} {call} {texts('</tool_call>')}", r'"\n"', several)
        if name == "llama3":
            return _one_of(self._json_call(each, "parameters") for each in tools)
        call = _one_of(self._json_call(each, "arguments") for each in tools)
        if name == "hermes":
            whole = f'{texts("<tool_call>")} "\\n" {call} "\\n" {texts("</tool_call>")}'
            return _repeated(whole, r'"\n"', several)
        if name == "mistral" and "[ARGS]" in template:
            named = _one_of(f"{texts(each, '[ARGS]')} {self._json(tools[each])}" for each in tools)
            return _repeated(f"{texts('[TOOL_CALLS]')} {named}", '""', several)
        if name in {"mistral", "granite", "phi4"}:
            closing = texts(self.tool_format.closing) if name == "phi4" else ""
            return f'{texts(self.tool_format.openings[0])} "[" {_repeated(call, _quoted(", "), several)} "]" {closing}'
        raise InputError(
            f"calls in the format {name} cannot be required", "leave tool_choice at auto, or name another --tool-format"
        )

    def _json_call(self, name: str, key: str) -> str:
        head = f'{{"name": {_quoted(name)}, "{key}": '
        return f'{_quoted(head)} {self._json(self.tools[name])} "}}"'

    def _xml_call(self, name: str) -> str:
        """A function element: its required parameters, and any of the others, in the order of the schema."""
        required = self.tools[name].get("required")
        parts = []
        for key, schema in self.tools.properties(name).items():
            end = "\n</parameter>\n"
            if isinstance(schema, Mapping) and schema.get("type") == "string" and "enum" not in schema:
                value = f"text_{len(self._rules)}"
                self._add_until(value, end)
            else:
                value = f"{self._json(schema)} {_quoted(end)}"
            part = f"{_quoted(f'<parameter={key}>' + chr(10))} {value}"
            parts.append(part if isinstance(required, (list, tuple)) and key in required else f"({part})?")
        return f"{_quoted(f'{chr(10)}<function={name}>{chr(10)}')} {' '.join(parts)} {_quoted(f'</function>{chr(10)}')}"

    def _texts(self, *texts: str) -> str:
        """Texts that follow each other; texts of special tokens stand for the tokens."""
        return " ".join(_quoted(text) if (token := self.special_id(text)) is None else f"<[{token}]>" for text in texts)

    def _json(self, schema: Any) -> str:
        """A JSON value of a schema, as a rule of its own."""
        name = f"json_{len(self._rules)}"
        described = {**schema, **_LAYOUT} if isinstance(schema, Mapping) else schema
        if isinstance(described, dict) and len(described) == len(_LAYOUT):
            described["type"] = "object"  # a function without a schema takes any arguments
        self._rules[name] = f"%json {_quoted(described)}"
        return name

    def _add_until(self, name: str, end: str) -> None:
        """Add a rule of any text up to `end`, which is read too."""
        token = self.special_id(end)
        if token is None:
            self._rules[f"{name}[suffix={_quoted(end)}]"] = _ANY_TEXT
        else:  # text never has a special token in it
            self._rules[f"{name}_body"] = _ANY_TEXT
            self._rules[name] = f"{name}_body <[{token}]>"


def _one_of(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def _repeated(expression: str, separator: str, several: bool) -> str:
    return f"{expression} ({separator} {expression})*" if several else expression


def _quoted(value: Any) -> str:
    """A value as JSON, which is how Lark writes texts."""
    return json.dumps(value, ensure_ascii=False)
