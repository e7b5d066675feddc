"""Several models in one conversation, in a real browser: an answer of another one, and what each has done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import Browser, expect

from edgerun.edge.conversations.store import ConversationStore
from support.browser import AppServer, look
from support.chat_page import opened


def test_an_answer_is_regenerated_with_another_model(tmp_path: Path, chromium: Browser, tiny_bundle: Path) -> None:
    with ConversationStore(tmp_path / "conversations.sqlite3") as store:
        path = f"/#/c/{store.create(sampling={'max_tokens': 3}).id}"
    server = AppServer(tmp_path, [tiny_bundle], "--draft", "none")
    with server, opened(server, chromium) as app, app.window(path=path) as chat:
        page = chat.page
        chat.send("list files")
        first = chat.in_state("length")
        expect(first.locator(".message-name")).to_have_text("bundle")
        chat.more(first, "Regenerate with another model …")
        choices = page.get_by_role("dialog", name="Regenerate with").locator("li")
        expect(choices).to_have_count(1)
        look(page, "another-model")
        choices.get_by_role("button", name=re.compile("shell-helper")).click()
        second = chat.answers.last
        expect(second.locator(".message-name")).to_have_text("shell-helper")
        expect(second).to_have_attribute("data-state", re.compile("complete|length"))
        expect(second.locator(".branches")).to_contain_text("2 / 2")
        look(page, "another-answer")
        second.get_by_role("button", name="Previous branch").click()
        expect(first.locator(".message-name")).to_have_text("bundle")
        chat.send("and hidden ones")  # the conversation still has its own model
        expect(chat.answers).to_have_count(2)
        expect(chat.in_state("length").locator(".message-name")).to_have_text("bundle")

        page.keyboard.press("Control+,")
        use = page.get_by_role("region", name="Use of the models").get_by_role("row")
        expect(use).to_have_count(4)
        expect(use.filter(has_text="bundle").get_by_role("cell").first).to_have_text("2")
        expect(use.filter(has_text="shell-helper").get_by_role("cell").first).to_have_text("1")
        expect(use.last).to_have_text(re.compile(r"^Total3\d+"))
        use.last.scroll_into_view_if_needed()
        look(page, "usage")
