"""Tools in the chat of the terminal: `--tools` and `/tools`, the question before a call, results, limits and stops."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="needs the mcp extra")
pytest.importorskip("onnx", reason="needs the export extra")

from edgerun.edge.conversations.records import CallState, MessageState, StoredMessage
from edgerun.edge.conversations.store import FILE_NAME, ConversationStore
from support.mcp_http_server import McpHttpServer, mcp_http_server
from support.processes import EDGE_RUN
from support.scripted_model import write_calling_bundle, write_endless_caller
from support.terminal_screen import TerminalScreen, terminal_screen

WEATHER_SERVER = Path(__file__).resolve().parents[2] / "support" / "weather_server.py"
QUESTION = "run this? y = once, a = always in this conversation, n = refuse: "
PROMPT = "\n> "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that calls `get_weather` twice and then says the weather."""
    return write_calling_bundle(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server() -> Iterator[McpHttpServer]:
    with mcp_http_server() as server:
        yield server


def write_servers(folder: Path, **servers: object) -> Path:
    path = folder / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    return path


@contextmanager
def chat(home: Path, *arguments: object) -> Iterator[TerminalScreen]:
    """A chat on a terminal that cannot be drawn on."""
    command = [*EDGE_RUN, *map(str, arguments), "--spec", "off"]
    with terminal_screen(command, columns=300, environment={"TERM": "dumb", "EDGERUN_HOME": str(home)}) as screen:
        yield screen


class Reader:
    """Reads a chat piece by piece."""

    def __init__(self, screen: TerminalScreen) -> None:
        self.screen = screen
        self._taken = 0

    def until(self, wanted: str) -> str:
        """What was written since the last call, up to `wanted`."""
        self.screen.wait_for(lambda: wanted in self._text()[self._taken :])
        found = self._text()[self._taken :].partition(wanted)[0] + wanted
        self._taken += len(found)
        return found

    def reply(self, text: str, wanted: str) -> str:
        """Type a line, and read up to `wanted`."""
        self.screen.type(text + "\n")
        self.until(text + "\n")
        return self.until(wanted)

    def stop(self) -> None:
        """Press Ctrl-C, and read up to the prompt; again after a while: `input` misses one right after its prompt."""
        taken = self._taken
        for _ in range(6):
            self.screen.process.send_signal(signal.SIGINT)
            end = time.monotonic() + 5
            while time.monotonic() < end and "stopped" not in self._text()[taken:]:
                self.screen.read(0.1)
            if "stopped" in self._text()[taken:]:
                break
        assert "stopped" in self.until(PROMPT)

    def quit(self) -> None:
        self.screen.type("/quit\n")
        assert self.screen.end() == 0

    def _text(self) -> str:
        return self.screen.output.replace("\r\n", "\n")


def stored(home: Path) -> list[StoredMessage]:
    """The messages of the only conversation."""
    with ConversationStore(home / FILE_NAME) as store:
        (conversation,) = store.conversations()
        return store.messages(conversation.id)


def test_each_call_is_asked_about_and_its_result_is_shown(tmp_path: Path, model: Path, server: McpHttpServer) -> None:
    home, calls = tmp_path / "home", tmp_path / "calls.txt"
    weather = {"command": sys.executable, "args": [str(WEATHER_SERVER), str(calls)]}
    far = {"type": "http", "url": server.url, "disabled": True}
    servers = write_servers(tmp_path, weather=weather, far=far)
    with chat(home, model, "--tools", servers) as screen:
        reader = Reader(screen)
        listed = reader.until(PROMPT)
        assert "weather: running\n* weather/get_weather  The weather in a city.\n* weather/storm" in listed
        assert "far: off\n" in listed
        chosen = reader.reply("/tools weather/get_weather", PROMPT)
        assert "* weather/get_weather" in chosen
        assert "\n  weather/storm" in chosen
        assert "there is no tool 'rain'; /tools lists the tools and their servers" in reader.reply(
            "/tools rain", PROMPT
        )
        assert 'I look.\nweather/get_weather {"city": "Paris"}\n' in reader.reply("Weather?", QUESTION)
        assert not calls.exists()
        reader.reply("what?", QUESTION)
        second = reader.reply("n", QUESTION)
        assert second == 'error: this call was declined\nweather/get_weather {"city": "Rome"}\n' + QUESTION
        assert "Rome: sunny\nIt is sunny in both." in reader.reply("a", PROMPT)
        assert calls.read_text(encoding="utf-8") == "Rome\n"
        again = reader.reply("/regenerate", PROMPT)  # no more questions in this conversation
        assert 'weather/get_weather {"city": "Paris"}\nParis: sunny\n' in again
        assert "saved; continue with --resume" in reader.reply(f"/save {tmp_path / 'chat.kv'}", PROMPT)
        reader.quit()
    _, first, second_answer = stored(home)
    assert [call.state for call in first.rounds[0].calls] == [CallState.REFUSED, CallState.DONE]
    assert [call.state for call in second_answer.rounds[0].calls] == [CallState.DONE, CallState.DONE]
    assert {each.content for each in (first, second_answer)} == {"It is sunny in both."}

    with chat(tmp_path / "another", model, "--resume", tmp_path / "chat.kv") as screen:
        reader = Reader(screen)
        reader.until("It is sunny in both.")
        reader.until(PROMPT)
        reader.quit()
    question, answer = stored(tmp_path / "another")
    assert (question.content, answer.content) == ("Weather?", "It is sunny in both.")
    assert [(each.text, each.calls) for each in answer.rounds] == [
        (each.text, each.calls) for each in second_answer.rounds
    ]


def test_ctrl_c_at_the_question_and_during_a_call_stops_the_answer(
    tmp_path: Path, model: Path, server: McpHttpServer
) -> None:
    home = tmp_path / "home"
    servers = write_servers(tmp_path, far={"url": server.url})
    with chat(home, model, "--tools", servers) as screen:
        reader = Reader(screen)
        reader.until(PROMPT)
        reader.reply("Weather?", QUESTION)
        reader.stop()
        assert not server.calls()
        reader.reply("/continue", QUESTION)
        server.faults["tools/call"] = lambda handler: handler.server.ending.wait() and None
        screen.type("y\n")
        screen.wait_for(lambda: bool(server.calls()))
        reader.stop()
        server.faults.clear()
        reader.reply("/continue", QUESTION)
        assert "Paris: sunny" in reader.reply("y", QUESTION)
        assert "It is sunny in both." in reader.reply("y", PROMPT)
        reader.quit()
    assert server.calls() == ["Paris", "Paris", "Rome"]
    assert [each.state for each in stored(home)] == [MessageState.COMPLETE, MessageState.COMPLETE]


def test_the_question_on_a_terminal_that_can_be_drawn_on(tmp_path: Path, model: Path, server: McpHttpServer) -> None:
    servers = write_servers(tmp_path, far={"url": server.url})
    command = [*EDGE_RUN, str(model), "--tools", str(servers), "--spec", "off"]
    with terminal_screen(command, columns=100, lines=50, environment={"EDGERUN_HOME": str(tmp_path)}) as screen:
        screen.until_prompt()
        screen.type("Weather?\r")
        screen.until(QUESTION.rstrip())
        screen.type("\x03")
        screen.until("stopped")
        screen.until_prompt()
        screen.type("/continue\r")
        for count in (2, 3):
            screen.wait_for(lambda count=count: screen.text.count(QUESTION.rstrip()) == count)  # type: ignore[misc]
            screen.type("y\r")
        screen.until("Rome: sunny\nIt is sunny in both.")
        screen.until_prompt()
        screen.type("/quit\r")
        assert screen.end() == 0
    assert server.calls() == ["Paris", "Rome"]


def test_the_number_of_rounds_is_limited(tmp_path: Path, server: McpHttpServer) -> None:
    insistent = write_endless_caller(tmp_path / "insistent")
    servers = write_servers(tmp_path, far={"url": server.url})
    with chat(tmp_path / "home", insistent, "--tools", servers) as screen:
        reader = Reader(screen)
        reader.until(PROMPT)
        reader.reply("Weather?", QUESTION)
        assert "it has asked for calls again and again; /continue goes on" in reader.reply("a", PROMPT)
        reader.quit()
    assert len(server.calls()) == 14


def test_the_servers_of_the_app_are_there_and_tools_of_a_conversation_go_on(
    tmp_path: Path, model: Path, server: McpHttpServer
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    listed = [{"name": "far", "url": server.url}, {"name": "gone", "command": "no-such-command"}]
    (home / "tools.json").write_text(json.dumps(listed), encoding="utf-8")
    with chat(home, model) as screen:
        reader = Reader(screen)
        reader.until(PROMPT)
        assert "No functions" in reader.reply("Weather?", PROMPT)  # nothing is offered, or started, before it is chosen
        assert not server.requests
        shown = reader.reply("/tools far", PROMPT)
        assert "gone: there is no command 'no-such-command'; give its path, or install it" in shown
        assert "* far/get_weather  The weather in a city." in shown
        reader.reply("Weather?", QUESTION)
        reader.reply("n", QUESTION)
        assert "It is sunny in both." in reader.reply("n", PROMPT)
        reader.quit()
    (home / "tools.json").write_text("[]", encoding="utf-8")
    with chat(home, model, "--continue") as screen:
        reader = Reader(screen)
        reader.until("It is sunny in both." + PROMPT)
        assert "not all tools of this conversation are offered; /tools says why" in reader.reply("Weather?", PROMPT)
        assert "add servers in edge-run app, or start with --tools FILE" in reader.reply("/tools", PROMPT)
        reader.quit()
    assert server.calls() == []


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (
            '{"mcpServers": {"x": {"command": "y"}}}',
            ["-p", "hello"],
            "--tools asks before each call, but there is a prompt",
        ),
        ('{"mcpServers": {"x": {"url": "y"}}}', [], "the server 'x' in "),
        ("{", [], "this is not JSON"),
        ("{}", [], "there are no servers in it; write {"),
        (None, [], "servers.json cannot be read: No such file"),
    ],
)
def test_files_that_cannot_be_used_are_refused_on_one_line(
    tmp_path: Path, model: Path, text: str | None, arguments: list[str], message: str
) -> None:
    path = tmp_path / "servers.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with chat(tmp_path / "home", model, "--tools", path, *arguments) as screen:
        assert screen.end() == 2
        assert message in screen.output
        assert len(screen.output.strip().splitlines()) == 1
