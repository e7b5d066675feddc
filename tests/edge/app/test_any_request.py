"""Any request to the app's API is answered or refused with one error: none fails."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.edge.app.app_service import state_routes
from edgerun.edge.app.conversation_endpoints import conversation_routes
from edgerun.edge.server.json_endpoint import JsonRoute
from support.app_server import RunningApp, new_conversation, send
from support.nightly import examples
from support.random_bodies import NAMES, NUMBERS, TEXTS, bodies

CONVERSATION, MESSAGE = "/api/conversations/{conversation_id}", "/api/messages/{message_id}"
READ = (
    "/api/state",
    "/api/conversations",
    "/api/search",
    "/api/export",
    CONVERSATION,
    f"{CONVERSATION}/export",
    f"{MESSAGE}/tokens",
    "/api/models",
    "/api/tools",
)
CONTEXT: Any = SimpleNamespace(store=None, settings=None, pool=None)
ROUTES = [*conversation_routes(CONTEXT, CONTEXT), *state_routes(CONTEXT)]
WITH_BODY = [
    (next(iter(route.methods or ())), route.path_format, route.parameters.kind)
    for route in ROUTES
    if isinstance(route, JsonRoute) and route.parameters.kind.__struct_fields__
]
QUERIES = st.dictionaries(
    st.sampled_from(("q", "format", "deleted")) | NAMES,
    st.sampled_from(("5", "0", "markdown", "json", '"a" OR', "a*")) | NUMBERS.map(str) | TEXTS,
    max_size=3,
)


@pytest.fixture(scope="module")
def client(app: RunningApp) -> Iterator[httpx.Client]:
    with app.entered() as entered:
        yield entered


@pytest.fixture(scope="module")
def ids(client: httpx.Client) -> dict[str, list[str]]:
    """Conversations and messages that there are, and others."""
    conversation = new_conversation(client, sampling={"max_tokens": 2})
    answer = send(client, conversation, "hello")
    return {"conversation_id": [conversation], "message_id": [answer["id"], answer["parent"]], "call": [], "preset": []}


@given(data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_any_request_is_answered_or_refused(
    client: httpx.Client, ids: dict[str, list[str]], data: st.DataObject
) -> None:
    path_ids = {name: data.draw(st.sampled_from([*known, *known, "x"]) | NAMES) for name, known in ids.items()}
    method, path, kind = data.draw(st.sampled_from([*(("GET", path, None) for path in READ), *WITH_BODY]))
    place = path.format(**{name: quote(id_, safe="") for name, id_ in path_ids.items()})
    body = None if kind is None else data.draw(bodies(kind, {}))
    response = client.request(method, place, params=data.draw(QUERIES), json=body)
    if response.status_code >= 400:
        assert response.status_code < 500, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
