"""The app's pages and dialogs have no serious fault that axe-core finds, in both themes and at the width of a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page

from edgerun.edge.conversations.store import ConversationStore
from support.app_server import running_app
from support.browser import BrowserPage, browser_page, look
from support.nightly import some_nightly

ANSWER = """# A heading

Text with *emphasis*, `code`, a [link](https://example.org) and a formula $x^2$.

## A smaller heading

- [x] done
- [ ] to do

> A quote

| a | b |
|---|--:|
| 1 | 2 |

```python
def double(x: int) -> int:  # a comment
    return 2 * x or "nothing"
```

```mermaid
graph TD
```

$$\\sum_{i=0}^n i$$

![picture](https://example.org/a.png)
"""


def at(path: str) -> Callable[[Page], None]:
    """The step that goes to a page."""
    return lambda page: page.evaluate("path => { location.hash = path }", path)


def pressing(keys: str) -> Callable[[Page], None]:
    """The step that opens a dialog by keys that are pressed outside of the composer."""

    def press(page: Page) -> None:
        page.evaluate("() => document.activeElement.blur()")
        page.keyboard.press(keys)

    return press


def opening(label: str, path: str | None = None) -> Callable[[Page], None]:
    """The step that opens a menu of a page; None is the conversation's."""

    def open_menu(page: Page) -> None:
        if path is not None:
            at(path)(page)
        page.get_by_role("button", name=label).last.click()

    return open_menu


def edit(page: Page) -> None:
    """The step that edits the last message."""
    page.locator(".message").last.focus()
    page.keyboard.press("e")


NOTICES = """async () => {
  const { notify } = await import("/page/store.js");
  notify({ text: "Deleted", action: { label: "Undo", run() {} } });
  notify({ text: "It has failed", kind: "error" });
}"""
HEADING = "h1:not(:text-is('A title'))"
"""The heading of another page than the conversation's."""
VIEWS: dict[str, tuple[Callable[[Page], None], str]] = {
    "conversation": (lambda page: None, ".message.assistant .md .hljs-comment"),
    "new chat": (at("#/"), ".welcome"),
    "menu of an answer": (opening("More actions"), "[role=menu]"),
    "edit box": (edit, ".editor"),
    "notices": (lambda page: page.evaluate(NOTICES), ".notice.error"),
    "settings": (at("#/settings"), HEADING),
    "models": (at("#/models"), HEADING),
    "exports": (at("#/exports"), HEADING),
    "comparison": (at("#/compare"), HEADING),
    "exactness": (at("#/exactness"), HEADING),
    "advanced pages": (opening("Advanced", "#/models"), "[role=menu]"),
    "shortcuts": (pressing("?"), "[role=dialog], dialog[open]"),
    "conversation settings": (pressing("Control+Shift+s"), "[role=dialog], dialog[open]"),
    "palette": (pressing("Control+k"), "[role=dialog], dialog[open]"),
}
"""How each view is opened, and what it shows then."""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Iterator[BrowserPage]:
    """A window of an app with one conversation, which is `window.conversation` of its scripts."""
    home = tmp_path_factory.mktemp("home")
    with ConversationStore(home / "conversations.sqlite3") as store:
        conversation = store.create(title="A title", folder="A folder").id
        question = store.add_message(conversation, None, "user", "question")
        store.add_message(conversation, question.id, "assistant", ANSWER)
    with running_app(home) as app, browser_page(app.url, within=chromium) as window:
        window.page.evaluate("id => { window.conversation = id }", conversation)
        yield window


@pytest.mark.parametrize("name", some_nightly(VIEWS, 3))
def test_axe_finds_no_serious_fault(window: BrowserPage, name: str) -> None:
    page = window.page
    page.evaluate("() => { location.hash = '#/c/' + window.conversation }")
    page.locator(".message.assistant .md .hljs-comment").wait_for()
    step, shown = VIEWS[name]
    step(page)
    page.locator(shown).first.wait_for()
    look(page, name)
    page.keyboard.press("Escape")
