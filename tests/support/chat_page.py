"""The app's page in a browser: what its users do, and what they see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, StorageState, StorageStateCookie, expect

from support.app_server import RunningApp, running_app
from support.browser import browser_page


class ChatPage:
    """A window with the chat app.

    Args:
        page: the window.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.composer = page.get_by_role("textbox", name="Message", exact=True)
        self.messages = page.locator("[data-message]")
        self.answers = page.locator(".message.assistant")
        self.notice = page.locator(".notice")
        self.rows = page.locator("a.row-link")
        # Named by their labels: while a view is being replaced, the input of the old one is still on the page.
        self.attached_files = page.locator("input[type=file][aria-label='Attach files']")
        self.imported_files = page.locator("input[type=file][aria-label='Import …']")

    def send(self, text: str) -> None:
        """Write a message and send it by Enter; waits until it is sent, since no other can be sent before."""
        self.composer.fill(text)
        self.composer.press("Enter")
        expect(self.composer).to_have_value("")

    def ask(self, text: str) -> Locator:
        """Send a message and wait until its answer is finished; returns the answer."""
        before = self.answers.count()
        self.send(text)
        expect(self.answers).to_have_count(before + 1)
        return self.in_state("complete")

    def in_state(self, state: str) -> Locator:
        """The last answer, once it has a state."""
        answer = self.answers.last
        expect(answer).to_have_attribute("data-state", state)
        return answer

    def begun(self) -> Locator:
        """The last answer, once it has text and is still being written."""
        answer = self.answers.last
        expect(answer.locator(".md")).not_to_be_empty()
        expect(answer).to_have_attribute("data-state", "writing")
        return answer

    def new_chat(self) -> None:
        """Go to a new chat."""
        self.page.get_by_role("button", name="New chat").click()
        expect(self.page.get_by_role("heading", level=1)).to_have_text("New chat")

    def menu(self, title: str, item: str) -> None:
        """Choose an item of a conversation's menu in the sidebar."""
        self.row(title).hover()
        self.page.get_by_role("button", name=f"Actions for {title}", exact=True).click()
        self.page.get_by_role("menuitem", name=item).click()

    def more(self, answer: Locator, item: str) -> None:
        """Choose an item of an answer's menu."""
        answer.get_by_role("button", name="More actions").click()
        self.page.get_by_role("menuitem", name=item).click()

    def row(self, title: str) -> Locator:
        """The link to a conversation in the sidebar."""
        return self.page.get_by_role("link", name=title, exact=True)

    def id(self) -> str:
        """Id of the conversation that is shown."""
        return self.page.url.partition("#/c/")[2]


@dataclass
class OpenedApp:
    """An app and the session of a browser in it, so that several windows can be opened."""

    server: RunningApp
    browser: Browser
    session: StorageState

    @contextmanager
    def window(self, *, size: tuple[int, int] = (1280, 800), path: str = "/") -> Iterator[ChatPage]:
        """Open a window in a fresh profile that is let in."""
        with browser_page(
            self.server.base + path, within=self.browser, size=size, storage_state=self.session
        ) as window:
            yield ChatPage(window.page)


@contextmanager
def opened(browser: Browser, home: Path, *arguments: str | Path) -> Iterator[OpenedApp]:
    """Run an app, and use its one-time token; arguments as for `running_app`."""
    with running_app(home, *arguments) as app:
        with app.entered() as client:
            ((name, value),) = client.cookies.items()
        cookie: StorageStateCookie = {"name": name, "value": value, "domain": "127.0.0.1", "path": "/"}
        yield OpenedApp(app, browser, {"cookies": [cookie]})
