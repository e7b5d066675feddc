"""Hostile answers in the app's page: nothing runs, nothing leaves the origin, nothing shows outside of the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from edgerun.edge.conversations.store import ConversationStore
from support.app_server import running_app
from support.browser import BrowserPage, browser_page
from support.hostile_answers import LARGE, MARKUP
from support.nightly import some_nightly
from support.page_server import page_server

LAYOUT = """() => {
  // Beside the messages, what differs by conversation: which one is chosen in the list, and how full its context is.
  const inside = ".scroller, .conversations, .meter, .composer-hint";
  const boxes = [...document.querySelectorAll("#app *")].filter((element) => !element.closest(inside));
  return {
    title: document.title, base: document.baseURI.split("#")[0], attacked: window.attacked ?? false,
    boxes: boxes.map((element) =>
      element.tagName + " " + Object.values(element.getBoundingClientRect().toJSON()).map(Math.round).join(" ")),
    ids: document.querySelectorAll("#app").length,
  };
}"""
"""What is shown around the messages, and traces of a script that ran."""
ESCAPED = """() => {
  const allowed = new Set(
    ("a bdi blockquote br button code del div em h2 h3 h4 h5 h6 hr img kbd li ol p pre span strong sub sup table " +
      "tbody td th thead tr ul").split(" "));
  const found = [];
  for (const element of document.querySelectorAll(".message.assistant .md *")) {
    const inFormula = element.closest("math");
    if (!inFormula && !allowed.has(element.localName)) found.push(element.localName);
    for (const name of element.getAttributeNames()) {
      const never = /^(on.*|id|srcdoc|action|name)$/.test(name) || (name === "style" && !inFormula);
      const address = /^(href|src)$/.test(name);
      if (never || (address && !/^(https?:|mailto:|data:image[/](png|jpeg|gif|webp);)/.test(element[name])))
        found.push(`${element.localName} ${name}`);
    }
  }
  return found;
}"""
"""Elements and attributes of the answer that no Markdown makes."""


def stored(home: Path, answers: Mapping[str, str]) -> dict[str, str]:
    """Write a conversation for each answer into a data folder, and return their ids."""
    store = ConversationStore(home / "conversations.sqlite3")
    ids = {}
    for name, text in answers.items():
        # All have the same title, since the page around them has to stay the same.
        ids[name] = store.create(title="Title").id
        question = store.add_message(ids[name], None, "user", "question")
        store.add_message(ids[name], question.id, "assistant", text)
    store.close()
    return ids


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The app's data folder."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def ids(home: Path) -> dict[str, str]:
    """Ids of conversations with hostile answers, and one with a harmless one."""
    return stored(home, {"harmless": "text", **MARKUP})


@pytest.fixture(scope="module")
def window(home: Path, chromium: Browser) -> Iterator[BrowserPage]:
    with running_app(home) as app, browser_page(app.url, within=chromium) as window:
        yield window


def opened(window: BrowserPage, conversation: str) -> Any:
    """The layout around the messages of a conversation, once these are shown."""
    page = window.page
    page.evaluate("id => { location.hash = '#/c/' + id }", conversation)
    expect(page.locator(".message.assistant .md")).to_have_count(1, timeout=60_000)
    page.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    return page.evaluate(LAYOUT)


def test_hostile_markup_does_nothing(window: BrowserPage, ids: dict[str, str]) -> None:
    reference = opened(window, ids["harmless"])
    found = {}
    for name in MARKUP:
        layout = opened(window, ids[name])
        found[name] = [key for key in reference if layout[key] != reference[key]] + window.page.evaluate(ESCAPED)
    assert {name: faults for name, faults in found.items() if faults} == {}
    window.page.wait_for_load_state("networkidle")
    window.assert_quiet()


def test_hostile_markup_is_clipped_to_its_message(window: BrowserPage, ids: dict[str, str]) -> None:
    for name in ("marks", "formulas", "directions"):
        opened(window, ids[name])
        box = window.page.locator(".message.assistant .md")
        assert "paint" in box.evaluate("box => getComputedStyle(box).contain.replace('content', 'layout paint style')")
        assert box.evaluate("box => getComputedStyle(box).isolation") == "isolate"
        assert window.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("name", some_nightly(LARGE, 7))
def test_large_answers_leave_the_page_usable(window: BrowserPage, home: Path, name: str) -> None:
    opened(window, stored(home, {name: LARGE[name]})[name])
    composer = window.page.get_by_role("textbox", name="Message", exact=True)
    composer.fill("still here")
    expect(composer).to_have_value("still here")
    composer.fill("")
    assert window.page.evaluate("document.querySelectorAll('.md *').length") < 60_000
    window.assert_quiet()


def test_a_link_of_an_answer_opens_without_the_page(window: BrowserPage, ids: dict[str, str]) -> None:
    opened(window, ids["titles"])
    link = window.page.locator(".md a").first
    with window.page.context.expect_page() as popup:
        link.click()
    assert popup.value.evaluate("window.opener") is None
    popup.value.close()
    # That the reader's click goes to another host is what was asked for.
    assert all("evil.example" in address for address in window.foreign)
    window.foreign.clear()
    window.errors.clear()


FAULTS = {
    "new Image().src = 'http://elsewhere.example/pixel.png'": "elsewhere.example/pixel",
    "fetch('https://elsewhere.example/').catch(() => 0)": "https://elsewhere.example/",
    "throw new Error('deliberate')": "deliberate",
    "console.error('said')": "said",
    "document.body.setAttribute('onclick', 'x()'); document.body.click()": "inline event handler violates",
}


def test_a_window_tells_what_went_wrong(chromium: Browser) -> None:
    for script, fault in FAULTS.items():
        with (
            page_server(script) as address,
            pytest.raises(AssertionError, match=fault),
            browser_page(address, within=chromium) as window,
        ):
            window.page.wait_for_load_state("networkidle")
