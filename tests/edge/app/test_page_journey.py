"""A day with the app, in a real browser, from its first start to the import of everything on another machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the app extra")
pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import Browser, Locator, expect

from support.browser import AppServer, browser, browser_page
from support.chat_page import ChatPage, opened
from support.hub_fixture import own_hub
from support.hub_server import HubServer, files_of

QUESTION = "find files larger than 100 MB"


def shown_texts(chat: ChatPage) -> list[str]:
    """The messages of the conversation that is shown, once none is being written."""
    expect(chat.page.locator('[data-message][data-state="writing"]')).to_have_count(0)
    # Until the page knows its models, the bundled model's commands are Markdown and not code.
    expect(chat.answers.first.locator(".md pre")).to_be_visible()
    return [text.strip() for text in chat.page.locator(".user-text, .message .md").all_inner_texts()]


def branch_mark(message: Locator, at: int, of: int) -> None:
    """Check which of a message's branches is shown."""
    expect(message.locator(".branches")).to_contain_text(f"{at} / {of}")


def use_model(chat: ChatPage, index: int) -> None:
    """Let another of the app's models answer in the conversation that is shown."""
    status = chat.page.evaluate(
        """async ([conversation, index]) => {
          const { models } = await (await fetch("/api/state")).json();
          const answer = await fetch(`/api/conversations/${conversation}`, {
            method: "PATCH",
            headers: { "content-type": "application/json" },
            body: JSON.stringify({ model: models[index].id }),
          });
          return answer.status;
        }""",
        [chat.id(), index],
    )
    assert status == 200


def morning(chat: ChatPage) -> None:
    """First start, a question, an answer again, an edit that branches, a branch at a token."""
    page = chat.page
    expect(page.locator(".welcome")).to_contain_text("everything stays on this machine")
    first = chat.ask(QUESTION)
    first.get_by_role("button", name="Regenerate").click()
    branch_mark(chat.answers.last, 2, 2)
    chat.in_state("complete")
    chat.ask("list all folders")
    question = chat.messages.first
    question.hover()
    question.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Text of the message").fill("find files larger than 5 MB")
    page.get_by_role("button", name="Save as branch and answer").click()
    branch_mark(question, 2, 2)
    expect(chat.messages).to_have_count(2)
    answer = chat.in_state("complete")

    answer.get_by_role("button", name="Look inside").click()
    tokens = answer.get_by_role("listbox", name="Tokens of the answer")
    expect(tokens.locator(".token").nth(2)).to_be_visible()
    before = tokens.locator(".token").all_text_contents()[:2]
    tokens.focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    other = page.locator(".token-alternative:enabled").first
    chosen = other.locator("code").inner_text().replace("·", " ")
    other.click()
    branch_mark(answer, 2, 2)
    expect(chat.answers.last).to_have_attribute("data-state", "complete")
    answer.get_by_role("button", name="Look inside").click()
    expect(tokens.locator(".is-chosen")).to_have_text(chosen)
    assert tokens.locator(".token").all_text_contents()[:2] == before
    answer.get_by_role("button", name="Look inside").click()
    question.get_by_role("button", name="Previous branch").click()
    expect(chat.messages).to_have_count(4)
    question.get_by_role("button", name="Next branch").click()
    branch_mark(answer, 2, 2)


def noon(chat: ChatPage) -> None:
    """An answer that does not end by itself is stopped, continued, and stopped again."""
    chat.new_chat()
    chat.ask("show the date")
    use_model(chat, 1)
    for end in ("Escape", "button"):
        if end == "Escape":
            chat.send("say something long")
            expect(chat.answers).to_have_count(2)
        else:
            chat.answers.last.get_by_role("button", name="Continue").click()
        chat.begun()
        if end == "Escape":
            chat.page.keyboard.press("Escape")
        else:
            chat.page.get_by_role("button", name="Stop the answer (Esc)").click()
        chat.in_state("stopped")
    use_model(chat, 0)
    chat.ask("print the current folder")
    expect(chat.messages).to_have_count(6)


def download(chat: ChatPage, hub: HubServer) -> None:
    """A download is cancelled half-way, and begun again to its end."""
    page = chat.page
    page.get_by_role("link", name="Models").click()
    card = page.locator('[data-download="acme/Tiny-Chat"]')

    def begin() -> None:
        page.get_by_label("Another model of the hub").fill("acme/Tiny-Chat")
        page.get_by_role("button", name="Download", exact=True).click()

    hub.faults.stall["model.onnx.data"] = 200_000
    begin()
    expect(card.get_by_role("progressbar")).to_have_attribute("max", re.compile(r"\d{4,}"))
    card.get_by_role("button", name="Cancel").click()
    expect(card).to_have_count(0)
    hub.faults.stall.clear()
    hub.faults.go_on.set()
    begin()
    expect(page.locator('[data-model="acme/Tiny-Chat"]')).to_be_visible()
    chat.row("show the date").click()
    expect(chat.messages).to_have_count(6)


