"""The page of the app in a real browser: messages, answers, branches, drafts, scrolling, keys."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import Browser, FilePayload, FloatRect, Locator, Page, Route, expect

from edgerun.edge.conversations.store import ConversationStore
from support.chat_page import ChatPage, OpenedApp, opened

NOT_TEXT: FilePayload = {"name": "picture.bin", "mimeType": "", "buffer": b"\x89PNG\r\n\x1a\n\x00\xff"}
PIXELS = """async (png) => {
  const bytes = Uint8Array.from(atob(png), (character) => character.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const { data } = canvas.getImageData(0, 0, image.width, image.height);
  return Array.from({ length: image.width }, (_, x) => Array.from(data.slice(4 * x, 4 * x + 3)));
}"""
QUESTION = "find files larger than 100 MB"


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory, chromium: Browser, endless_bundle: Path) -> Iterator[OpenedApp]:
    """An app with a model that never ends an answer."""
    with opened(chromium, tmp_path_factory.mktemp("home"), endless_bundle, "--draft", "none") as app:
        yield app


@pytest.fixture
def long_answer(endless: OpenedApp) -> Iterator[ChatPage]:
    """A window in which an answer is being written that does not end; it is stopped at the end of the test."""
    with endless.window(size=(800, 420)) as chat:
        # A chat model is offered only where there is none.
        expect(chat.page.locator(".welcome > p")).to_have_text(
            ["Everything stays on this machine: what you write, what the model answers, and your files."]
        )
        expect(chat.page.get_by_role("list", name="Examples").get_by_role("button")).to_have_count(3)
        chat.send("hello")
        chat.begun()
        yield chat
        chat.page.keyboard.press("Escape")
        expect(chat.answers.last).not_to_have_attribute("data-state", "writing")


def test_from_the_first_start_to_the_first_answer(tmp_path: Path, chromium: Browser) -> None:
    command = "rm *.log *.tmp && echo `pwd` # _done_"
    with ConversationStore(tmp_path / "conversations.sqlite3") as store:
        conversation = store.create(title="Cleaning").id
        question = store.add_message(conversation, None, "user", "remove the logs")
        store.add_message(conversation, question.id, "assistant", command, model="shell-helper")
    with opened(chromium, tmp_path) as app, app.window() as chat:
        about = chat.page.locator(".welcome > p.quiet")
        expect(about).to_have_text(
            "The model that comes along writes shell commands and does not chat; everything stays on this machine."
        )
        expect(chat.page.get_by_role("link", name="Get a chat model")).to_have_attribute("href", "#/models")
        chat.composer.fill("half a thought")
        chat.page.get_by_role("button", name=QUESTION).click()
        answer = chat.in_state("complete")
        expect(answer.locator("pre")).to_contain_text("find")
        expect(answer.locator(".statistics")).to_have_text(
            re.compile(r"\d+ tokens? · [\d.]+ tokens/s · first token after")
        )
        expect(chat.rows).to_have_text([QUESTION, "Cleaning"])
        assert chat.id()
        chat.new_chat()
        expect(chat.composer).to_have_value("half a thought")

        # Its commands are shown as they are, also while the page does not know yet which model it was.
        chat.row("Cleaning").click()
        expect(chat.answers.locator("pre")).to_have_text(command)
        expect(chat.answers.locator("em")).to_have_count(0)
        held: list[Route] = []
        holding = True

        def hold(route: Route) -> None:
            if holding:
                held.append(route)
            else:
                route.continue_()

        chat.page.route("**/api/state", hold)
        chat.page.reload()
        expect(chat.answers.locator(".plain")).to_have_text(command)
        expect(chat.answers.locator("em")).to_have_count(0)
        holding = False  # a later request would be held for ever
        for route in held:
            route.continue_()
        chat.page.unroute("**/api/state")
        expect(chat.answers.locator("pre")).to_have_text(command)


def test_answers_are_stopped_and_go_on(long_answer: ChatPage) -> None:
    chat = long_answer
    chat.page.keyboard.press("Escape")
    answer = chat.in_state("stopped")
    expect(answer).to_contain_text("Stopped.")
    first = answer.locator(".md").inner_text()
    answer.get_by_role("button", name="Continue").click()
    expect(answer).to_have_attribute("data-state", "writing")
    chat.page.wait_for_function(
        "length => document.querySelector('.assistant .md').innerText.length > length", arg=len(first)
    )
    stop = chat.page.get_by_role("button", name="Stop the answer (Esc)")
    stop.click()
    chat.in_state("stopped")
    assert answer.locator(".md").inner_text().startswith(first.rstrip()[:40])

    chat.more(answer, "Write 2 answers")
    expect(answer.locator(".branches")).to_contain_text("2 / 3")
    chat.begun()
    # Both are written at a time.
    answer.get_by_role("button", name="Next branch").click()
    expect(answer).to_have_attribute("data-state", "writing")
    stop.click()
    for place in ("3 / 3", "2 / 3"):
        expect(answer.locator(".branches")).to_contain_text(place)
        chat.in_state("stopped")
        answer.get_by_role("button", name="Previous branch").click()


def test_edits_make_branches_and_a_deleted_message_comes_back(chat: ChatPage) -> None:
    chat.ask(QUESTION)
    chat.ask("list all folders")
    third = chat.messages.nth(2)
    third.focus()
    third.press("Delete")
    expect(chat.messages).to_have_count(2)
    expect(chat.messages.last).to_be_focused()
    chat.notice.get_by_role("button", name="Undo").click()
    expect(chat.messages).to_have_count(4)
    expect(third).to_contain_text("list all folders")

    first = chat.messages.first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    chat.page.get_by_role("textbox", name="Text of the message").fill("show the free space")
    chat.page.get_by_role("button", name="Save as branch and answer").click()
    expect(chat.messages).to_have_count(2)
    chat.in_state("complete")
    expect(first.locator(".branches")).to_contain_text("2 / 2")

    first.get_by_role("button", name="Previous branch").click()
    expect(chat.messages).to_have_count(4)  # what followed the old question is still there
    expect(third).to_contain_text("list all folders")
    first.focus()
    first.press("ArrowRight")
    expect(first).to_contain_text("show the free space")
    expect(first).to_be_focused()

    first.press("e")
    chat.page.get_by_role("textbox", name="Text of the message").fill("show the free disk space")
    chat.page.get_by_role("button", name="Just save").click()
    expect(first).to_contain_text("show the free disk space")
    expect(chat.messages).to_have_count(2)
    expect(first.locator(".branches")).to_contain_text("2 / 2")


def test_drafts_are_kept_for_each_conversation(chat: ChatPage) -> None:
    chat.ask(QUESTION)
    url = chat.page.url
    chat.composer.fill("half a tho")
    chat.new_chat()
    expect(chat.composer).to_have_value("")
    chat.composer.fill("another thought")
    chat.attached_files.set_input_files([{"name": "notes.txt", "mimeType": "text/plain", "buffer": b"some notes"}])
    expect(chat.page.locator(".attached")).to_contain_text("notes.txt")
    chat.page.reload()
    expect(chat.composer).to_have_value("another thought")
    expect(chat.page.locator(".attached")).to_contain_text("notes.txt")
    chat.page.goto(url)
    expect(chat.composer).to_have_value("half a tho")
    expect(chat.messages).to_have_count(2)
    chat.ask("half a thought")
    expect(chat.composer).to_have_value("")
    chat.page.reload()
    expect(chat.messages).to_have_count(4)
    expect(chat.composer).to_have_value("")


def test_files_are_attached_and_a_long_message_is_pasted_whole(chat: ChatPage) -> None:
    table: FilePayload = {"name": "list.csv", "mimeType": "text/csv", "buffer": "größe,zahl\n1,2\n".encode()}
    chat.attached_files.set_input_files([table, NOT_TEXT])
    expect(chat.notice).to_contain_text("picture.bin is not a text file in UTF-8")
    expect(chat.page.locator(".attached li")).to_have_count(1)
    explained = "This model writes shell commands only"
    expect(chat.ask("Hello there!")).to_contain_text(explained)
    question = chat.messages.first
    expect(question).to_contain_text("list.csv")
    question.get_by_text("list.csv").click()
    expect(question.locator("pre")).to_have_text("größe,zahl\n1,2\n")
    expect(chat.ask("list the open ports")).not_to_contain_text(explained)

    text = "\n".join(f"line {number} of what is pasted" for number in range(60))
    chat.composer.focus()
    chat.page.keyboard.insert_text(text)
    expect(chat.composer).to_have_value(text)
    chat.composer.press("Shift+Enter")
    chat.page.keyboard.insert_text("end")
    expect(chat.composer).to_have_value(f"{text}\nend")
    expect(chat.messages).to_have_count(4)


def test_the_view_follows_only_while_it_is_at_the_end(long_answer: ChatPage) -> None:
    page = long_answer.page
    scroller = page.locator(".chat .scroller")
    distance = "element => element.scrollHeight - element.scrollTop - element.clientHeight"
    page.wait_for_function(
        "() => { const box = document.querySelector('.scroller'); return box.scrollHeight > box.clientHeight + 300; }"
    )
    # What has just been written is followed with the next frame.
    page.wait_for_function(f"() => ({distance})(document.querySelector('.chat .scroller')) < 100")
    scroller.hover()
    page.mouse.wheel(0, -150)
    to_end = page.get_by_role("button", name="Jump to the latest")
    expect(to_end).to_be_visible()
    height = scroller.evaluate("element => element.scrollHeight")
    top = page.evaluate(
        """async () => {
            const box = document.querySelector('.chat .scroller');
            await new Promise((done) => {
                let last = box.scrollTop, quiet = 0;
                const look = () => { quiet = box.scrollTop === last ? quiet + 1 : 0; last = box.scrollTop;
                                     if (quiet > 20) done(); else requestAnimationFrame(look); };
                look();
            });
            return box.scrollTop;
        }"""
    )  # the wheel has come to rest
    page.wait_for_function(
        "height => document.querySelector('.chat .scroller').scrollHeight > height + 200", arg=height
    )
    assert scroller.evaluate("element => element.scrollTop") == top
    to_end.click()
    expect(to_end).to_have_count(0)
    height = scroller.evaluate("element => element.scrollHeight")
    page.wait_for_function(
        "height => document.querySelector('.chat .scroller').scrollHeight > height + 100", arg=height
    )
    expect(to_end).to_have_count(0)


def test_turns_that_do_not_fit_are_said_to_be_left_out(tmp_path: Path, chromium: Browser, tiny_bundle: Path) -> None:
    with opened(chromium, tmp_path, tiny_bundle, "--draft", "none") as app, app.window() as chat:
        for number in range(3):
            chat.send(f"question {number}: " + "ab " * 30)
            expect(chat.answers).to_have_count(number + 1)
            expect(chat.answers.last).not_to_have_attribute("data-state", "writing")
        expect(chat.page.locator(".trimmed-line")).to_contain_text("does not see the messages above any more")
        expect(chat.messages.first).to_contain_text("not seen by the model")
        expect(chat.messages.last).not_to_contain_text("not seen by the model")
        chat.page.reload()
        expect(chat.messages.first).to_contain_text("not seen by the model")


def test_everything_is_reached_by_keys(chat: ChatPage) -> None:
    page, keys = chat.page, chat.page.keyboard
    keys.press("Control+Shift+O")
    expect(chat.composer).to_be_focused()
    keys.type("show the date")
    keys.press("Enter")
    chat.in_state("complete")
    keys.press("Alt+ArrowUp")
    expect(chat.answers.last).to_be_focused()
    keys.press("Alt+ArrowUp")
    expect(chat.messages.first).to_be_focused()
    keys.press("e")
    keys.press("Control+A")
    keys.type("show the time")
    keys.press("Control+Enter")
    expect(chat.messages.first).to_contain_text("show the time")
    chat.in_state("complete")
    keys.press("Control+K")
    keys.type("show the date")
    expect(page.get_by_role("option")).to_have_count(2)  # the title, and the message
    keys.press("ArrowDown")
    expect(page.get_by_role("option").last).to_have_attribute("aria-selected", "true")
    keys.press("Enter")
    expect(chat.messages.first).to_contain_text("show the date")
    keys.press("?")
    shortcuts = page.get_by_role("dialog", name="Keyboard")
    expect(shortcuts).to_be_visible()
    keys.press("Escape")
    expect(shortcuts).to_have_count(0)
    keys.press("/")
    expect(chat.composer).to_be_focused()
    keys.press("Control+Shift+S")
    settings = page.get_by_role("dialog", name="Settings of this conversation")
    settings.get_by_label("Title").focus()
    keys.press("Control+A")
    keys.type("By keys alone")
    keys.press("Enter")
    expect(settings).to_have_count(0)  # which gives the focus back
    expect(page.get_by_role("heading", level=1)).to_have_text("By keys alone")
    chat.row("By keys alone").focus()
    keys.press("Delete")
    expect(chat.notice).to_contain_text("Deleted “By keys alone”")
    keys.press("Control+Z")
    expect(chat.row("By keys alone")).to_be_visible()


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
    # As Escape does it; the click comes before the browser tells that the menu has closed.
    chat.page.get_by_role("menu").evaluate(
        "async (menu) => { menu.hidePopover(); await null; document.activeElement.click(); }"
    )
    expect(items.first).to_be_focused()
    keys.press("Enter")
    expect(answer.get_by_role("textbox", name="Text of the message")).to_be_focused()


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
    expect(chat.notice).to_contain_text("picture.bin is not a text file")
    chat.page.clock.run_for(1_000)  # the time of a notice begins after it was painted
    chat.page.clock.fast_forward(31_000)
    expect(chat.notice).to_have_count(0)
