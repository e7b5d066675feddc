"""Answers are taken apart as their chat template put them together, however they are cut into pieces."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from edgerun.runtime.text.detokenizer import StreamDecoder
from edgerun.runtime.text.tokenizer import TextTokenizer
from edgerun.runtime.tools.answer_format import AnswerFormat
from support.shared_data import saved_tokenizer
from support.tool_answers import ANSWERS, FAMILIES, TOOLS, Answer, answer_of, parsed

NAMES = {tool["function"]["name"] for tool in TOOLS}


@cache
def written(family: str, number: int) -> tuple[str, str]:
    """The prompt and the text of an answer."""
    return FAMILIES[family].written(FAMILIES[family].fitted(ANSWERS[number]))


def read(family: str, text: str, prompt: str = "", size: int = 0) -> Answer:
    """What is read of an answer in pieces of some size; 0 for one piece."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    return parsed(FAMILIES[family].parser(prompt), pieces)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    """A text, cut at some places, which are ascending."""
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("number", range(len(ANSWERS)))
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_template_writes_is_recovered(family: str, number: int) -> None:
    expected = FAMILIES[family].fitted(ANSWERS[number])
    prompt, text = written(family, number)
    whole = Answer(expected.text, expected.reasoning, expected.calls, unparsed=False)
    for size in (0, 1, 2, 3, 7):
        assert read(family, text, prompt, size) == whole, size
    source = random.Random(number)
    for _ in range(5):
        cuts = sorted(source.choices(range(len(text) + 1), k=source.randint(1, 12)))
        assert parsed(FAMILIES[family].parser(prompt), pieces_of(text, cuts)) == whole, cuts


@given(data=st.data())
def test_pieces_do_not_change_what_is_read(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    prompt, text = written(family, data.draw(st.integers(0, len(ANSWERS) - 1)))
    text = mutated(text, random.Random(data.draw(st.integers(0, 10**6)))) if data.draw(st.booleans()) else text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    assert parsed(FAMILIES[family].parser(prompt), pieces_of(text, cuts)) == read(family, text, prompt)


def mutated(text: str, source: random.Random) -> str:
    """The text with a few characters or stretches left out, doubled, moved or replaced, or with its end cut off."""
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(text) + 1)
        end = min(at + source.choice([1, 1, 1, 2, 5, 20]), len(text))
        kind = source.randrange(5)
        if kind == 0:
            text = text[:at] + text[end:]
        elif kind == 1:
            text = text[:at] + text[at:end] * 2 + text[end:]
        elif kind == 2:
            text = (
                text[:at]
                + source.choice(['"', "\\", "{", "}", "[", "]", "<", ">", ":", ",", "\n", "é", "\ud800"])
                + text[end:]
            )
        elif kind == 3:
            text = text[:at]
        else:
            to = source.randrange(len(text) + 1)
            text = text[:to] + text[at:end] + text[to:]
    return text


def said_in(value: Any) -> Iterator[str | float]:
    """The names, texts and numbers of arguments."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from said_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from said_in(each)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value


