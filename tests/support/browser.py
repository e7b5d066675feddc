"""A real browser, its windows, and what goes wrong in them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect, sync_playwright

PATIENCE_S = 120.0
"""Limit of every wait, far above what it takes."""
expect.set_options(timeout=PATIENCE_S * 1000)
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    # Containers run as root and have a small /dev/shm.
    "--no-sandbox",
    "--disable-dev-shm-usage",
    # A picture of its own instead of the camera's.
    "--use-fake-device-for-media-stream",
    # Every frame of an animation is drawn by the processor.
    "--force-prefers-reduced-motion",
    # Nothing reaches the network, also when a test fails: a request to another host is recorded and then fails.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
    # The pages of the address bar's suggestions cost each window more time than the page that is tested. The last list
    # of features is the one that counts, so it repeats what playwright switches off and a local page could notice.
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,HttpsUpgrades,DestroyProfileOnBrowserClose,"
    "MediaRouter,OptimizationHints",
)


def chromium_path() -> str:
    """Where chromium is; the test is skipped where there is none, unless EDGERUN_BROWSER=1."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        if os.environ.get("EDGERUN_BROWSER") == "1":
            raise FileNotFoundError("EDGERUN_BROWSER=1, and no chromium is installed")
        pytest.skip("needs chromium")
    return found


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, which is used within blocks of `in_use`; a process has one, with any number of pages."""
    path = chromium_path()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        asyncio._set_running_loop(None)
        try:
            yield chromium
        finally:
            with in_use(chromium):
                chromium.close()
                playwright.stop()


@contextmanager
def in_use(chromium: Browser) -> Iterator[Browser]:
    """Let playwright's event loop count as running within the block; `asyncio.run` refuses to run while one does."""
    asyncio._set_running_loop(chromium._loop)
    try:
        yield chromium
    finally:
        asyncio._set_running_loop(None)


@dataclass
class BrowserPage:
    """A window of the browser, and what went wrong in it."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """Console errors and uncaught exceptions; a test that provokes some clears them."""
    foreign: list[str] = field(default_factory=list)
    """Requests that left the origin."""

    def assert_quiet(self) -> None:
        """Fail if there was an error, or a request to another origin."""
        assert not self.foreign, f"requests left the origin: {self.foreign}"
        assert not self.errors, f"errors in the browser: {self.errors}"


@contextmanager
def browser_page(
    base_url: str,
    *,
    within: Browser,
    size: tuple[int, int] = (1280, 800),
    **options: Any,
) -> Iterator[BrowserPage]:
    """Open an address in a fresh profile; at the end of the block, errors and foreign requests fail the test.

    Args:
        base_url: the address to open; its origin is the only one that requests may go to.
        within: the browser.
        size: width and height of the window, in CSS pixels.
        **options: those of playwright's `Browser.new_context`, such as `color_scheme="dark"`.
    """
    width, height = size
    context = within.new_context(viewport={"width": width, "height": height}, **options)
    try:
        context.set_default_timeout(PATIENCE_S * 1000)
        window = BrowserPage(context.new_page())
        _record(context, window, urlsplit(base_url))
        window.page.goto(base_url)
        yield window
        window.assert_quiet()
    finally:
        context.close()


def _record(context: BrowserContext, window: BrowserPage, origin: Any) -> None:
    def requested(request: Request) -> None:
        address = urlsplit(request.url)
        local = address.scheme in {"data", "blob", "about"}
        if not local and (address.scheme, address.netloc) != (origin.scheme, origin.netloc):
            window.foreign.append(request.url)

    def said(message: ConsoleMessage) -> None:
        if message.type == "error":
            window.errors.append(f"{message.text} ({message.location.get('url', '')})")

    context.on("request", requested)
    context.on("console", said)
    context.on("weberror", lambda error: window.errors.append(str(error.error)))


_COLOURS: Final = ["color-contrast", "link-in-text-block"]
"""Rules of axe-core that a colour scheme can break; schemes differ in nothing else."""


def look(page: Page, name: str) -> None:
    """Check a view by axe-core in two widths and colour schemes; EDGERUN_PICTURES may name a folder for pictures."""
    size = page.viewport_size or {"width": 1280, "height": 800}
    page.evaluate(Axe().axe_script)
    for width, scheme in product((1280, 390), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=scheme)
        # Colours that are still changing would be measured in between. Animations of elements that are replaced
        # meanwhile never finish, and are rejected.
        page.evaluate(
            """() => Promise.allSettled(document.getAnimations()
                .filter((animation) => animation.effect.getComputedTiming().iterations < Infinity)
                .map((animation) => animation.finished))"""
        )
        options = {"resultTypes": ["violations"]} | ({"runOnly": _COLOURS} if scheme == "dark" else {})
        violations = page.evaluate("(options) => axe.run(options)", options)["violations"]
        found = [each for each in violations if each["impact"] in {"serious", "critical"}]
        faults = [f"{fault['id']} {node['html'][:150]}" for fault in found for node in fault["nodes"]]
        assert faults == [], (scheme, width)
        if folder := os.environ.get("EDGERUN_PICTURES"):
            page.screenshot(path=f"{folder}/{name}-{scheme}-{width}.png")
    page.emulate_media(color_scheme="null")
    page.set_viewport_size(size)
