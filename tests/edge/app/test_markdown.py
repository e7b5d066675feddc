"""Markdown of answers in a real browser: what is made of it, and what is made again while it grows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, expect

from support.browser import BrowserPage, browser_page
from support.page_server import page_server

SHOW = """
import { html, options, render } from "edgerun/preact";
import { Markdown } from "/page/markdown.js";
const root = document.getElementById("root");
const made = {};
// What Preact's own hooks are called through before a component renders.
const before = options.__r;
options.__r = (node) => {
  made[node.type.name] = (made[node.type.name] ?? 0) + 1;
  before?.(node);
};
window.show = (text, writing = false) => {
  for (const name of Object.keys(made)) delete made[name];
  render(html`<${Markdown} text=${text} writing=${writing} />`, root);
  return { ...made };
};
"""


@pytest.fixture(scope="module")
def window(chromium: Browser) -> Iterator[BrowserPage]:
    permissions = ["clipboard-read", "clipboard-write"]
    with page_server(SHOW) as address, browser_page(address, within=chromium, permissions=permissions) as page:
        page.page.wait_for_function("() => Boolean(window.show)")
        yield page


def shown(window: BrowserPage, text: str, writing: bool = False) -> Locator:
    """What is made of a text."""
    window.page.evaluate("([text, writing]) => window.show(text, writing)", [text, writing])
    return window.page.locator(".md")


def made(window: BrowserPage, text: str, writing: bool = True) -> dict[str, Any]:
    """How many components of each kind were rendered for a text, Preact's own fragments aside."""
    counts = window.page.evaluate("([text, writing]) => window.show(text, writing)", [text, writing])
    return {name: count for name, count in counts.items() if name != "$"}


def test_markdown_becomes_elements(window: BrowserPage) -> None:
    for text, expected in (
        ("a *b* **c** ~~d~~ `e<f`", "<p>a <em>b</em> <strong>c</strong> <del>d</del> <code>e&lt;f</code></p>"),
        ("# one", '<h2 class="md-h1">one</h2>'),
        ("one\ntwo", "<p>one<br>two</p>"),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("> a", "<blockquote><p>a</p></blockquote>"),
        ("&copy; &amp;lt; &nosuch;", "<p>© &amp;lt; &amp;nosuch;</p>"),
        ("H<sub>2</sub>O<br>x<sup>2</sup>", "<p>H<sub>2</sub>O<br>x<sup>2</sup></p>"),
        ("---", "<hr>"),
    ):
        assert shown(window, text).locator(".md-block").inner_html() == expected
    for language, notes in (("Mermaid", ["Mermaid diagram, shown as text"]), ("python", [])):
        block = shown(window, f"```{language}\ngraph TD\n```\n").locator(".md-code")
        expect(block.locator(".md-note")).to_have_text(notes)
        expect(block.locator("pre")).to_have_text("graph TD")
    table = shown(window, "|a|b|\n|-|-:|\n|1|2|\n").get_by_role("table")
    assert table.get_by_role("columnheader").all_inner_texts() == ["a", "b"]
    assert table.get_by_role("cell", name="2").evaluate("cell => getComputedStyle(cell).textAlign") == "end"
    tasks = shown(window, "- [x] a\n- [ ] b").get_by_role("img")
    assert [task.get_attribute("aria-label") for task in tasks.all()] == ["done", "to do"]


def test_code_has_colours_a_language_and_a_copy_button(window: BrowserPage) -> None:
    box = shown(window, "```python\ndef f():\n    return 1\n```")
    box.locator(".hljs-keyword", has_text="return").wait_for()
    assert box.locator("pre").inner_text() == "def f():\n    return 1"
    assert box.get_by_text("python", exact=True).is_visible()
    # It says so for two seconds only, so the texts of the button are collected from before the click on.
    window.page.evaluate(
        """() => {
            const button = document.querySelector(".md-copy");
            window.texts = [];
            const look = () => window.texts.push(button.innerText);
            new MutationObserver(look).observe(button, { subtree: true, characterData: true, childList: true });
        }"""
    )
    box.get_by_role("button", name="Copy").click()
    window.page.wait_for_function("() => window.texts.includes('Copied')")
    assert window.page.evaluate("navigator.clipboard.readText()") == "def f():\n    return 1"


def test_formulas_become_mathml_and_prices_stay_text(window: BrowserPage) -> None:
    formulas = ("$x^2$", "$$x^2$$", r"\(x^2\)", r"\[x^2\]", "$$\nx^2\n$$", "\\[\nx^2\n\\]", "- $x^2$", "a $2^x$ b")
    for text in formulas:
        box = shown(window, text)
        box.locator("math msup").wait_for()
        assert "$" not in box.inner_text()
    prices = ("$5 and $6", "$5-$6", "US$5 and US$6", "$ 5 $", "$5, or 6$ with tax", r"\$x\$", "`$x$`", "$1 to $2, $3")
    for text in prices:
        assert shown(window, text).locator(".md-formula").count() == 0
    box = shown(window, r"$x^2$ $\frac{1}{$")  # a wrong one shows its source
    box.locator("math msup").wait_for()
    assert box.locator("code").inner_text() == r"\frac{1}{"


