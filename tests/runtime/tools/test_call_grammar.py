"""Grammars of calls allow what the templates write, and nothing that is not a call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgerun.errors import InputError
from edgerun.runtime.tools.answer_parts import reasoning_tags
from edgerun.runtime.tools.call_grammar import CallGrammar
from edgerun.runtime.tools.calls import OfferedTools
from edgerun.runtime.tools.formats import choose_format
from support.tool_answers import FAMILIES, TOOLS, Answer, parsed

llguidance = pytest.importorskip("llguidance")

ENFORCED = ("qwen2.5", "qwen3", "llama3.2", "mistral, newer", "qwen3-coder", "phi4", "granite", "harmony")


def matcher(family: str, tools: list[dict[str, Any]], *, several: bool = True) -> Any:
    """A matcher of bytes for the calls of a family."""
    template = FAMILIES[family].template().written
    tool_format = choose_format("auto", template)
    grammar = CallGrammar(OfferedTools.of(tools), tool_format, reasoning_tags(template), lambda _text: None)
    made = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.lark(template, several=several))
    assert not made.is_error(), made.get_error()
    return made


def allowed(found: Any, text: str) -> bool:
    """Whether a grammar allows a text, and that it ends there."""
    written = list(text.encode())
    return bool(found.try_consume_tokens(written) == len(written) and found.is_accepting())


@pytest.mark.parametrize("family", ENFORCED)
def test_calls_as_templates_write_them_are_allowed(family: str) -> None:
    values = {"city": "Köln", "days": 3, "celsius": True} if family != "qwen3-coder" else {"city": "Köln\nam Rhein"}
    answer = FAMILIES[family].fitted(Answer(reasoning="Hm.", calls=(("get_weather", values),)))
    _, text = FAMILIES[family].written(answer)
    text = text.replace("<|call|>", "")
    assert allowed(matcher(family, TOOLS), text), text


@pytest.mark.parametrize("family", ENFORCED)
def test_what_is_not_a_call_of_the_schema_is_not_allowed(family: str) -> None:
    for calls in ((("get_weather", {"days": 3}),), (("unknown", {}),), ()):
        _, text = FAMILIES[family].written(Answer("" if calls else "Hello.", calls=calls))
        assert not allowed(matcher(family, TOOLS), text.replace("<|call|>", "")), text


def test_one_call_or_several() -> None:
    answer = Answer(calls=(("now", {}), ("get_weather", {"city": "Rome"})))
    _, text = FAMILIES["qwen2.5"].written(answer)
    assert allowed(matcher("qwen2.5", TOOLS), text.strip())
    assert not allowed(matcher("qwen2.5", TOOLS, several=False), text.strip())


@pytest.mark.parametrize("family", ENFORCED)
def test_the_parser_reads_what_the_grammar_forces(family: str) -> None:
    """A function with one possible argument leaves nothing to choose but reasoning."""
    schema = {
        "type": "object",
        "properties": {"city": {"const": "Rome"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    found = matcher(family, tools, several=False)
    begin = {
        "harmony": "<|channel|>commentary",
        "llama3.2": "{",
        "mistral, newer": "[TOO",
        "phi4": "<|t",
        "granite": "<|t",
    }
    text = begin.get(family, "<tool")
    assert found.try_consume_tokens(list(text.encode())) == len(text)
    text += bytes(found.compute_ff_tokens()).decode()
    prompt = "<|start|>assistant" if family == "harmony" else ""
    assert parsed(FAMILIES[family].parser(prompt, tools), [text]).calls == (("f", {"city": "Rome"}),), text


def test_formats_that_cannot_be_enforced_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="calls in the format gemma cannot be required"):
        matcher("gemma", TOOLS)


def test_names_and_schemas_are_data() -> None:
    tools = [{"type": "function", "function": {"name": 'a"b', "parameters": {"type": "object", "properties": {}}}}]
    assert allowed(
        matcher("qwen2.5", tools),
        f'<tool_call>\n{{"name": {json.dumps(tools[0]["function"]["name"])}, "arguments": {{}}}}\n</tool_call>',
    )


@pytest.mark.parametrize("required", [None, 5, True, "a city", {"city": 1}])
def test_required_names_that_are_not_a_list_require_nothing(required: object) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": required}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert allowed(matcher("qwen3-coder", tools), "<tool_call>\n<function=f>\n</function>\n</tool_call>")