def afternoon(chat: ChatPage, other: ChatPage) -> None:
    """Two windows on one conversation; search; a conversation is deleted and comes back."""
    other.row("show the date").click()
    expect(other.messages).to_have_count(6)
    other.ask("count the lines of notes.txt")
    expect(chat.messages).to_have_count(8)
    chat.in_state("complete")
    assert shown_texts(chat) == shown_texts(other)
    other.menu("show the date", "Rename …")
    other.page.get_by_role("dialog").get_by_role("textbox").fill("Dates")
    other.page.keyboard.press("Enter")
    expect(chat.page.get_by_role("heading", level=1)).to_have_text("Dates")

    chat.page.keyboard.press("Control+K")
    chat.page.get_by_role("combobox", name="Words to search for").fill("larger than 100")
    chat.page.get_by_role("option").filter(has_text="100 MB").first.click()
    expect(chat.page.get_by_role("heading", level=1)).to_have_text(QUESTION)
    chat.menu("Dates", "Delete")
    expect(other.row("Dates")).to_have_count(0)
    chat.notice.get_by_role("button", name="Undo").click()
    expect(other.row("Dates")).to_be_visible()
    other.row("Dates").click()
    expect(other.messages).to_have_count(8)


def exported(chat: ChatPage, folder: Path) -> Path:
    """Everything, as a file."""
    chat.page.get_by_role("link", name="Settings").click()
    with chat.page.expect_download() as downloading:
        chat.page.get_by_role("link", name="Export all conversations").click()
    file = folder / downloading.value.suggested_filename
    downloading.value.save_as(file)
    return file


@pytest.mark.nightly
def test_a_day_with_the_app(tmp_path: Path, tiny_bundle: Path, endless_bundle: Path) -> None:
    home, models = tmp_path / "home", ("shell-helper", endless_bundle)
    with own_hub(tmp_path / "hub") as hub, browser() as chromium:
        hub.repo("acme/Tiny-Chat", files_of(tiny_bundle))
        with AppServer(home, models) as server, browser_page(server.open_url, within=chromium) as window:
            chat = ChatPage(window.page)
            morning(chat)
            noon(chat)
            download(chat, hub)
            session = window.page.context.storage_state()
            with browser_page(server.base, within=chromium, storage_state=session) as second:
                other = ChatPage(second.page)
                afternoon(chat, other)
                texts = shown_texts(other)
            port = server.base.rpartition(":")[2]
            chat.row("Dates").click()
            expect(chat.messages).to_have_count(8)
            chat.composer.fill("to be continued")
            server.kill()
            banner = chat.page.get_by_role("alert").filter(has_text="The edge-run app has ended")
            expect(banner).to_be_visible()
            with AppServer(home, models, "--port", port):
                evening(window.page.url, chat, banner, texts)
                window.errors.clear()  # the browser reports every connection that failed
                file = exported(chat, tmp_path)
        another_machine(tmp_path / "other", file, texts, chromium)


def evening(url: str, chat: ChatPage, banner: Locator, texts: list[str]) -> None:
    """The app was killed and has started again: nothing is lost."""
    expect(banner).to_have_count(0)
    assert chat.page.url == url
    assert shown_texts(chat) == texts
    expect(chat.composer).to_have_value("to be continued")
    chat.page.reload()
    expect(chat.messages).to_have_count(8)
    assert shown_texts(chat) == texts
    chat.row(QUESTION).click()
    branch_mark(chat.messages.first, 2, 2)
    branch_mark(chat.answers.last, 2, 2)


def another_machine(home: Path, file: Path, texts: list[str], chromium: Browser) -> None:
    """The exported file, in an app that has never run."""
    assert len(json.loads(file.read_bytes())["conversations"]) == 2
    with AppServer(home) as server, opened(server, chromium) as app, app.window(path="/#/settings") as chat:
        chat.imported_files.set_input_files(file)
        expect(chat.notice.filter(has_text="Imported 2 conversations")).to_be_visible()
        chat.row("Dates").click()
        expect(chat.messages).to_have_count(8)
        assert shown_texts(chat) == texts
        chat.row(QUESTION).click()
        branch_mark(chat.messages.first, 2, 2)
        chat.ask("show the date")
