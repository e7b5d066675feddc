"""Apps that several tests use, and the browser that opens them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

pytest.importorskip("starlette", reason="needs the app extra")
pytest.importorskip("support.tiny_models", reason="needs the export extra")

from support.app_server import RunningApp, Window, running_app, window

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from support.chat_page import ChatPage, OpenedApp


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path) -> Iterator[RunningApp]:
    """An app with a tiny model."""
    with running_app(tmp_path_factory.mktemp("home"), tiny_bundle, "--draft", "none") as app:
        yield app


@pytest.fixture(scope="module")
def cookies(app: RunningApp) -> httpx.Cookies:
    """The cookies of a browser that has been let in."""
    with app.entered() as client:
        return client.cookies


@pytest.fixture
def page(app: RunningApp, cookies: httpx.Cookies) -> Iterator[Window]:
    """A window of the app."""
    with window(app, cookies) as opened:
        yield opened


@pytest.fixture
def client(page: Window) -> httpx.Client:
    """The client of that window."""
    return page.client


@pytest.fixture(scope="session")
def started_chromium() -> Iterator[Browser]:
    """The browser of all tests of a process."""
    pytest.importorskip("playwright", reason="needs playwright")
    from support.browser import browser

    with browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def chromium(started_chromium: Browser) -> Iterator[Browser]:
    """A browser for the tests of a module; asyncio.run refuses to run until its end."""
    from support.browser import in_use

    with in_use(started_chromium) as chromium:
        yield chromium


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Iterator[OpenedApp]:
    """An app with the bundled model."""
    from support.chat_page import opened

    with opened(chromium, tmp_path_factory.mktemp("home")) as app:
        yield app


@pytest.fixture
def chat(bundled: OpenedApp) -> Iterator[ChatPage]:
    """A window in the app with the bundled model."""
    with bundled.window() as chat:
        yield chat
