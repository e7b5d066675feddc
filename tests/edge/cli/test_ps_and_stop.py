"""The commands `ps` and `stop`: they find the servers and apps of this user, and what these have in memory."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the serve extra")

from edgerun.edge.cli.main import main
from edgerun.edge.service.running_servers import announced, running_servers
from support.app_server import running_app
from support.commands import Capture, Patch, fails, json_of, output_of
from support.serving import CHAT, chat_body, served
from support.waiting import wait_until


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder of data of these servers, which does not exist yet."""
    monkeypatch.setenv("EDGERUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_models_of_a_server_and_an_app_are_listed_and_unloaded(tiny_bundle: Path, home: Path, capsys: Capture) -> None:
    name = tiny_bundle.name
    assert output_of(capsys, "ps").startswith("no server runs; to start one: edge-run serve or app")
    with served([tiny_bundle], "--draft", "none") as server, running_app(home, tiny_bundle, "--draft", "none") as app:
        found = {each["url"]: each for each in json_of(capsys, "ps", "--json")["servers"]}
        assert set(found) == {server.base, app.base}
        assert [each["name"] for each in found[server.base]["models"]] == [name]
        assert found[app.base] == {"url": app.base, "process": app.process.pid, "models": [], "problem": None}
        assert os.name == "nt" or not any(path.stat().st_mode & 0o077 for path in (home, *home.glob("server-*.json")))

        with app.client() as client:
            assert client.post(CHAT, json=chat_body(max_tokens=1, keep_alive="30m")).status_code == 200
        lines = output_of(capsys, "ps").splitlines()
        assert lines[0].split() == ["model", "size", "context", "until", "server"]
        rows = {line.split()[-1]: line.split() for line in lines[1:]}
        assert rows[server.base][0] == name
        assert rows[server.base][-3:-1] == ["256", "forever"]
        assert rows[app.base][-3:-1] == ["30", "min"]

        assert fails(capsys, "stop", "another").startswith("another is not in memory; edge-run ps lists what is")
        stopped = output_of(capsys, "stop", f"{name}:latest").splitlines()
        assert set(stopped) == {
            f"{name} is unloaded once no answer uses it ({base})" for base in (server.base, app.base)
        }
        wait_until(lambda: output_of(capsys, "ps") == "no model is in memory\n", "both are unloaded")
        assert fails(capsys, "stop").startswith("no model is in memory; ")
        # It stays in memory again after the next request.
        server.post(CHAT, chat_body(max_tokens=1))
        assert " forever " in output_of(capsys, "ps")
        if os.name != "nt":  # where no signal ends a program in order
            assert server.process is not None
            server.process.terminate()
            assert (server.process.wait(), app.end()) == (0, 0)
            assert not list(home.glob("server-*"))


def test_a_model_in_use_is_unloaded_after_its_answer(long_bundle: Path, capsys: Capture) -> None:
    with served([long_bundle], "--draft", "none") as server, server.connected() as running:
        body = json.dumps(chat_body("go on", max_tokens=3000, ignore_eos=True, stream=True))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        running.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(lambda: server.load()[0] == 1, "the answer is generated")
        assert output_of(capsys, "stop").startswith(f"{long_bundle.name} is unloaded once ")
        answer = b""
        while b"[DONE]" not in answer:
            piece = running.recv(65536)
            assert piece
            answer += piece
        wait_until(lambda: output_of(capsys, "ps") == "no model is in memory\n", "the model is unloaded")


def test_a_server_with_an_api_key_says_so(tiny_bundle: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.delenv("EDGERUN_API_KEY", raising=False)
    with served([tiny_bundle], "--draft", "none", EDGERUN_API_KEY="secret") as server:
        (found,) = json_of(capsys, "ps", "--json")["servers"]
        assert found["problem"] == "it has an API key; give it in the environment variable EDGERUN_API_KEY"
        assert main(["ps"]) == 0
        assert capsys.readouterr().err == f"edge-run: {server.base}: {found['problem']}\n"
        monkeypatch.setenv("EDGERUN_API_KEY", "secret")
        assert output_of(capsys, "stop").startswith(tiny_bundle.name)


def test_what_a_killed_server_left_is_ignored_and_removed(tiny_bundle: Path, home: Path, capsys: Capture) -> None:
    with served([tiny_bundle], "--draft", "none") as server:
        assert server.process is not None
        (file,) = home.glob("server-*.json")
        server.process.kill()
        server.process.wait()
        assert running_servers() == []
        assert not file.exists()
    file.write_text("{", encoding="utf-8")
    assert output_of(capsys, "ps").startswith("no server runs")


def test_what_does_not_speak_http_is_said_in_one_line(capsys: Capture) -> None:
    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"220 mail.example.com\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        with announced(f"http://127.0.0.1:{listening.getsockname()[1]}"):
            (found,) = json_of(capsys, "ps", "--json")["servers"]
        thread.join()
    assert found["problem"].startswith("it does not answer: it does not speak HTTP: BadStatusLine(")


def test_a_server_whose_home_cannot_be_written_works(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with served([tiny_bundle], "--draft", "none", EDGERUN_HOME=str(tmp_path / "file" / "home")) as server:
        assert server.post(CHAT, chat_body(max_tokens=1))["choices"]
