"""Starting the app at login: what is written on each system, and removed; the switch of the settings."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgerun.edge.app.app_service import change_login, login_files, login_state
from edgerun.errors import InputError
from support.app_server import running_app
from support.processes import started

PYTHON = '/a folder/100% "$HOME"\\python'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder that is empty."""
    folder = tmp_path / "home"
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("APPDATA", str(folder / "AppData" / "Roaming"))
    return folder


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    ("system", "names"),
    [
        (
            "Linux",
            [".config/systemd/user/edge-run.service", ".config/systemd/user/default.target.wants/edge-run.service"],
        ),
        ("Darwin", ["Library/LaunchAgents/edge-run.plist"]),
        ("Windows", ["AppData/Roaming/Microsoft/Windows/Start Menu/Programs/Startup/edge-run.cmd"]),
    ],
)
def test_what_is_shown_is_written_and_removed_and_nothing_else(
    system: str, names: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system == "Linux" and os.name == "nt":
        pytest.skip("writes a link")
    monkeypatch.setattr("platform.system", lambda: system)
    shown = login_state()
    assert (shown["enabled"], home.exists()) == (False, False)
    others = {(home / name).with_name("another").relative_to(home).as_posix() for name in names}
    for other in others:
        (home / other).parent.mkdir(parents=True, exist_ok=True)
        (home / other).write_text("of another program", encoding="utf-8")
    assert change_login(True) == change_login(True) == {**shown, "enabled": True}
    assert files_in(home) == {*names, *others}
    assert list(shown["files"]) == [str(home / name) for name in names]
    assert (home / names[0]).read_bytes().decode() == shown["files"][str(home / names[0])]
    assert (home / names[-1]).resolve() == (home / names[0]).resolve()
    assert change_login(False) == change_login(False) == shown
    assert files_in(home) == others


def test_the_command_survives_the_quoting_of_every_system(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)
    texts = []
    for system in ("Linux", "Darwin", "Windows"):
        monkeypatch.setattr("platform.system", lambda system=system: system)
        texts.append(str(next(iter(login_files().values()))))
    unit, agent, script = texts
    (line,) = re.findall("^ExecStart=(.*)$", unit, re.MULTILINE)
    command = plistlib.loads(agent.encode())["ProgramArguments"]
    assert command[0] == PYTHON
    assert command[-2:] == ["app", "--no-browser"]
    assert shlex.split(line.replace("%%", "%").replace("$$", "$")) == command
    assert subprocess.list2cmdline(command).replace("%", "%%") in script
    assert script.startswith("@chcp 65001 >nul\r\n")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(home: Path) -> None:
    change_login(True)
    unit = next(iter(login_files()))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", unit], capture_output=True, encoding="utf-8", check=False
    )
    assert unit.name not in done.stderr, done.stderr


@pytest.mark.skipif(os.name == "nt", reason="reads the file of macOS, and ends the app by a signal")
def test_the_command_that_is_written_starts_the_app(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    command = plistlib.loads(str(next(iter(login_files().values()))).encode())["ProgramArguments"]
    environment = {**os.environ, "EDGERUN_HOME": str(home.parent / "data")}
    with started(command, stderr=subprocess.PIPE, env=environment) as process:
        assert any(b"edge-run: open http://127.0.0.1:" in line for line in process.stderr)
        process.terminate()


def test_a_folder_that_cannot_be_written_is_one_line(home: Path) -> None:
    home.write_text("a file where the home folder was", encoding="utf-8")
    with pytest.raises(InputError, match=r"cannot be changed: .*; check its permissions"):
        change_login(True)


def test_the_page_asks_for_it(tiny_bundle: Path, home: Path) -> None:
    data = home.parent / "data"
    with (
        running_app(data, tiny_bundle, "--draft", "none", HOME=str(home), XDG_CONFIG_HOME="") as app,
        app.entered() as page,
    ):
        before = page.get("/api/login").json()
        assert not before["enabled"]
        assert page.put("/api/login", json={"enabled": True}).json() == {**before, "enabled": True}
        assert page.put("/api/login", json={"enabled": "yes"}).status_code == 400
        assert page.put("/api/login", json={"enabled": False}).json() == before
        with app.client() as stranger:
            assert stranger.put("/api/login", json={"enabled": True}).status_code == 401
    assert files_in(home) == set()


def test_the_switch_of_the_settings_shows_what_it_writes(tiny_bundle: Path, home: Path, chromium: Any) -> None:
    from playwright.sync_api import expect

    from support.browser import browser_page, look

    data = home.parent / "data"
    with (
        running_app(data, tiny_bundle, "--draft", "none", HOME=str(home), XDG_CONFIG_HOME="") as app,
        browser_page(app.url, within=chromium) as window,
    ):
        page = window.page
        page.get_by_role("link", name="Settings").click()
        switch = page.get_by_role("checkbox", name="Start the app when you log in")
        expect(switch).not_to_be_checked()
        section = page.locator("section").filter(has=switch)
        expect(section).to_contain_text(str(home))
        expect(section).to_contain_text("--no-browser")
        assert not list(home.rglob("edge-run.*"))
        section.scroll_into_view_if_needed()
        look(page, "start-at-login")
        switch.check()
        expect(section).to_contain_text("switching it off removes them")
        assert list(home.rglob("edge-run.*"))
        switch.uncheck()
        expect(section).to_contain_text("Switching it on writes")
        assert not list(home.rglob("edge-run.*"))