def is_written(said: str | float, text: str) -> bool:
    """Whether a text has a name, a text or a number in it, as it is or between quotes."""
    if not isinstance(said, str):
        return any(float(number) == said for number in re.findall(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", text))
    forms = [said, *(json.dumps(said, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))]
    return any(form in text for form in forms) or said in unescaped(text)


def unescaped(text: str) -> str:
    """A text without its backslashes, whatever they stand for."""
    named = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
    return re.sub(r"\\(.)", lambda found: named.get(found[1], found[1]), text, flags=re.DOTALL)


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_answers_give_no_invented_calls(family: str, count: int) -> None:
    """No call is of a function that was not offered, or has an argument or a value that the answer does not spell out.

    The text is what the answer has, in its order, without what belongs to other parts.
    """
    source = random.Random(family)
    for index in range(count):
        prompt, text = written(family, index % len(ANSWERS))
        text = mutated(text, source)
        found = read(family, text, prompt, 5)
        for name, values in found.calls:
            assert name in NAMES, text
            assert name in text, text
            for said in said_in(values):
                assert is_written(said, text), (said, text)
        rest = iter(text)
        assert all(char in rest for char in "".join(found.text.split())), text


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen2.5", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
        ("qwen2.5", '<tool_call>\n{"name": "now", "arguments": [1]}\n</tool_call>'),
        ("qwen2.5", '<tool_call>\n{"name": "now", "arguments": {}} and more\n</tool_call>'),
        ("qwen2.5", '<tool_call>\n{"name": "now", "arguments": {"x": 1e999}}\n</tool_call>'),
        ("qwen2.5", '<tool_call>\n{"name": "now", "arguments": {"x": NaN}}\n</tool_call>'),
        ("qwen2.5", '<tool_call>\n{"name": "now", "argum'),
        ("qwen2.5", "<tool_call>\n" + '{"name": "now", "arguments": ' + '{"a": ' * 5000),
        ("qwen2.5", '<tool_call>\n{"name": "now", "arguments": {"x": ' + "9" * 5000 + "}}\n</tool_call>"),
        ("qwen2.5", "The tags are <tool_call> and </tool_call>."),
        ("qwen3-coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
        ("qwen3-coder", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("llama3.2", '{"name": "unknown", "parameters": {}}'),
        ("llama3.2", '{"name": "now", "parameters": {}} is how to call it'),
        ("llama3.2", "<|python_tag|>import os\nos.listdir()"),
        ("mistral-nemo", "[TOOL_CALLS] are special"),
        ("mistral, newer", '[TOOL_CALLS]unknown[ARGS]{"a": 1}'),
        ("gemma", '<|tool_call>call:now{a:<|"|>open}<tool_call|>'),
        ("tool-code", "```tool_code\nimport os\n```"),
        ("tool-code", "```tool_code\nprint(now(open('x')))\n```"),
        ("harmony", '<|channel|>commentary to=functions.unknown<|message|>{"a": 1}<|call|>'),
        ("harmony", '<|channel|>commentary to=functions.now<|message|>{"a": <|call|>'),
    ],
)
def test_what_is_not_a_call_is_text_with_a_flag(family: str, text: str) -> None:
    for size in (0, 1, 4):
        found = read(family, text, "<|start|>assistant" if family == "harmony" else "", size)
        assert found.calls == ()
        assert found.unparsed
        assert "".join(found.text.split()) == "".join(text.split()).removesuffix("<|call|>")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama3.2", '{"answer": 42, "name": "now"}'),
        ("llama3.2", "{not json}"),
        ("qwen2.5", "a < b, <tool and <tool_calls"),
        ("harmony", "Just text."),
        ("tool-code", "```python\nnow()\n```"),
    ],
)
def test_text_that_does_not_look_like_a_call_has_no_flag(family: str, text: str) -> None:
    for size in (0, 1, 4):
        assert read(family, text, "", size) == Answer(text, "", (), unparsed=False)


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("llama3.2", '<|python_tag|>{"name": "now", "parameters": {}}', [("now", {})]),
        (
            "llama3.2",
            '<|python_tag|>get_weather.call(city="Rome", days=2)',
            [("get_weather", {"city": "Rome", "days": 2})],
        ),
        ("mistral-nemo", "[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}", [("now", {})]),
        ("granite", '<tool_call>[{"name": "now", "arguments": {}}]', [("now", {})]),
        ("granite", '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
        ("phi4", '<|tool_call|>{"name": "now", "parameters": {}}<|/tool_call|>', [("now", {})]),
        ("qwen2.5", '<tool_call>{"name": "now", "arguments": "{}"}', [("now", {})]),
        (
            "qwen2.5",
            '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>',
            [("now", {})],
        ),
        ("qwen3-coder", "<function=now>\n</function>", [("now", {})]),
        ("qwen3-coder", "<function=now></function></tool_call>", [("now", {})]),
        (
            "tool-code",
            '```tool_code\n[get_weather("Rome", days=1), now()]\n```',
            [("get_weather", {"city": "Rome", "days": 1}), ("now", {})],
        ),
        ("harmony", " to=functions.now<|channel|>commentary json<|message|>{}", [("now", {})]),
        ("harmony", "<|channel|>analysis to=functions.now<|message|>{}<|call|>", [("now", {})]),
    ],
)
def test_other_ways_in_which_models_write_calls(family: str, text: str, calls: list[Any]) -> None:
    for size in (0, 1, 3):
        found = read(family, text, "<|start|>assistant", size)
        assert (found.text, list(found.calls), found.unparsed) == ("", calls, False)


