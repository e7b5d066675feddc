"""The page's libraries in a real browser, under the page's Content-Security-Policy."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright", reason="needs a browser")

from playwright.sync_api import Browser

from support.browser import browser_page
from support.page_server import page_server

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
