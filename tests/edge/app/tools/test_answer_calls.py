"""Answers that call tools of MCP servers: approval, results, limits, stops and restarts, through the page's API."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("mcp", reason="needs the mcp extra")

from support.app_server import (
    Json,
    RunningApp,
    Window,
    messages_of,
    new_conversation,
    post,
    read,
    running_app,
    send,
    window,
)
from support.scripted_model import write_calling_bundle, write_endless_caller

WEATHER_SERVER = Path(__file__).resolve().parents[3] / "support" / "weather_server.py"
TOOL = "weather/get_weather"


def add_server(client: httpx.Client, name: str, command: str, *arguments: str, **fields: Any) -> Json:
    """Add a server, and return what the app says of it."""
    body = {"command": command, "arguments": arguments, **fields}
    response = client.put(f"/api/tools/{name}", json=body).raise_for_status()
    (server,) = [each for each in response.json()["servers"] if each["name"] == name]
    found: Json = server
    return found


def server_once(client: httpx.Client, page: Window, name: str, state: str) -> Json:
    """What the app says of a server, once it has a state."""
    found: list[Json] = []

    def look() -> bool:
        found[:] = [each for each in client.get("/api/tools").json()["servers"] if each["name"] == name]
        return bool(found) and found[0]["state"] == state

    page.wait(look, f"{name} is {state}")
    return found[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that calls once and then says the weather, and one that never stops calling."""
    folder = tmp_path_factory.mktemp("models")
    once = write_calling_bundle(folder / "once")
    return once.rename(folder / "caller"), write_endless_caller(folder / "endless").rename(folder / "insistent")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path]) -> Iterator[RunningApp]:
    with running_app(tmp_path_factory.mktemp("home"), *models, "--draft", "none") as started:
        yield started


@pytest.fixture(scope="module")
def cookies(app: RunningApp) -> httpx.Cookies:
    with app.entered() as client:
        add_server(client, "weather", sys.executable, str(WEATHER_SERVER), str(app.home / "calls.txt"))
        return client.cookies


def made(app: RunningApp) -> list[str]:
    """Cities that the server was asked about."""
    path = app.home / "calls.txt"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def states(page: Window, conversation: str, answer: str) -> list[str]:
    """States of the calls of the last round of an answer."""
    rounds = messages_of(page.client, conversation)[answer]["rounds"]
    return [call["state"] for call in rounds[-1]["calls"]] if rounds else []


def decide(page: Window, conversation: str, answer: str, number: int, decision: str) -> None:
    call = messages_of(page.client, conversation)[answer]["rounds"][-1]["calls"][number]
    post(page.client, f"/api/messages/{answer}/calls/{call['id']}", decision=decision)


def asked(page: Window, **fields: Any) -> tuple[str, str]:
    """A conversation whose answer waits for a decision, and the answer."""
    conversation = new_conversation(page.client, **{"tools": [TOOL], "model": "caller", **fields})
    answer = send(page.client, conversation, "Weather?")["id"]
    page.wait(lambda: "waiting" in states(page, conversation, answer), "the answer asks")
    return conversation, answer