BAD = '<tool_call>\n{"name": "now", oops}\n</tool_call>'
INSIDE = f'<tool_call>{{"name": "nope", "arguments": {{"x": {CALL!r}}}}}</tool_call>'


@pytest.mark.parametrize(
    ("family", "prompt", "text", "expected"),
    [
        # A good call after a bad one is found, and one inside of a bad one is text.
        ("qwen2.5", "", f"First {BAD}\n{CALL}", Answer(f"First {BAD}", "", (("now", {}),), unparsed=True)),
        ("qwen2.5", "", INSIDE, Answer(INSIDE, "", (), unparsed=True)),
        # The prompt began or ended the reasoning; reasoning without an end is not text, and a call in it is not made.
        (
            "qwen3",
            "<|im_start|>assistant\n<think>\n",
            "I think\nso.\n</think>\n\nYes.",
            Answer("Yes.", "I think\nso.", (), unparsed=False),
        ),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes.", Answer("Yes.", "", (), unparsed=False)),
        ("qwen3", "", "<think>\nI think </thi", Answer("", "I think </thi", (), unparsed=False)),
        ("qwen3", "", f"<think>{CALL}</think>No.", Answer("No.", CALL, (), unparsed=False)),
    ],
)
def test_calls_and_reasoning_beside_each_other(family: str, prompt: str, text: str, expected: Answer) -> None:
    for size in (0, 2, 3, 4):
        assert read(family, text, prompt, size) == expected


def test_text_is_held_back_only_while_it_may_be_a_sign() -> None:
    parser = FAMILIES["qwen2.5"].parser()
    shown = [parser.push(piece).text for piece in ("Hello", " <", "tool", "s", " x", " <tool_call", ">", "{x", "y")]
    assert shown == ["Hello", "", "", " <tools", " x", "", "", " <tool_call>{x", "y"]


def test_a_call_is_reported_when_it_is_complete() -> None:
    parser = FAMILIES["qwen2.5"].parser()
    assert not parser.push(CALL[:-1]).tool_calls
    (delta,) = parser.push(CALL[-1:]).tool_calls
    assert (delta.index, delta.name, delta.arguments, len(delta.id)) == (0, "now", "{}", 9)


def test_the_identifier_that_mistral_models_write_is_kept() -> None:
    parser = FAMILIES["mistral-nemo"].parser()
    parts = parser.push('[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcDEF123"}]')
    assert [delta.id for delta in parts.tool_calls] == ["abcDEF123"]


# Token by token, where the signs of calls and reasoning are special tokens

SHARED_SIGNS = ("<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>", "<think>", "</think>")
SIGNS = {
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "gemma": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    "function-gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "llama3": ("<|python_tag|>",),
    "tool-code": (),
}
"""What is one special token each, in the tokenizers of the models."""


def tokenizer_with(folder: Path, signs: tuple[str, ...]) -> TextTokenizer:
    """The tokenizer of tiny models, with some special tokens more."""
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    tokenizer = tiny.tiny_tokenizer(300)
    tokenizer.add_special_tokens([AddedToken(sign, special=True, normalized=False) for sign in signs])
    return saved_tokenizer(folder, tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_recovered_from_their_tokens(family: str, tmp_path: Path) -> None:
    template = FAMILIES[family].template().written
    signs = SIGNS.get(FAMILIES[family].tool_format, SHARED_SIGNS)
    tokenizer = tokenizer_with(tmp_path, signs)
    answer_format = AnswerFormat(template, "auto", tokenizer)
    for number, answer in enumerate(ANSWERS):
        expected = FAMILIES[family].fitted(answer)
        prompt, text = FAMILIES[family].written(expected)
        prompt_ids, ids = (tokenizer.encode(each, add_special_tokens=False) for each in (prompt, text))
        reading = answer_format.reading(TOOLS, prompt_ids)
        parser, _ = reading.begin()
        decoder = StreamDecoder(tokenizer, reading.marks)
        source, parts = random.Random(number), []
        while ids:
            # A pass gives several tokens where drafts are accepted.
            count = source.randint(1, 4)
            parts.append(parser.push(decoder.push(ids[:count])))
            ids = ids[count:]
        parts += [parser.push(decoder.flush()), parser.finish()]
        assert answer_of(parts) == Answer(expected.text, expected.reasoning, expected.calls, unparsed=False), text
