"""The page of the app in a real browser: servers in the settings, tools of a conversation, and calls that wait."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="needs the mcp extra")
pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import Browser, Page, expect

from support.browser import look
from support.chat_page import ChatPage, opened
from support.mcp_http_server import mcp_http_server
from support.scripted_model import write_calling_bundle

WEATHER_SERVER = Path(__file__).resolve().parents[3] / "support" / "weather_server.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling_bundle(tmp_path_factory.mktemp("model"))


def add_server(page: Page, name: str, command: str, *arguments: str) -> None:
    """Add a server in the settings."""
    page.get_by_role("button", name="Add a server …").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=False).first.fill(name)
    dialog.get_by_label("Command").fill(command)
    dialog.get_by_label("Arguments").fill("\n".join(arguments))
    dialog.get_by_role("button", name="Save and start").click()
    expect(dialog).to_have_count(0)


def paste_weather_server(page: Page, calls: Path) -> None:
    """Add the weather server from a configuration that has another one, and one that cannot be added."""
    weather = {"command": sys.executable, "args": [str(WEATHER_SERVER), str(calls)], "env": {"CITY": "Paris"}}
    servers = {
        "weather": {**weather, "autoApprove": ["storm"]},
        "other": {"command": "uvx"},
        "far": {"url": "https://x", "type": "sse"},
    }
    page.get_by_role("button", name="Paste a configuration …").click()
    dialog = page.get_by_role("dialog")
    text = dialog.get_by_role("textbox", name="Configuration")
    text.fill('{"mcpServers": {,}}')
    expect(dialog.get_by_role("status")).to_contain_text("this is not JSON: ")
    text.fill(json.dumps({"mcpServers": servers}))
    found = dialog.locator("[data-found=weather]")
    expect(found).to_contain_text(f"{WEATHER_SERVER} {calls}")
    expect(found).to_contain_text("CITY=ParisNot taken over: autoApprove.")
    expect(dialog.locator("[data-found=far]")).to_contain_text("its type is the string 'sse'")
    expect(dialog.get_by_label("far")).to_be_disabled()
    look(page, "configuration")
    assert page.locator("[data-server]").count() == 0  # nothing is added before the user agrees
    dialog.get_by_label("other").uncheck()
    dialog.get_by_role("button", name="Add and start 1 server").click()
    expect(dialog).to_have_count(0)
    expect(page.locator("[data-server]")).to_have_count(1)


def test_a_server_with_an_address(tmp_path: Path, chromium: Browser, model: Path) -> None:
    with (
        mcp_http_server() as server,
        opened(chromium, tmp_path / "home", model, "--draft", "none") as app,
        app.window(path="/#/settings") as chat,
    ):
        page = chat.page
        page.get_by_role("button", name="Add a server …").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Name", exact=False).first.fill("far")
        dialog.get_by_label("Command or URL").fill(server.url)
        expect(dialog.get_by_label("Arguments")).to_have_count(0)
        dialog.get_by_label("Headers").fill("Authorization=Bearer key")
        look(page, "address")
        dialog.get_by_role("button", name="Save and start").click()
        listed = page.locator("[data-server=far]")
        expect(listed).to_contain_text(server.url)
        expect(listed).to_contain_text("Tools: get_weather")
        assert {headers["authorization"] for _, _, headers in server.requests} == {"Bearer key"}
        listed.get_by_role("button", name="Edit far").click()
        expect(dialog.get_by_label("Command or URL")).to_have_value(server.url)
        expect(dialog.get_by_label("Headers")).to_have_value("Authorization=Bearer key")
        dialog.get_by_role("button", name="Cancel").click()

        chat.new_chat()
        choose_tool(chat, "get_weather")
        chat.send("Weather?")
        waiting = chat.answers.last.locator("[data-call=waiting]")
        expect(waiting).to_have_count(2)
        assert not server.calls()
        waiting.first.get_by_role("button", name="Always in this conversation").click()
        expect(chat.in_state("complete").locator("[data-call=done] .result").first).to_have_text("Paris: sunny")
        assert server.calls() == ["Paris", "Rome"]


def choose_tool(chat: ChatPage, name: str) -> None:
    """Choose a tool in the dialog of the conversation."""
    chat.page.get_by_role("button", name="Settings of this conversation").click()
    dialog = chat.page.get_by_role("dialog")
    dialog.get_by_label(name).check()
    look(chat.page, "dialog")
    dialog.get_by_role("button", name="Save", exact=True).click()
    expect(dialog).to_have_count(0)


def test_calls_from_the_settings_to_the_answer(tmp_path: Path, chromium: Browser, model: Path) -> None:
    calls = tmp_path / "calls.txt"
    with opened(chromium, tmp_path / "home", model, "--draft", "none") as app, app.window(path="/#/settings") as chat:
        page = chat.page
        add_server(page, "none", "no-such-command")
        failed = page.locator("[data-server=none]")
        expect(failed.get_by_role("alert")).to_have_text(
            "there is no command 'no-such-command'; give its path, or install it"
        )
        failed.get_by_role("button", name="Remove none").click()
        expect(failed).to_have_count(0)
        paste_weather_server(page, calls)
        expect(page.locator("[data-server=weather]")).to_contain_text("Tools: get_weather, storm")
        look(page, "settings")

        chat.new_chat()
        choose_tool(chat, "get_weather")
        chat.send("Weather?")
        waiting = chat.answers.last.locator("[data-call=waiting]")
        expect(waiting).to_have_count(2)
        expect(waiting.first.locator("pre")).to_have_text('{\n  "city": "Paris"\n}')
        expect(chat.answers.last.locator(".reasoning")).to_contain_text("Reasoning (3 words)")
        expect(chat.answers.last).to_contain_text("I look.")
        look(page, "waiting")
        assert not calls.exists()

        page.reload()  # the answer still waits
        waiting.first.get_by_role("button", name="Run").click()
        done = chat.answers.last.locator("[data-call=done]")
        expect(done.locator(".result")).to_have_text("Paris: sunny")
        waiting.get_by_role("button", name="Refuse").click()
        answer = chat.in_state("complete")
        expect(answer).to_contain_text("It is sunny in both.")
        expect(answer.locator("[data-call=refused]")).to_have_count(1)
        assert calls.read_text(encoding="utf-8") == "Paris\n"

        answer.get_by_role("button", name="Regenerate").click()
        expect(waiting).to_have_count(2)
        page.keyboard.press("Escape")  # stop works while the answer waits
        expect(chat.in_state("stopped").locator("[data-call=open]")).to_have_count(2)
        chat.answers.last.get_by_role("button", name="Continue").click()
        waiting.first.get_by_role("button", name="Always in this conversation").click()
        expect(chat.in_state("complete").locator("[data-call=done]")).to_have_count(2)
        page.get_by_role("button", name="Settings of this conversation").click()
        expect(page.get_by_role("dialog")).to_contain_text("called without asking")
        look(page, "allowed")