def test_calls_are_made_after_the_user_agrees(app: RunningApp, page: Window) -> None:
    before = made(app)
    conversation, answer = asked(page)
    shown = messages_of(page.client, conversation)[answer]
    (first,) = shown["rounds"]
    assert first["text"] == "<think>\nParis and Rome\n</think>\n\nI look."
    assert [json.loads(call["arguments"]) for call in first["calls"]] == [{"city": "Paris"}, {"city": "Rome"}]
    assert (shown["state"], states(page, conversation, answer)) == ("writing", ["waiting", "waiting"])
    assert made(app) == before
    decide(page, conversation, answer, 0, "run")
    page.wait(lambda: states(page, conversation, answer) == ["done", "waiting"], "the first call is made")
    decide(page, conversation, answer, 1, "refuse")
    ended = page.wait_for_end(answer)
    assert ended["content"] == "It is sunny in both."
    assert made(app) == [*before, "Paris"]
    assert [call["result"] for call in ended["rounds"][0]["calls"]] == [
        "Paris: sunny",
        "error: this call was declined",
    ]
    # The next answer reads the calls, and the context counts the tools.
    post(page.client, f"/api/conversations/{conversation}/context")
    exported = page.client.get(f"/api/conversations/{conversation}/export?format=markdown").text
    assert '**Call of get_weather** (done)\n\n```json\n{\n  "city": "Paris"\n}\n```' in exported
    text = page.client.get(f"/api/conversations/{conversation}/export?format=json").text
    imported = post(page.client, "/api/import", name="c.json", content=text)["conversations"][0]
    again = read(page.client, imported["id"])
    assert again["messages"][-1]["rounds"] == ended["rounds"]
    assert (again["conversation"]["tools"], again["conversation"]["allowed_tools"]) == ([TOOL], [])


def test_a_tool_can_be_allowed_for_a_conversation_and_branches_have_the_calls(app: RunningApp, page: Window) -> None:
    before = made(app)
    conversation, answer = asked(page)
    decide(page, conversation, answer, 0, "always")
    ended = page.wait_for_end(answer)
    assert [call["state"] for call in ended["rounds"][0]["calls"]] == ["done", "done"]
    assert read(page.client, conversation)["conversation"]["allowed_tools"] == [TOOL]
    assert made(app) == [*before, "Paris", "Rome"]
    first, second, *_ = page.client.get(f"/api/messages/{answer}/tokens").json()["tokens"]
    assert (first["text"], second["text"]) == ("It is sunny ", "in both.")
    branch = post(page.client, f"/api/messages/{answer}/branch", index=1, alternative=second["id"])["answer"]["id"]
    branched = page.wait_for_end(branch)
    assert branched["rounds"] == ended["rounds"]
    assert branched["content"] == "It is sunny in both."
    edited = post(page.client, f"/api/messages/{answer}/edit", content="It is fine.", branch=True)["message"]
    assert (edited["rounds"], edited["content"]) == (ended["rounds"], "It is fine.")
    assert made(app) == [*before, "Paris", "Rome"]
    other, waiting = asked(page)
    assert read(page.client, other)["conversation"]["allowed_tools"] == []
    post(page.client, f"/api/messages/{waiting}/stop")
    page.wait_for_end(waiting)


def test_answers_that_wait_can_be_stopped_and_continued(app: RunningApp, page: Window) -> None:
    before = made(app)
    conversation, answer = asked(page)
    post(page.client, f"/api/messages/{answer}/stop")
    stopped = page.wait_for_end(answer)
    assert (stopped["state"], made(app)) == ("stopped", before)
    post(page.client, f"/api/messages/{answer}/continue")
    page.wait(lambda: messages_of(page.client, conversation)[answer]["state"] == "writing", "it goes on")
    decide(page, conversation, answer, 0, "refuse")
    decide(page, conversation, answer, 1, "run")
    page.wait(lambda: messages_of(page.client, conversation)[answer]["state"] == "complete", "it ends")
    assert made(app) == [*before, "Rome"]

    # Several answers ask one after another.
    first, second = [each["id"] for each in post(page.client, f"/api/messages/{answer}/regenerate", count=2)["answers"]]
    page.wait(lambda: states(page, conversation, first) == ["waiting", "waiting"], "the first asks")
    post(page.client, f"/api/messages/{first}/stop")
    page.wait(lambda: states(page, conversation, second) == ["waiting", "waiting"], "the second asks")
    decide(page, conversation, second, 0, "always")
    assert page.wait_for_end(second)["state"] == "complete"
    assert messages_of(page.client, conversation)[first]["state"] == "stopped"


