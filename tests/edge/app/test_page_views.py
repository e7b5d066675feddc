"""Views of the page in a real browser: actions under answers, the edit box, and notices."""

from __future__ import annotations

import base64

import pytest

pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import FilePayload, FloatRect, Locator, Page, expect

from support.chat_page import ChatPage, OpenedApp

NOT_TEXT: FilePayload = {"name": "picture.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x1a\n\x00\xff"}
PIXELS = """async (png) => {
  const bytes = Uint8Array.from(atob(png), (character) => character.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const { data } = canvas.getImageData(0, 0, image.width, image.height);
  return Array.from({ length: image.width }, (_, x) => Array.from(data.slice(4 * x, 4 * x + 3)));
}"""


def box(element: Locator) -> FloatRect:
    """Where an element is."""
    found = element.bounding_box()
    assert found is not None
    return found


def row_of_pixels(page: Page, left: float, width: float, y: float) -> list[list[int]]:
    """The colours of the pixels of a horizontal line."""
    picture = page.screenshot(clip={"x": left, "y": y, "width": width, "height": 1})
    colours: list[list[int]] = page.evaluate(PIXELS, base64.b64encode(picture).decode())
    return colours


def test_an_answer_has_three_actions_and_a_menu_of_the_others(chat: ChatPage) -> None:
    answer, keys = chat.ask("find files larger than 100 MB"), chat.page.keyboard
    names = answer.locator(".actions").get_by_role("button").evaluate_all("(all) => all.map((each) => each.ariaLabel)")
    assert names == ["Copy message", "Regenerate", "Look inside: tokens and probabilities", "More actions"]
    more = answer.get_by_role("button", name="More actions")
    more.focus()
    keys.press("Enter")
    items = chat.page.get_by_role("menuitem")
    expect(items).to_have_text(
        ["Edit", "Continue", *(f"Write {count} answers" for count in (2, 3, 4, 8)), "Delete, with what follows"]
    )
    expect(items.first).to_be_focused()
    keys.press("ArrowDown")
    expect(items.nth(1)).to_be_focused()
    keys.press("End")
    expect(items.last).to_be_focused()
    keys.press("ArrowDown")
    expect(items.first).to_be_focused()
    keys.press("Escape")
    expect(items).to_have_count(0)
    expect(more).to_be_focused()
    keys.press("Enter")
    expect(items.first).to_be_focused()
    keys.press("Enter")
    expect(answer.get_by_role("textbox", name="Text of the message")).to_be_focused()


def test_a_menu_opens_again_at_once_after_it_was_closed(chat: ChatPage) -> None:
    answer = chat.ask("find files larger than 100 MB")
    answer.get_by_role("button", name="More actions").click()
    items = chat.page.get_by_role("menuitem")
    expect(items.first).to_be_focused()
    # As Escape does it; the click comes before the browser tells that the menu has closed.
    chat.page.get_by_role("menu").evaluate(
        "async (menu) => { menu.hidePopover(); await null; document.activeElement.click(); }"
    )
    expect(items.first).to_be_focused()


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_the_whole_focus_ring_of_the_edit_box_is_seen(bundled: OpenedApp, size: tuple[int, int]) -> None:
    with bundled.window(size=size) as chat:
        chat.ask("list all folders").focus()
        chat.page.keyboard.press("e")
        area = chat.page.get_by_role("textbox", name="Text of the message")
        expect(area).to_be_focused()
        ring = area.evaluate("(element) => getComputedStyle(element).outlineColor.match(/\\d+/g).map(Number)")
        place = box(area)
        pixels = row_of_pixels(chat.page, place["x"] - 4, place["width"] + 8, place["y"] + 30)
        assert ring in pixels[:4]
        assert ring in pixels[-4:]


@pytest.mark.parametrize("size", [(1280, 500), (390, 500)])
def test_notices_cover_nothing_and_go_with_their_page(bundled: OpenedApp, size: tuple[int, int]) -> None:
    with bundled.window(size=size) as chat:
        for question in ("list all folders", "show the date", "count the lines", "show the free space"):
            chat.ask(question)
        chat.messages.last.focus()
        chat.page.keyboard.press("Delete")
        expect(chat.notice).to_have_count(1)
        chat.attached_files.set_input_files(NOT_TEXT)
        expect(chat.notice).to_have_count(2)
        scroller = chat.page.locator(".chat .scroller")
        scroller.evaluate("(element) => { element.scrollTop = 0; }")
        to_end = chat.page.get_by_role("button", name="Jump to the latest")
        expect(to_end).to_be_visible()
        lowest = max(each["y"] + each["height"] for each in map(box, (scroller, to_end, chat.composer)))
        assert all(lowest <= box(notice)["y"] for notice in chat.notice.all())
        undo = chat.notice.get_by_role("button", name="Undo")
        assert box(undo)["height"] < 40
        assert box(chat.notice.last)["y"] + box(chat.notice.last)["height"] <= size[1]
        to_end.click()
        chat.page.evaluate("() => { location.hash = '#/settings'; }")
        expect(chat.notice).to_have_count(0)


def test_notices_go_away_after_their_time(chat: ChatPage) -> None:
    chat.ask("show the date")
    chat.page.clock.install()
    chat.attached_files.set_input_files(NOT_TEXT)
    expect(chat.notice).to_contain_text("picture.png is not a text file")
    chat.page.clock.run_for(1_000)  # the time of a notice begins after it was painted
    chat.page.clock.fast_forward(31_000)
    expect(chat.notice).to_have_count(0)
