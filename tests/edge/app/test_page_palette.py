"""The command palette of the page in a real browser: actions, conversations by title, and messages, by keys alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import Browser, Locator, Page, expect

from edgerun.edge.conversations.store import ConversationStore
from support.browser import AppServer, browser_page, look

ANSWER = "## Sizes\n\n- **Large** files: `<img src=x onerror=alert(1)>`\n- see `du -sh *.py`"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Iterator[Page]:
    """A window of an app with two conversations."""
    home = tmp_path_factory.mktemp("home")
    with ConversationStore(home / "conversations.sqlite3") as store:
        first = store.create(title="Disk usage").id
        question = store.add_message(first, None, "user", "What takes room?")
        store.add_message(first, question.id, "assistant", ANSWER)
        store.create(title="Models of clouds")
    with AppServer(home) as server, browser_page(server.open_url, within=chromium) as window:
        expect(window.page.get_by_role("link", name="Disk usage")).to_be_visible()
        yield window.page


def opened(page: Page, query: str) -> Locator:
    """Open the palette by its keys and type; returns its entries once the messages are known."""
    page.keyboard.press("Control+k")
    page.keyboard.type(query)
    expect(page.get_by_role("status").filter(has_text="ound")).to_be_visible()
    return page.get_by_role("option")


def test_entries_are_chosen_by_keys_alone(page: Page) -> None:
    page.keyboard.press("Control+k")
    entries = page.get_by_role("option")
    expect(entries.nth(0)).to_contain_text("Models of cloudsConversation")
    expect(entries.filter(has_text="New chat")).to_be_visible()
    look(page, "palette")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)

    entries = opened(page, "models")
    expect(entries).to_have_text(["ModelsAction", "Models of cloudsConversation"])
    page.keyboard.press("ArrowDown")
    expect(entries.nth(1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Models of clouds")

    opened(page, "models")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Models")
    opened(page, "keyb")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    for theme in ("dark", "light"):
        opened(page, "theme")
        page.keyboard.press("Enter")
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
    opened(page, "deleted conv")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Back to the conversations").click()


def test_messages_are_shown_without_marks_and_with_the_words_marked(page: Page) -> None:
    hit = opened(page, "large onerror")
    expect(hit).to_have_count(1)
    expect(hit.locator("span")).to_have_text("Sizes Large files: <img src=x onerror=alert(1)> see du -sh *.py")
    expect(hit.locator("span mark")).to_have_text(["Large", "onerror"])
    assert hit.locator("img").count() == 0
    look(page, "palette-messages")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant")).to_be_focused()
