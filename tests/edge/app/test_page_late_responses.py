"""The page in a real browser where responses arrive late: after newer events, or when the reader has moved on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import APIResponse, Browser, Page, Route, expect

from support.chat_page import OpenedApp, opened

QUESTION = "find files larger than 100 MB"


class Held:
    """The first request of a kind from now on: the app has answered it, and the page does not know."""

    def __init__(self, page: Page, method: str) -> None:
        self._page = page
        self._method = method
        self._routes: list[Route] = []
        self._responses: list[APIResponse] = []

    def take(self, route: Route) -> None:
        """Hold the first request, and let others go on."""
        if route.request.method != self._method or self._routes:
            route.fallback()
            return
        self._routes.append(route)
        self._responses.append(route.fetch())

    def wait(self) -> None:
        """Wait until the app has answered the request."""
        while not self._responses:
            self._page.wait_for_timeout(10)  # lets the browser's events come in

    def deliver(self) -> None:
        """Let the page have the response, and return when it has seen it."""
        self.wait()
        route = self._routes[0]
        with self._page.expect_response(lambda response: response.request == route.request):
            route.fulfill(response=self._responses[0])
        self._page.evaluate("() => new Promise((resolve) => setTimeout(() => requestAnimationFrame(resolve)))")


@contextmanager
def holding(page: Page, address: str, method: str = "GET") -> Iterator[Held]:
    """Hold the response to the first request to an address within the block."""
    held = Held(page, method)
    page.route(address, held.take)
    try:
        yield held
    finally:
        page.unroute(address)


@contextmanager
def loading_again(page: Page, address: str) -> Iterator[Held]:
    """Load the page again within the block, and hold its first request to an address; none of the page before is."""
    shown = page.url
    page.goto("about:blank")
    with holding(page, address) as held:
        page.goto(shown)
        yield held


def test_a_reader_who_types_or_goes_elsewhere_while_a_message_is_under_way_stays_there(bundled: OpenedApp) -> None:
    with bundled.window() as chat:
        chat.ask(QUESTION)
        with holding(chat.page, "**/messages", "POST") as held:
            chat.composer.fill("list all folders")
            chat.composer.press("Enter")
            expect(chat.messages).to_have_count(4)
            chat.page.keyboard.type("show the date")
            held.deliver()
        expect(chat.composer).to_have_value("show the date")
        chat.in_state("complete")
        with holding(chat.page, "**/messages", "POST") as held:
            chat.composer.press("Enter")
            expect(chat.messages).to_have_count(6)
            expect(chat.messages.nth(4)).to_contain_text("show the date")
            chat.new_chat()
            chat.composer.fill("half a thought")
            held.deliver()
        expect(chat.composer).to_have_value("half a thought")
        expect(chat.page.get_by_role("heading", level=1)).to_have_text("New chat")
        chat.row(QUESTION).click()
        expect(chat.messages).to_have_count(6)
        expect(chat.composer).to_have_value("")


def test_an_answer_that_ends_while_its_conversation_is_fetched_has_ended(
    tmp_path: Path, chromium: Browser, endless_bundle: Path
) -> None:
    with (
        opened(chromium, tmp_path, endless_bundle, "--draft", "none") as app,
        app.window() as chat,
        app.window() as other,
    ):
        chat.send("hello")
        chat.begun()
        with loading_again(chat.page, f"**/api/conversations/{chat.id()}") as held:
            expect(chat.page.locator(".writing-dot")).to_be_visible()
            other.page.goto(chat.page.url)
            other.page.get_by_role("button", name="Stop the answer (Esc)").click()
            other.in_state("stopped")
            expect(chat.page.locator(".writing-dot")).to_have_count(0)
            held.deliver()
        chat.in_state("stopped")
        expect(chat.page.locator(".writing-dot")).to_have_count(0)


def test_a_conversation_that_begins_while_the_list_is_fetched_is_listed(bundled: OpenedApp) -> None:
    with bundled.window() as chat:
        with loading_again(chat.page, "**/api/conversations?deleted=0") as held:
            chat.ask("count the lines")
            held.deliver()
            expect(chat.row("count the lines")).to_be_visible()
            expect(chat.page.get_by_role("heading", level=1)).to_have_text("count the lines")
        # Keys work from the first frame on.
        chat.page.add_init_script(
            """new MutationObserver((_, observer) => {
                if (!document.querySelector(".composer")) return;
                observer.disconnect();
                window.dispatchEvent(new KeyboardEvent("keydown", { key: "k", ctrlKey: true }));
            }).observe(document, { childList: true, subtree: true });"""
        )
        chat.page.reload()
        expect(chat.page.get_by_role("combobox", name="Words to search for")).to_be_visible()


def test_a_setting_that_changes_while_the_state_is_fetched_stays_changed(bundled: OpenedApp) -> None:
    with bundled.window(path="/#/settings") as one, bundled.window(path="/#/settings") as two:
        expect(one.page.get_by_label("As the system")).to_be_checked()
        with holding(one.page, "**/api/state") as held:
            with one.page.expect_request("**/api/state"):
                two.page.get_by_label("Show statistics under answers").uncheck()
            held.wait()
            one.page.get_by_label("Dark").check()
            held.deliver()
            expect(one.page.locator("html")).to_have_attribute("data-theme", "dark", timeout=1)
        # A response that a later one has overtaken.
        theme = one.page.locator("html")
        expect(two.page.locator("html")).to_have_attribute("data-theme", "dark")
        with holding(one.page, "**/api/state") as held:
            two.page.get_by_label("Light").check()
            held.wait()
            two.page.get_by_label("As the system").check()
            expect(theme).not_to_have_attribute("data-theme", "dark")
            two.page.get_by_label("Dark").check()
            expect(theme).to_have_attribute("data-theme", "dark")
            held.deliver()
            expect(theme).to_have_attribute("data-theme", "dark", timeout=1)


def test_a_list_of_deleted_conversations_that_was_hidden_stays_hidden(bundled: OpenedApp) -> None:
    with bundled.window() as one, bundled.window() as two:
        one.ask("show the kernel version")
        deleted = one.page.get_by_role("button", name="Deleted", exact=True)
        deleted.click()
        expect(deleted).to_have_attribute("aria-pressed", "true")
        # The list is asked for again while it is shown, and answered when it is not.
        with holding(one.page, "**/api/conversations?deleted=*") as held:
            two.menu("show the kernel version", "Delete")
            held.wait()
            deleted.click()
            expect(deleted).to_have_attribute("aria-pressed", "false")
            held.deliver()
        expect(deleted).to_have_attribute("aria-pressed", "false")
