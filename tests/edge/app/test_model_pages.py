"""The pages about models in a real browser: downloads, switcher, slider, comparison, exactness report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs a browser")

from playwright.sync_api import Browser, Page, expect

from support.app_server import RunningApp, running_app
from support.browser import BrowserPage, browser_page, look
from support.encoders import write_encoder
from support.hub_server import HubServer, files_of, own_hub
from support.tiny_models import write_bundle, write_checkpoint
from support.waiting import wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[HubServer]:
    with own_hub(folder / "hf") as server:
        files = files_of(write_bundle(folder / "made", hidden_size=256, intermediate_size=512))
        server.repo("acme/Tiny-Chat", files)
        server.repo("acme/Removed", files)
        server.repo("acme/Popular-Chat", files).downloads = 1234
        server.repo("acme/Weights-Chat", files).tags = ("text-generation",)
        yield server


@pytest.fixture(scope="module")
def app(folder: Path, hub: HubServer, tiny_bundle: Path) -> Iterator[RunningApp]:
    # A download that is paused while nothing arrives ends with the time limit of the hub library, else 10 seconds.
    environment = {"EDGERUN_CACHE": str(folder / "cache"), "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
    encoder = write_encoder(folder / "vectors")
    with running_app(folder / "home", encoder, tiny_bundle, **environment) as app:
        yield app


@pytest.fixture(scope="module")
def window(app: RunningApp, chromium: Browser) -> Iterator[BrowserPage]:
    with browser_page(app.url, within=chromium) as window:
        yield window


@pytest.fixture
def page(app: RunningApp, window: BrowserPage) -> Page:
    window.page.goto(f"{app.base}/#/models")
    return window.page


def card(page: Page, name: str) -> Any:
    return page.locator(f'[data-download="{name}"]')


def begin(page: Page, hub: HubServer, name: str) -> Any:
    """Begin a download that stops in the middle of its weights; returns its card."""
    hub.faults.go_on.clear()
    hub.faults.stall["model.onnx.data"] = 1_400_000
    page.get_by_label("Another model of the hub").fill(name)
    page.get_by_role("button", name="Download", exact=True).click()
    found = card(page, name)
    expect(found.get_by_role("progressbar")).to_have_attribute("value", re.compile(r"\d{7}"))
    return found


def go_on(hub: HubServer) -> None:
    hub.faults.stall.clear()
    hub.faults.go_on.set()


def test_a_download_is_paused_and_goes_on_after_a_reload(page: Page, hub: HubServer) -> None:
    begin(page, hub, "acme/Tiny-Chat").get_by_role("button", name="Pause").click()
    before = len(hub.seen)
    expect(card(page, "acme/Tiny-Chat")).to_have_attribute("data-state", "paused")
    page.reload()
    paused = card(page, "acme/Tiny-Chat")
    expect(paused).to_have_attribute("data-state", "paused")
    expect(paused).to_contain_text("of 5.2 MB")
    go_on(hub)
    paused.get_by_role("button", name="Resume").click()
    # Screen readers hear of it in the region of the notices.
    notices = page.get_by_role("status").filter(has_text="was downloaded and can be used")
    expect(notices).to_be_visible()
    expect(page.locator('[data-model="acme/Tiny-Chat"]')).to_contain_text("not measured yet")
    ranges = [seen.range for seen in hub.seen[before:] if "model.onnx.data" in seen.path and seen.range]
    assert any(int(each.removeprefix("bytes=").rstrip("-")) > 1_000_000 for each in ranges)


def test_models_of_the_hub_are_found_by_name_when_the_button_is_pressed(page: Page, hub: HubServer) -> None:
    page.reload()
    expect(page.locator("[data-recommended]").first).to_be_visible()
    before = len(hub.seen)
    page.get_by_label("Search the hub by name").fill("CHAT acme")
    assert len(hub.seen) == before  # nothing is asked before the user says so
    page.get_by_role("button", name="Search", exact=True).click()
    found = page.locator("[data-found]")
    expect(found).to_have_count(2)
    expect(found.nth(0)).to_contain_text("acme/Popular-Chat")
    expect(found.nth(0)).to_contain_text("1,234 downloads in 30 days · 5.2 MB in all variants together")
    look(page, "hub-search")
    found.nth(0).get_by_role("button", name="Download acme/Popular-Chat").click()
    expect(page.locator('[data-model="acme/Popular-Chat"]')).to_be_visible()
    expect(found.nth(0)).to_contain_text("on this machine")
    page.get_by_label("Search the hub by name").fill("no such model")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").filter(has_text="Nothing found")).to_be_visible()
    sizes = "async (sizes) => sizes.map((await import('/page/strings.js')).strings.common.size)"
    shown = ["999 bytes", "1.5 kB", "860 MB", "12.3 MB", "1 GB", "2 GB"]
    assert page.evaluate(sizes, [999, 1500, 860e6, 12.34e6, 999.7e6, 2e9]) == shown


def test_a_download_that_failed_is_resumed_where_it_was_begun(page: Page, hub: HubServer) -> None:
    hub.faults.status["/"] = 503
    worth = page.locator("[data-recommended]").first
    expect(worth).to_contain_text("free.")
    expect(page.locator("[data-recommended]")).to_have_count(12)
    worth.get_by_role("button", name=re.compile("^Download")).click()
    again = worth.get_by_role("button", name=re.compile("^Resume the download of"))
    expect(again).to_be_enabled()
    expect(page.get_by_text("The download of")).to_have_count(0)  # its card says it
    before = len(hub.seen)
    again.click()
    wait_until(lambda: len(hub.seen) > before)
    hub.faults.status.clear()
    page.locator("[data-download]").filter(has=page.locator(".fault")).get_by_role("button", name="Cancel").click()
    expect(worth.get_by_role("button", name=re.compile("^Download"))).to_be_enabled()


def test_models_are_loaded_and_removed_after_a_question(page: Page, folder: Path) -> None:
    page.get_by_label("Another model of the hub").fill("acme/Removed")
    page.get_by_role("button", name="Download", exact=True).click()
    model = page.locator('[data-model="acme/Removed"]')
    model.get_by_role("button", name="Load Removed into memory").click()
    expect(model).to_contain_text("in memory")
    model.get_by_role("button", name="Remove Removed").click()
    dialog = page.get_by_role("dialog", name="Remove Removed?")
    expect(dialog).to_contain_text("Conversations with it are kept.")
    # Cancel has the focus.
    page.keyboard.press("Enter")
    expect(model).to_be_visible()
    model.get_by_role("button", name="Remove Removed").click()
    assert (stored := [path for path in folder.rglob("*.onnx") if "Removed" in str(path)])
    dialog.get_by_role("button", name="Remove", exact=True).click()
    expect(model).to_have_count(0)
    assert not any(path.exists() for path in stored)
    expect(page.locator('[data-model="shell-helper"] button[aria-label^="Remove"]')).to_have_count(0)


def test_an_encoder_is_listed_and_not_offered_for_chats(page: Page) -> None:
    encoder = page.locator('[data-model="vectors"]')
    encoder.get_by_role("button", name="Load vectors into memory").click()
    expect(encoder).to_contain_text("in memory")
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Model: bundle. Choose another").click()
    menu = page.get_by_role("menu", name="Model: bundle. Choose another")
    expect(menu).to_contain_text("shell-helper")
    expect(menu).not_to_contain_text("vectors")


def test_the_switcher_changes_the_model_by_keyboard(page: Page) -> None:
    page.get_by_role("button", name="New chat").click()
    switcher = page.get_by_role("button", name="Model: bundle. Choose another")
    switcher.focus()
    page.keyboard.press("Enter")
    menu = page.get_by_role("menu", name="Model: bundle. Choose another")
    expect(menu.get_by_role("menuitemradio", checked=True)).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(menu.get_by_role("menuitemradio").nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(menu).to_have_count(0)
    changed = page.get_by_role("button", name="Model: shell-helper. Choose another")
    expect(changed).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(menu).to_have_count(0)
    expect(changed).to_be_focused()


def test_the_slider_chooses_a_measured_plan(page: Page, folder: Path) -> None:
    source = write_checkpoint(folder / "checkpoint", num_hidden_layers=1)
    page.get_by_role("link", name="Export").click()
    page.get_by_label("Checkpoint").fill(str(source))
    expect(page.get_by_role("button", name="Measure, then choose")).to_be_enabled()
    # As the button does, but with so little calibration text that it takes seconds.
    body = {"source": str(source), "name": "Sliced", "calibration_tokens": 1200}
    page.evaluate("async (body) => (await import('/page/views/model_api.js')).startExport(body)", body)
    job = page.locator('[data-export="Sliced"]')
    slider = job.get_by_role("slider", name="Size and quality")
    expect(slider).to_be_visible()
    last = int(slider.get_attribute("max") or "0")
    assert last >= 2
    slider.focus()
    page.keyboard.press("Home")
    smallest = slider.get_attribute("aria-valuetext") or ""
    expect(job.locator("circle.chosen")).to_have_count(1)
    page.keyboard.press("ArrowRight")
    expect(slider).to_have_value("1")
    assert slider.get_attribute("aria-valuetext") != smallest
    shown = job.locator(".plan-text strong").inner_text()
    assert (slider.get_attribute("aria-valuetext") or "").startswith(shown)
    # A point of the curve is a position of the slider.
    job.locator("circle").nth(last).click()
    expect(slider).to_have_value(str(last))
    job.get_by_role("button", name="Export this one").click()
    expect(job).to_have_attribute("data-state", "done")
    page.get_by_role("link", name="Models").last.click()
    expect(page.locator('[data-model="Sliced"]')).to_be_visible()


def test_a_comparison_is_written_side_by_side(page: Page) -> None:
    page.get_by_role("button", name="Advanced").press("Enter")
    expect(page.get_by_role("menuitem")).to_have_text(["Compare", "Exactness"])
    page.get_by_role("menuitem", name="Compare").press("Enter")
    expect(page.get_by_role("button", name="Advanced")).to_have_attribute("aria-current", "true")
    expect(page.get_by_role("link", name="Models").first).to_have_attribute("aria-current", "page")
    page.locator(".model-form select").first.select_option("bundle")
    page.get_by_label("Prompt to answer").fill("the theory of the thing")
    page.locator(".model-form select").nth(2).select_option("64")
    page.get_by_role("button", name="Compare").click()
    summary = page.locator(".race-summary")
    expect(summary).to_contain_text("Both texts are identical.")
    texts = page.locator(".race-text")
    assert texts.nth(0).inner_text() == texts.nth(1).inner_text() != ""


def test_the_exactness_report_is_in_plain_words(page: Page) -> None:
    page.get_by_role("button", name="Advanced").click()
    page.get_by_role("menuitem", name="Exactness").click()
    page.locator(".model-form select").first.select_option("bundle")
    expect(page.get_by_text("This model has not been checked on this machine yet.")).to_be_visible()
    page.get_by_role("button", name="Check", exact=True).click()
    report = page.get_by_role("article")
    expect(report).to_contain_text("near ties")
    expect(report.get_by_role("row")).to_have_count(5)
    report.get_by_text("How much wide passes differ").click()
    expect(report.get_by_role("listitem").first).to_have_text("1 token: none")
    page.reload()
    expect(page.get_by_role("button", name="Check again")).to_be_visible()


def test_the_pages_fit_a_phone(page: Page, app: RunningApp) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    for address in ("models", "models/export", "compare", "exactness"):
        page.goto(f"{app.base}/#/{address}")
        expect(page.locator(".model-page")).to_be_visible()
        page.locator(".model-page > *").first.wait_for()
        assert page.evaluate("document.querySelector('.page .scroller').scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 1280, "height": 800})
