"""The command `edge-run app`: its port, its window, its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgerun.edge.cli.main import main
from support.app_server import RunningApp, new_conversation, running_app, send, window
from support.processes import EDGE_RUN

WEBVIEW = """
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

opened = []

def create_window(title, url, **size):
    opened.append(url)

def start():
    opener = build_opener(HTTPCookieProcessor())
    opener.open(opened[0]).read()
    page = opener.open(opened[0].partition("/open")[0] + "/api/state").read()
    Path("seen.json").write_bytes(page)
"""
"""A stand-in for pywebview, whose window opens the page, and is then closed by its user."""


def ran(command: list[str], home: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The end of a command whose data is in a folder."""
    environment = {**os.environ, "EDGERUN_HOME": str(home), **options.pop("env", {})}
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False, env=environment, **options)


def test_a_port_in_use_is_skipped_or_refused(
    tmp_path: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgerun.edge.cli import app

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = ran([*EDGE_RUN, "app", "--no-browser", str(tiny_bundle), "--port", str(port)], tmp_path)
        assert done.returncode == 2
        assert f"port {port} of 127.0.0.1 is in use" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        monkeypatch.setattr(app, "_PORT", port)
        try:
            with app._bound_socket(None) as found:
                assert port < found.getsockname()[1] < port + app._PORTS
        except OSError:
            pytest.skip("the ports above are in use")


def test_the_second_start_finds_the_first(app: RunningApp) -> None:
    command = [*EDGE_RUN, "app", "--no-browser"]
    done = ran(command, app.home)
    assert done.returncode == 0
    assert re.fullmatch(
        rf"edge-run: the app runs already\nedge-run: open http://127\.0\.0\.1:{app.port}/open\?token=\S+\n", done.stderr
    )
    assert ran([*command, "another-model"], app.home).stderr.startswith(
        "edge-run: the app runs already, with the models that it was started with; end it first to give it others\n"
    )
    # Only the owner reads the secrets; Windows has no permission bits.
    assert os.name == "nt" or not any((app.home / name).stat().st_mode & 0o077 for name in ("app.json", "app.key"))
    with app.client() as client:
        for key in ("", "Bearer wrong"):
            response = client.post("/open", json={}, headers={"authorization": key})
            assert response.status_code == 401
            assert "token" not in response.json()


@pytest.mark.skipif(os.name == "nt", reason="sends signals of POSIX systems")
def test_ctrl_c_ends_the_app_with_open_windows(tmp_path: Path, endless_bundle: Path) -> None:
    with running_app(tmp_path, endless_bundle, "--draft", "none") as app, app.entered() as client:
        with window(app, client.cookies) as page:
            answer = send(client, new_conversation(client), "hello")["id"]
            page.wait(lambda: page.of("delta", answer), "the answer begins")
            assert app.end() == 0
            assert page.wait_for_end(answer)["state"] == "interrupted"
        assert len(app.lines) == 1, app.lines


@pytest.mark.skipif(os.name == "nt", reason="sends signals of POSIX systems")
def test_an_app_that_is_ending_is_waited_for(tmp_path: Path, tiny_bundle: Path) -> None:
    with running_app(tmp_path, tiny_bundle, "--draft", "none") as first:
        with first.entered():
            first.process.send_signal(signal.SIGTERM)
        with running_app(tmp_path, tiny_bundle, "--draft", "none") as second, second.entered() as client:
            assert client.get("/api/state").status_code == 200
            assert second.lines == [f"edge-run: open {second.url}"]
        assert first.process.wait() == 0


def test_a_window_of_its_own(tmp_path: Path, tiny_bundle: Path) -> None:
    (tmp_path / "webview.py").write_text(WEBVIEW, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [*EDGE_RUN, "app", "--window", "--port", "0", str(tiny_bundle)]
    done = ran(command, tmp_path / "home", cwd=tmp_path, env={"PYTHONPATH": paths})
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert '"default_model":"bundle"' in (tmp_path / "seen.json").read_text(encoding="utf-8")
    assert not (tmp_path / "home" / "app.json").exists()


def test_bad_options_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGERUN_HOME", str(tmp_path))
    for options, message in (
        (["no-such-model"], "no-such-model"),
        (["--port", "70000"], "--port"),
        (["--memory", "lots"], "--memory is 'lots'"),
        (["--device", "toaster"], "toaster"),
    ):
        assert main(["app", "--offline", "--no-browser", *options]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


def test_a_damaged_endpoint_file_is_reported(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGERUN_HOME", str(app.home))
    monkeypatch.setattr("edgerun.edge.app.app_access._START_S", 0.2)
    endpoint = app.home / "app.json"
    kept = endpoint.read_bytes()
    for damaged in (b"{", b"[]", b'{"port": 1, "owner_key": "x"}', b""):
        endpoint.write_bytes(damaged)
        assert main(["app", "--no-browser"]) == 1
        assert re.search("runs already, and does not answer; end it", capsys.readouterr().err)
    endpoint.write_bytes(kept)
