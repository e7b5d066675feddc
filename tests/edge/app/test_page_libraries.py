"""The page's libraries in a real browser, under the page's Content-Security-Policy."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright", reason="needs a browser")

from playwright.sync_api import Browser

from support.browser import browser_page
from support.page_server import page_server

LIBRARIES = """
import { html, render, useState } from "edgerun/preact";
import { Marked } from "marked";
import DOMPurify from "dompurify";
import hljs from "highlight.js/core";
import python from "highlight.js/languages/python.min.js";
import temml from "temml";

hljs.registerLanguage("python", python);
function Counter() {
  const [count, setCount] = useState(0);
  return html`<button onClick=${() => setCount(count + 1)}>${count} clicks</button>`;
}
render(html`<${Counter} />`, document.getElementById("root"));
document.body.append(DOMPurify.sanitize('<b id="kept">bold<iframe></iframe></b>', { RETURN_DOM_FRAGMENT: true }));
const math = document.createElement("p");
temml.render("x^2", math);
document.body.append(math);
window.seen = {
  tokens: new Marked().lexer("# a").map((token) => token.type),
  code: hljs.highlight("def f(): pass", { language: "python" }).value,
};
"""


def test_every_library_works_under_the_policy(chromium: Browser) -> None:
    with page_server(LIBRARIES) as address, browser_page(address, within=chromium) as window:
        window.page.get_by_role("button", name="0 clicks").click()
        window.page.get_by_role("button", name="1 clicks").wait_for()
        assert window.page.locator("#kept").evaluate("element => element.outerHTML") == '<b id="kept">bold</b>'
        assert window.page.locator("math msup").count() == 1
        seen = window.page.evaluate("window.seen")
        assert seen["tokens"] == ["heading"]
        assert "hljs-keyword" in seen["code"]


FAULTS = {
    "new Image().src = 'http://elsewhere.example/pixel.png'": "elsewhere.example/pixel",
    "fetch('https://elsewhere.example/').catch(() => 0)": "https://elsewhere.example/",
    "throw new Error('deliberate')": "deliberate",
    "console.error('said')": "said",
    "document.body.setAttribute('onclick', 'x()'); document.body.click()": "inline event handler violates",
}


@pytest.mark.parametrize(("script", "fault"), FAULTS.items())
def test_a_window_tells_what_went_wrong(chromium: Browser, script: str, fault: str) -> None:
    with (
        page_server(script) as address,
        pytest.raises(AssertionError, match=fault),
        browser_page(address, within=chromium) as window,
    ):
        window.page.wait_for_load_state("networkidle")