def test_the_number_of_rounds_is_limited(app: RunningApp, page: Window) -> None:
    conversation, answer = asked(page, model="insistent")
    before = made(app)
    decide(page, conversation, answer, 0, "always")
    ended = page.wait_for_end(answer)
    assert (ended["state"], len(ended["rounds"])) == ("length", 8)
    assert [call["state"] for call in ended["rounds"][-1]["calls"]] == ["waiting", "waiting"]
    assert len(made(app)) == len(before) + 14


def test_arguments_that_do_not_fit_are_not_asked_about(app: RunningApp, page: Window) -> None:
    """The tool of the model's name is one without a city."""
    server = "from mcp.server.mcpserver import MCPServer\ns = MCPServer('x')\n@s.tool()\n"
    server += "def get_weather(city: int) -> str:\n    'Number.'\n    return 'no'\ns.run('stdio')"
    add_server(page.client, "numbers", sys.executable, "-c", server)
    conversation = new_conversation(page.client, tools=["numbers/get_weather"], model="caller")
    ended = page.wait_for_end(send(page.client, conversation, "Weather?")["id"])
    assert [call["result"] for call in ended["rounds"][0]["calls"]] == [
        "error: the arguments.city: 'Paris' is not of the type integer",
        "error: the arguments.city: 'Rome' is not of the type integer",
    ]
    page.client.delete("/api/tools/numbers").raise_for_status()


def test_servers_that_fail_say_why_and_break_no_chat(page: Window) -> None:
    add_server(page.client, "none", "no-such-command")
    add_server(page.client, "exits", sys.executable, "-c", "import sys; sys.exit('the key is missing')")
    assert server_once(page.client, page, "none", "failed")["error"] == (
        "there is no command 'no-such-command'; give its path, or install it"
    )
    error = server_once(page.client, page, "exits", "failed")["error"]
    assert error.endswith("has ended; it said: the key is missing")
    conversation = new_conversation(page.client, tools=["none/x", "exits/y"], model="caller")
    ended = page.wait_for_end(send(page.client, conversation, "Weather?")["id"])
    assert (ended["state"], ended["rounds"]) == ("complete", [])
    refused = page.client.put("/api/tools/x", json={"command": " "})
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message == "the command is empty; name the program that is the server, or give a URL"
    off = add_server(page.client, "exits", sys.executable, enabled=False)
    assert (off["state"], off["error"]) == ("off", None)
    for name in ("none", "exits"):
        page.client.delete(f"/api/tools/{name}").raise_for_status()
    assert [each["name"] for each in page.client.get("/api/tools").json()["servers"]] == ["weather"]


def test_calls_are_there_after_a_restart(tmp_path: Path, models: tuple[Path, Path]) -> None:
    with running_app(tmp_path, models[0], "--draft", "none") as app:
        with app.entered() as client, window(app, client.cookies) as page:
            add_server(client, "weather", sys.executable, str(WEATHER_SERVER), str(tmp_path / "calls.txt"))
            conversation, answer = asked(page, model=None)
            decide(page, conversation, answer, 0, "run")
            page.wait(lambda: states(page, conversation, answer) == ["done", "waiting"], "the first call is made")
        assert app.end() == 0
        # The server ended with the app.
        assert not [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(each.info["cmdline"])]
    assert ((tmp_path / "tools.json").stat().st_mode & 0o077) == 0 or sys.platform == "win32"
    with (
        running_app(tmp_path, models[0], "--draft", "none") as app,
        app.entered() as client,
        window(app, client.cookies) as page,
    ):
        kept = messages_of(client, conversation)[answer]
        assert (kept["state"], states(page, conversation, answer)) == ("interrupted", ["done", "waiting"])
        post(client, f"/api/messages/{answer}/continue")
        page.wait(lambda: messages_of(client, conversation)[answer]["state"] == "writing", "it goes on")
        decide(page, conversation, answer, 1, "run")
        ended = page.wait_for_end(answer)
        assert (ended["state"], ended["content"]) == ("complete", "It is sunny in both.")
        assert made(app) == ["Paris", "Rome"]
