"""Who is let into the app, and what its responses allow the page to do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import pytest

from edgerun.edge.app.app_access import TOKEN_LIFE_S, AppAccess
from support.app_server import RunningApp, running_app


@pytest.fixture
def inside(app: RunningApp, cookies: httpx.Cookies) -> Iterator[httpx.Client]:
    """A client with a session."""
    with app.client() as client:
        client.cookies = cookies
        yield client


def new_token(app: RunningApp) -> str:
    """A token as another process of the same user gets one."""
    key = json.loads((app.home / "app.json").read_text(encoding="utf-8"))["owner_key"]
    with app.client() as client:
        return str(client.post("/open", json={}, headers={"authorization": f"Bearer {key}"}).json()["token"])


def test_a_browser_without_a_session_is_told_how_to_get_in(app: RunningApp) -> None:
    with app.client() as client:
        for path in ("/", "/page/preact.js"):
            response = client.get(path)
            assert response.status_code == 401
            assert "edge-run app" in response.text
        response = client.get("/api/events")
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "no_session"


def test_a_token_opens_the_page_once(app: RunningApp) -> None:
    token = new_token(app)
    with app.client() as client, app.client() as late:
        response = client.get("/open", params={"token": token})
        assert response.status_code == 303
        assert response.headers["location"] == "/"
        cookie = SimpleCookie(response.headers["set-cookie"])[f"edge-run-{app.port}"]
        assert cookie["httponly"]
        assert cookie["samesite"] == "strict"
        assert client.get("/api/nothing").status_code == 404
        # The link may be followed again by the browser that has been let in.
        assert client.get("/open", params={"token": token}).status_code == 303
        refused = late.get("/open", params={"token": token})
        assert refused.status_code == 403
        assert "used already" in refused.text
        assert late.get("/api/nothing").status_code == 401


def test_a_link_of_another_site_opens_the_page_without_a_redirect(app: RunningApp) -> None:
    with app.client() as client:
        response = client.get("/open", params={"token": new_token(app)}, headers={"sec-fetch-site": "cross-site"})
        assert response.status_code == 200
        assert 'http-equiv="refresh" content="0; url=/"' in response.text
        assert client.get("/").status_code == 200


def test_a_wrong_or_old_token_opens_nothing(app: RunningApp, monkeypatch: pytest.MonkeyPatch) -> None:
    with app.client() as client:
        for token in ("", "wrong", "ä"):
            response = client.get("/open", params={"token": token})
            assert response.status_code == 403
            assert "set-cookie" not in response.headers
    access = AppAccess(b"secret", 8642)
    now = [1000.0]
    monkeypatch.setattr("edgerun.edge.app.app_access.time.monotonic", lambda: now[0])
    early, late = access.new_token(), access.new_token()
    now[0] += TOKEN_LIFE_S - 1
    assert access.take_token(early)
    now[0] += 2
    assert not access.take_token(late)


def test_a_cookie_of_ones_own_making_or_an_old_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    access = AppAccess(b"secret", 8642)
    for value in ("", "..", "9999999999.a.b", "9999999999.a." + "0" * 64, "ä.ä.ä", "x" * 5000):
        assert not access.is_session(value)
    session = access.new_session()
    assert access.is_session(session)
    assert not AppAccess(b"another", 8642).is_session(session)
    later = time.time() + 31 * 24 * 3600
    monkeypatch.setattr("edgerun.edge.app.app_access.time.time", lambda: later)
    assert not access.is_session(session)


def test_requests_of_other_sites_are_refused(inside: httpx.Client) -> None:
    json_type = {"content-type": "application/json"}
    for headers, status in (
        ({"host": "evil.example"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ):
        assert inside.get("/api/nothing", headers=headers).status_code == status, headers
        assert inside.post("/api/nothing", headers={**json_type, **headers}, content=b"{}").status_code == status
    own = {"origin": str(inside.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}
    assert inside.get("/api/nothing", headers=own).status_code == 404
    for method in ("POST", "PUT", "PATCH"):
        response = inside.request(method, "/api/nothing", content=b"{}", headers={"content-type": "text/plain"})
        assert response.json()["error"]["code"] == "unsupported_content_type"


def test_the_headers_of_the_page(inside: httpx.Client) -> None:
    index, script = inside.get("/"), inside.get("/page/preact.js")
    assert re.search(r"script-src 'self' 'sha256-[\w+/]{43}=';", index.headers["content-security-policy"])
    for response in (index, script, inside.get("/api/nothing")):
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cross-origin-opener-policy"] == "same-origin"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"
        assert response.headers["cache-control"] in {"no-store", "no-cache"}
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert inside.get("/page/vendor/preact/preact.mjs").headers["content-type"] == "text/javascript; charset=utf-8"
    unchanged = inside.get("/page/preact.js", headers={"if-none-match": script.headers["etag"]})
    assert unchanged.status_code == 304
    for path in ("/page/../page_files.py", "/page/%2e%2e/page_files.py", "/page/nothing.js"):
        assert inside.get(path).status_code == 404


def test_a_session_outlasts_a_restart_on_the_same_port(tmp_path: Path, tiny_bundle: Path) -> None:
    with running_app(tmp_path, tiny_bundle, "--draft", "none") as first:
        with first.entered() as client:
            cookies = client.cookies
        port = str(first.port)
        # A killed app leaves the file that says where it was.
        first.process.kill()
        first.process.wait()
        assert json.loads((tmp_path / "app.json").read_text(encoding="utf-8"))["port"] == first.port
    with running_app(tmp_path, tiny_bundle, "--draft", "none", "--port", port) as second, second.client() as client:
        client.cookies = cookies
        assert client.get("/api/nothing").status_code == 404
        assert second.end() == 0
    assert not (tmp_path / "app.json").exists()


def test_other_programs_use_the_models(app: RunningApp) -> None:
    with app.client() as client:
        assert client.get("/v1/models").json()["data"]
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=body).json()["choices"]
        assert client.post("/v1/chat/completions", json=body, headers={"origin": "http://evil"}).status_code == 403


def test_other_programs_do_not_change_what_is_on_the_disk(app: RunningApp) -> None:
    with app.client() as client:
        model = client.get("/api/tags").json()["models"][0]["name"]
        for method, path in (("DELETE", "/api/delete"), ("POST", "/api/pull"), ("POST", "/api%2Fpull")):
            refused = client.request(method, path, json={"model": model})
            assert refused.status_code == 403
            assert refused.json()["error"].startswith("programs may not download or remove models")
