"""What a body asks for is answered by the engine, or refused with one error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgerun
from edgerun.edge.service.chat_body import ChatRequest
from edgerun.edge.service.request_error import describe
from edgerun.runtime.speculation.choice import Speculation

NUMBERS = st.sampled_from((0, -1, 1, 0.5, 2, 1e-9, 1e9, 2**64 - 1, -(2**63), 2**1000, -(2**1000)))
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
NAMES = st.sampled_from(("self", "template", "tokenizer", "loop", "caller", "documents", "tools", "range", "")) | TEXTS
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries({"name": TEXTS})}), max_size=2
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(("system", "developer", "user", "assistant", "tool"))},
    optional={"content": TEXTS, "name": TEXTS, "tool_calls": CALLS, "tool_call_id": TEXTS},
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "repeat_penalty"), NUMBERS),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), NUMBERS),
    "logit_bias": st.dictionaries(NUMBERS.map(str), NUMBERS, max_size=3),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "logprobs": st.booleans(),
    "n": st.integers(1, 3),
    "ignore_eos": st.booleans(),
    "exact": st.booleans(),
    "overflow": st.sampled_from(("error", "trim", "window", "cut")),
    "guided_regex": TEXTS,
    "guided_json": st.dictionaries(NAMES, JSON, max_size=3),
    "guided_choice": st.lists(TEXTS, max_size=3),
    "guided_grammar": TEXTS,
    "tools": st.lists(
        st.fixed_dictionaries(
            {
                "type": st.just("function"),
                "function": st.fixed_dictionaries(
                    {"name": TEXTS}, optional={"parameters": st.dictionaries(NAMES, JSON, max_size=3)}
                ),
            }
        ),
        max_size=2,
    ),
    "chat_template_kwargs": st.dictionaries(NAMES, JSON, max_size=3),
}


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[edgerun.Engine]:
    with edgerun.load(tiny_bundle) as engine:
        yield engine


@given(messages=st.lists(MESSAGES, min_size=1, max_size=3), fields=st.fixed_dictionaries({}, optional=FIELDS))
@settings(max_examples=60)
def test_a_body_is_answered_or_refused(
    engine: edgerun.Engine, messages: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    body = json.dumps({"messages": messages, "max_tokens": 2, **fields})
    message = ""
    try:
        request = ChatRequest.parse(body)
        reply = engine.generate(request.messages, replace(request.options, speculation=Speculation.OFF))
        assert [choice.stats.completion_tokens <= 2 for choice in reply.choices] == [True] * request.options.n
    except edgerun.EdgeError as error:
        message = str(describe(error))
    assert "\n" not in message
