"""Messages in the form of OpenAI's chat API, as programs send them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgerun
from edgerun import Engine, InputError
from edgerun.runtime.text.messages import template_messages

USER = {"role": "user", "content": "the other"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"path": "photos", "size": 3}'}}
TEMPLATE = (
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments.path }}){% endfor %}"
    "{% endfor %}{% if polite %} please{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("chat") / "bundle"
    shutil.copytree(tiny_bundle, folder)
    (folder / "edge.json").unlink()
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with edgerun.load(folder, threads=1, context=256) as engine:
        yield engine


def prompt_tokens(engine: Engine, messages: Any, **options: Any) -> int:
    return engine.generate(messages, max_tokens=1, **options).stats.prompt_tokens


def test_messages_are_answered_like_the_prompt_and_the_conversation_that_they_are(engine: Engine) -> None:
    expected = engine.generate("the other", max_tokens=8)
    assert engine.generate([USER], max_tokens=8).text == expected.text
    assert "".join(chunk.text for chunk in engine.stream([USER], max_tokens=8)) == expected.text
    assert asyncio.run(engine.agenerate([USER], max_tokens=8)).text == expected.text
    with engine.session(system="be brief") as chat:
        first, second = chat.send("the other", max_tokens=8), chat.send("in the", max_tokens=8)
    conversation = [
        {"role": "system", "content": "be brief"},
        USER,
        {"role": "assistant", "content": first.text, "refusal": None},
        {"role": "user", "content": [{"type": "text", "text": "in the"}]},
    ]
    assert engine.generate(conversation, max_tokens=8).text == second.text


def test_a_conversation_sent_whole_computes_only_what_is_new(engine: Engine) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": "the other thing " * 5}]
    for said in ("in the", "and", "of it"):
        messages.append({"role": "user", "content": said})
        reply = engine.generate(messages, max_tokens=6)
        messages.append({"role": "assistant", "content": reply.text})
    # Decoding and encoding a random model's text again may give other tokens, so the answers may be computed again.
    assert reply.stats.reused_tokens > 60


def test_tools_and_variables_reach_the_template(engine: Engine) -> None:
    plain = prompt_tokens(engine, [USER])
    tool = {"type": "function", "function": {"name": "find_files", "parameters": {"type": "object"}}}
    assert prompt_tokens(engine, [USER], tools=[tool]) > plain
    assert prompt_tokens(engine, [USER], template_variables={"polite": True}) > plain
    assert prompt_tokens(engine, "the other", template_variables={"polite": False}) == plain


@pytest.mark.parametrize("name", ["self", "template", "tokenizer", "variables", "options", "", "a b"])
def test_template_variables_may_have_any_name(engine: Engine, name: str) -> None:
    assert prompt_tokens(engine, [USER], template_variables={name: 1}) == prompt_tokens(engine, [USER])


@pytest.mark.parametrize("documents", [3, "text", {"title": "a"}, ["text"]])
def test_documents_are_a_list_of_objects(engine: Engine, documents: Any) -> None:
    with pytest.raises(InputError, match="template_variables: documents is .*; it must be a list of objects"):
        engine.generate([USER], template_variables={"documents": documents})
    assert prompt_tokens(engine, [USER], template_variables={"documents": None}) == prompt_tokens(engine, [USER])


def test_messages_become_what_templates_read() -> None:
    read = template_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "tool", "content": "3 files", "tool_call_id": "call_1"},
        ]
    )
    assert read[0] == {"role": "user", "content": "a\nb"}
    assert read[1]["content"] == ""
    assert read[1]["tool_calls"][0]["function"] == {"name": "find", "arguments": {"path": "photos", "size": 3}}
    assert read[2] == {"role": "tool", "content": "3 files", "tool_call_id": "call_1"}


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "there are no messages; give at least one"),
        ([USER, {"role": "bot", "content": ""}], "messages[1]: role is 'bot'; it must be one of system, developer"),
        ([{"content": "a"}], "messages[0]: role is None; it must be one of"),
        ([{"role": "user"}], "messages[0] has no content; give text"),
        ([{"role": "user", "content": 5}], "messages[0].content is 5; it must be text, or a list of text parts"),
        ([{"role": "user", "content": b"a"}], "messages[0].content is b'a'; it must be text"),
        (
            [{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}],
            "messages[0].content[0] is a part of the type 'video_url'; models here read text and images",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0] is None; an image is",
        ),
        ([{**USER, "cache": True}], "messages[0] has the field 'cache'; fields are: role, content"),
        ([{**USER, "name": 5}], "messages[0]: name is 5; it must be text"),
        ([{**USER, "tool_calls": [CALL]}], "messages[0] is of the role user and has tool_calls; only an assistant"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].tool_calls is []; it must be a list of calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0] is {}; it must have a function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0]: arguments are not JSON: ",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0]: arguments are [1]; give a JSON object",
        ),
    ],
)
def test_messages_of_another_form_are_refused(engine: Engine, messages: Any, error: str) -> None:
    with pytest.raises(InputError) as caught:
        engine.generate(messages)
    assert str(caught.value).startswith(error)


def test_options_that_contradict_messages_are_refused(engine: Engine) -> None:
    with pytest.raises(InputError, match="system is given beside messages; make it the first message"):
        engine.generate([USER], system="be brief")
    with pytest.raises(InputError, match="raw continues a text, but the prompt is messages"):
        engine.generate([USER], raw=True)
    with pytest.raises(InputError, match="template_variables has 'tools'; give that with the prompt or as an option"):
        engine.generate([USER], template_variables={"tools": []})
