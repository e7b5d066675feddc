"""Who may use the server: host names, web origins, API keys, content types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

import edgerun.server
from edgerun.edge.server.server_settings import ServerSettings
from edgerun.errors import InputError
from support.serving import CHAT, asked, chat_body


def refusal(response: httpx.Response) -> tuple[int, str]:
    """Status and code of an error; the response is checked to be one."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:1", "[::1]:8080", "localhost."]
)
def test_names_of_this_machine_are_served_also_to_its_pages(tiny_app: Starlette, host: str) -> None:
    for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
        assert asked(tiny_app, "GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:80",
        "192.168.0.1",
        "",
        "[::1",
        "[::1]x",
        "localhost:x",
    ],
)
def test_a_page_whose_name_was_pointed_at_this_machine_is_refused(tiny_app: Starlette, host: str) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/x")):
        response = asked(tiny_app, method, path, headers={"host": host})
        assert refusal(response) == (421, "host_not_allowed")


def test_further_host_names_are_served_on_request(tiny_bundle: Path) -> None:
    app = edgerun.server.app(tiny_bundle, allow_hosts=["LLM.example"])
    assert asked(app, "GET", "/health", headers={"host": "llm.example:443"}).status_code == 200
    assert asked(app, "GET", "/health", headers={"host": "other.example"}).status_code == 421
    anything = edgerun.server.app(tiny_bundle, allow_hosts=["*"])
    assert asked(anything, "GET", "/health", headers={"host": "other.example"}).status_code == 200


def test_a_server_that_others_reach_is_served_by_its_addresses() -> None:
    # A page cannot point an address, unlike a name, at another machine.
    settings = ServerSettings(host="0.0.0.0", api_key="k", allow_hosts=("llm.lan",))  # noqa: S104
    assert all(map(settings.allows_host, ("192.168.0.7:8080", "[fe80::1]", "llm.lan", "localhost")))
    assert not settings.allows_host("evil.example")
    assert not settings.is_loopback
    assert all(ServerSettings(host=host).is_loopback for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:3000", "null", "http://127.0.0.1"])
def test_pages_of_other_sites_are_refused(tiny_app: Starlette, origin: str) -> None:
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("OPTIONS", CHAT)):
        response = asked(tiny_app, method, path, headers={"origin": origin}, json=chat_body())
        assert refusal(response) == (403, "origin_not_allowed")
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_bodies_that_a_page_can_send_without_asking_are_refused(tiny_app: Starlette, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = asked(tiny_app, "POST", CHAT, content=b'{"messages": []}', headers=headers)
    assert refusal(response) == (415, "unsupported_content_type")


def test_listed_origins_may_use_the_server(tiny_bundle: Path) -> None:
    app = edgerun.server.app(tiny_bundle, allow_origins=["https://chat.example"], api_key="secret")
    ask = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    allowed = asked(app, "OPTIONS", CHAT, headers={**ask, "access-control-request-headers": "authorization,x-app"})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    # Errors reach the page too.
    refused = asked(app, "GET", "/v1/models", headers={"origin": "https://chat.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"
    assert asked(app, "OPTIONS", CHAT, headers={**ask, "origin": "https://evil.example"}).status_code == 403


def test_a_key_is_required_where_one_is_set(tiny_bundle: Path) -> None:
    app = edgerun.server.app(tiny_bundle, api_key="secret")
    for header in (None, "Bearer", "Bearer secre", "Bearer secret2", "Basic secret", "secret", "Bearer s\xe9cret"):
        headers: dict[str, Any] = {} if header is None else {"authorization": header.encode("latin-1")}
        for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/metrics"), ("GET", "/"), ("GET", "/x")):
            response = asked(app, method, path, headers=headers)
            assert refusal(response) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
    assert asked(app, "GET", "/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
    assert asked(app, "GET", "/v1/models", headers={"authorization": "bearer  secret "}).status_code == 200
    # Health tells nothing but that the server runs.
    assert asked(app, "GET", "/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "0.0.0.0 can be reached from other machines; set an API key"),  # noqa: S104
        ({"host": "::"}, "can be reached from other machines"),
        ({"host": "llm.lan"}, "can be reached from other machines"),
        ({"api_key": ""}, "the API key is empty"),
        ({"api_key": "a\nb"}, "characters that a header cannot have"),
        ({"allow_origins": ("example.com",)}, "example.com is not a web origin"),
        ({"max_body_bytes": 0}, "they must be positive"),
    ],
)
def test_settings_that_would_open_the_server_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ServerSettings(**settings)
