"""Chat templates of nine families render as in `transformers`, with tools and documents."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from edgerun import TemplateError
from edgerun.models.bundle import Bundle
from edgerun.runtime.text.chat_template import ChatTemplate, load_template
from edgerun.runtime.text.tokenizer import TextTokenizer
from support.shared_data import data_path

chat_utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs the oracle extra")

FAMILIES = [
    "HuggingFaceTB-SmolLM3-3B",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

SYSTEM = {"role": "system", "content": "Answer  in German.\n"}
PLAIN = [
    {"role": "user", "content": "Grüße <b>&</b> 'x' \"y\" {{ 7 }}"},
    {"role": "assistant", "content": "Hello\n\n"},
    {"role": "user", "content": "  Again "},
]
THOUGHT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\n4"},
    {"role": "user", "content": "And 3 + 3?"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's weather: “sunny” or <wet>.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "description": "Now", "parameters": {"type": "object"}}},
]
CALL = {"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
SECOND_CALL = {"type": "function", "id": "call00002", "function": {"name": "time", "arguments": {}}}
WRITTEN_CALL = {**CALL, "function": {"name": "weather", "arguments": json.dumps({"city": "Köln"}, ensure_ascii=False)}}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": '{"sky": "grün & <grau>"}'}
SECOND_RESULT = {"role": "tool", "name": "time", "tool_call_id": "call00002", "content": "12:00"}


def called(*calls: dict[str, Any], **content: Any) -> dict[str, Any]:
    return {"role": "assistant", **content, "tool_calls": list(calls)}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": PLAIN,
    "one turn": PLAIN[:1],
    "system": [SYSTEM, *PLAIN],
    "ends with the assistant": PLAIN[:2],
    "thought": THOUGHT,
    "call": [PLAIN[0], called(CALL)],
    "call without content": [PLAIN[0], called(CALL, content=None)],
    "call with content": [PLAIN[0], called(CALL, content="Let me see.")],
    "call as text": [PLAIN[0], called(WRITTEN_CALL, content="")],
    "call and result": [PLAIN[0], called(CALL, content=""), RESULT],
    "answered": [PLAIN[0], called(CALL, content=""), RESULT, {"role": "assistant", "content": "Grey."}, PLAIN[2]],
    "two calls": [SYSTEM, PLAIN[0], called(CALL, SECOND_CALL, content=""), RESULT, SECOND_RESULT],
    "two users": [PLAIN[0], PLAIN[0]],
    "nothing": [],
}
VARIABLES: dict[str, dict[str, Any]] = {
    "": {},
    "closed": {"add_generation_prompt": False},
    "tools": {"tools": TOOLS},
    "no tools": {"tools": []},
    "tools in the system": {"tools": TOOLS, "tools_in_user_message": False},
    "xml tools": {"xml_tools": [json.dumps(TOOLS[0])], "python_tools": ["def now(): ..."]},
    "documents": {"documents": [{"title": "A", "text": "alpha"}, {"title": "B", "text": "beta", "doc_id": 2}]},
    "documents and tools": {"documents": [{"title": "A", "text": "alpha"}], "tools": TOOLS[:1]},
    "thinking": {"enable_thinking": True, "thinking": True},
    "not thinking": {"enable_thinking": False, "thinking": False},
    "date": {"date_string": "24 Dec 2025"},
    "controls": {"controls": {"length": "short", "originality": "extractive"}},
}


class Clock(datetime):
    """A clock with a fixed time."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(2026, 2, 3, 4, 5, 6)


@pytest.fixture(autouse=True)
def fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_utils, "datetime", Clock)
    monkeypatch.setattr("edgerun.runtime.text.template_sandbox.datetime", Clock)


def source_of(family: str) -> str:
    return data_path(f"tokenizers/chat_templates/{family}.jinja").read_text(encoding="utf-8")


def expected_of(source: str, messages: list[dict[str, Any]], **variables: Any) -> str | None:
    """What `transformers` renders; None if the template raises."""
    try:
        rendered, _ = chat_utils.render_jinja_template(
            [messages], chat_template=source, **{"add_generation_prompt": True, **SPECIAL, **variables}
        )
    except Exception:  # noqa: BLE001  Jinja raises many types
        return None
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_equals_that_of_transformers(family: str, conversation: str) -> None:
    source, messages = source_of(family), CONVERSATIONS[conversation]
    template = ChatTemplate(source, SPECIAL)
    for name, variables in VARIABLES.items():
        expected = expected_of(source, messages, **variables)
        if expected is None:
            with pytest.raises(TemplateError, match="use --raw"):
                template.render(messages, **variables)
        else:
            assert template.render(messages, **variables) == expected, name


@pytest.mark.parametrize(
    ("tokenizer", "family"),
    [("qwen2.5", "Qwen-Qwen2.5-7B-Instruct"), ("phi-3-mini", "microsoft-Phi-3.5-mini-instruct")],
)
def test_token_ids_equal_those_of_transformers(tokenizer: str, family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = data_path(f"tokenizers/{tokenizer}")
    bundle = Bundle(folder, folder / "model.onnx", None)
    ours = TextTokenizer(bundle, 200_000)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    source = source_of(family)
    template = ChatTemplate(source, {name: value for name, value in theirs.special_tokens_map.items() if value})
    for name in ("plain", "system", "call and result", "two calls"):
        for variables in ({}, {"tools": TOOLS}):
            messages = CONVERSATIONS[name]
            expected = theirs.apply_chat_template(
                messages, chat_template=source, add_generation_prompt=True, tokenize=True, **variables
            )
            text = template.render(messages, **variables)
            assert ours.encode(text, add_special_tokens=False) == expected
    # The template of the tokenizer's own configuration is loaded.
    own = load_template(bundle, ours)
    if theirs.chat_template is None:
        assert own is None
    else:
        expected_text = theirs.apply_chat_template(PLAIN, add_generation_prompt=True, tokenize=False)
        assert own.render(PLAIN) == expected_text
