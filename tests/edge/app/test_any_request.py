"""Any request to the app's API is answered or refused with one error: none fails."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.edge.app.app_context import SettingsBody
from edgerun.edge.app.conversation_endpoints import (
    ContextBody,
    ConversationChange,
    ImportBody,
    NewConversation,
    TokensBody,
)
from edgerun.edge.app.message_endpoints import BranchBody, DecisionBody, EditBody, NewMessage, RegenerateBody
from edgerun.edge.app.state_endpoints import PresetBody
from support.app_server import RunningApp
from support.app_windows import new_conversation, send
from support.random_bodies import NAMES, NUMBERS, TEXTS, bodies

CONVERSATION, MESSAGE = "/api/conversations/{conversation}", "/api/messages/{message}"
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
WITH_BODY: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    ("POST", "/api/conversations", NewConversation),
    ("PATCH", CONVERSATION, ConversationChange),
    ("POST", f"{CONVERSATION}/context", ContextBody),
    ("POST", f"{CONVERSATION}/messages", NewMessage),
    ("POST", f"{MESSAGE}/edit", EditBody),
    ("POST", f"{MESSAGE}/regenerate", RegenerateBody),
    ("POST", f"{MESSAGE}/branch", BranchBody),
    ("POST", f"{MESSAGE}/calls/{{name}}", DecisionBody),
    ("POST", "/api/tokens", TokensBody),
    ("POST", "/api/import", ImportBody),
    ("PATCH", "/api/settings", SettingsBody),
    ("PUT", "/api/presets/{name}", PresetBody),
)
QUERIES = st.dictionaries(
    st.sampled_from(("q", "limit", "format", "deleted")) | NAMES,
    st.sampled_from(("5", "0", "000000005" + "0" * 5000, "markdown", "json", '"a" OR', "a*"))
    | NUMBERS.map(str)
    | TEXTS,
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
    return {"conversation": [conversation], "message": [answer["id"], answer["parent"]], "name": []}


@given(data=st.data())
@settings(max_examples=200, deadline=None)
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