def test_unfinished_code_and_formulas_are_shown_as_such(window: BrowserPage) -> None:
    assert shown(window, "a\n```js\nlet x = 1", True).locator("pre").inner_text() == "let x = 1"
    assert shown(window, "a\n\n$$\nx +", True).locator(".md-unfinished code").inner_text() == "x +"
    assert shown(window, "a\n\n$$\nx +", False).locator(".md-unfinished").count() == 0


def test_a_text_that_grows_is_the_text_that_was_shown_at_once(window: BrowserPage) -> None:
    text = (
        "# One\ntext *a* $x$\n- a\n\n- b\n\n  more\n\n```py\nx = 1\n\ny = 2\n```\nafter\n\n"
        "1. a\n   ```\n   b\n\n   c\n   ```\n2. b\n\n"
        "$$\na\n$$\n\n|a|b|\n|-|-|\n|1|2|\n\n> q\n> r\n\nlast `x"
    )
    whole = shown(window, text, True).inner_text()
    shown(window, "", True)
    for end in range(len(text) + 1):
        window.page.evaluate("([text]) => window.show(text, true)", [text[:end]])
    assert window.page.locator(".md").inner_text() == whole
    assert len(window.page.locator(".md-block").all_inner_texts()) == 9


def test_a_delta_renders_the_last_block_alone(window: BrowserPage) -> None:
    text = "\n\n".join(f"Paragraph **{number}** with `code`." for number in range(200)) + "\n\nThe last"
    assert made(window, text)["Block"] > 1
    assert made(window, f"{text} one") == {"Markdown": 1, "Part": 1, "Block": 1}
    assert made(window, f"{text} one grows") == {"Markdown": 1, "Part": 1, "Block": 1}
    assert made(window, f"{text} one grows\n\nAnd ends")["Block"] <= 2


def test_a_long_block_is_not_parsed_at_every_delta(window: BrowserPage) -> None:
    rows = "|a|b|\n|-|-|\n" + "|one|two|\n" * 1200
    box = shown(window, rows, True)
    assert box.get_by_role("row").count() == 1201
    shown(window, f"{rows}|x|y|\n", True)
    assert box.get_by_role("row").count() == 1201
    assert "|x|y|" in box.inner_text()
    shown(window, f"{rows}|x|y|\n", False)
    assert box.get_by_role("row").count() == 1202


def test_links_open_apart_and_show_where_they_lead(window: BrowserPage) -> None:
    box = shown(
        window, "[a](https://one.example/x) [https://bank.example](https://evil.example/x) [b](mailto:c@d.example)"
    )
    first = box.get_by_role("link", name="a", exact=True)
    assert first.get_attribute("rel") == "noopener noreferrer nofollow"
    assert first.get_attribute("target") == "_blank"
    assert "(evil.example)" in box.inner_text()
    assert "one.example" not in box.inner_text()
    window.page.mouse.move(0, 0)  # away from any link
    first.focus()
    expect(box.locator(".md-address")).to_have_text("https://one.example/x")
    box.get_by_role("link", name="bank").hover()
    expect(box.locator(".md-address")).to_have_text("https://evil.example/x")
    window.page.mouse.move(0, 0)
    expect(box.locator(".md-address")).to_have_text("https://one.example/x")


def test_addresses_that_deceive_are_shown_and_others_are_text(window: BrowserPage) -> None:
    for text, host in (
        ("[google.com](https://google.com.evil.example/)", "google.com.evil.example"),
        ("[log in](https://google.com@evil.example/)", "evil.example"),
        ("[x](https://\u0430pple.com/)", "xn--pple-43d.com"),
        ("[help@bank.example](mailto:thief@evil.example)", "thief@evil.example"),
    ):
        assert f"({host})" in shown(window, text).inner_text()
    foreign = ("javascript:alert(1)", "data:text/html,x", "vbscript:x", "file:///etc", "blob:x")
    for address in (*foreign, "/api/state", "#/models"):
        box = shown(window, f"[here]({address}) <{address}>")
        assert box.locator("a").count() == 0
        assert f"here ({address})" in box.inner_text()


PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def test_only_images_that_the_answer_holds_are_shown(window: BrowserPage) -> None:
    box = shown(window, f"![dot]({PIXEL}) ![far](https://far.example/a.png) ![s](data:image/svg+xml;base64,PHN2Zy8+)")
    assert box.locator("img").count() == 1
    assert box.get_by_role("img", name="dot").evaluate("image => image.src") == PIXEL
    assert "far https://far.example/a.png (image not loaded)" in box.inner_text()
