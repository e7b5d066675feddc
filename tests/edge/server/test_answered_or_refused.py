"""What a request asks for is answered, or refused with one error: none fails."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route

from edgerun.edge.service.chat_body import ChatBody
from edgerun.edge.service.responses_body import ResponsesBody
from edgerun.edge.service.text_bodies import CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from support.random_bodies import NAMES, TEXTS, bodies
from support.serving import CHAT, asked, chat_body

BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    CHAT: (ChatBody, chat_body(max_tokens=2)),
    "/v1/completions": (CompletionBody, {"prompt": "a", "max_tokens": 2}),
    "/v1/responses": (ResponsesBody, {"input": "a", "max_output_tokens": 2}),
    "/v1/embeddings": (EmbeddingBody, {"input": "a"}),
    "/tokenize": (TokenizeBody, {"content": "a"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
}
"""Bodies by their path, each with its required fields."""


def test_every_path_with_a_body_is_tried(tiny_app: Starlette) -> None:
    routes = [route for route in tiny_app.routes if isinstance(route, Route) and "POST" in (route.methods or ())]
    assert [route.path for route in routes] == list(BODIES)


@pytest.mark.parametrize("path", BODIES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_body_is_answered_or_refused(tiny_app: Starlette, path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(*BODIES[path]))
    query = data.draw(st.dictionaries(NAMES, TEXTS, max_size=1))
    response = asked(tiny_app, "POST", path, json=body, params=query)
    if response.status_code == HTTPStatus.OK:
        return
    assert response.status_code in {HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND}, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in response.json()["error"]["message"]
