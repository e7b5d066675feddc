"""Looking inside an answer, token by token, in a real browser."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import Browser, Locator, Page, expect

from support.block_models import write_block_model
from support.browser import BrowserPage, browser_page, look
from support.chat_page import opened
from support.page_server import page_server

SHOW = """
import { html, render } from "edgerun/preact";
import { TokenView } from "/page/views/tokens.js";
const root = document.getElementById("root");
const answers = {};
const fetched = window.fetch;
window.fetch = async (path, options) => {
  const id = /^[/]api[/]messages[/](.+)[/]tokens$/.exec(path)?.[1];
  if (!id) return fetched(path, options);
  const error = { message: "there is no such message", code: "not_found" };
  if (id === "lost") return Response.json({ error }, { status: 404 });
  return Response.json({ tokens: answers[id] });
};
window.branched = [];
window.show = (id, content, tokens, state = "complete") => {
  answers[id] = tokens;
  window.branched = [];
  render(null, root);
  const branch = (index, alternative) => window.branched.push([index, alternative]);
  render(html`<${TokenView} message=${{ id, content, state }} onBranch=${branch} />`, root);
};
"""
BODY = '<link rel="stylesheet" href="/page/tokens.css"><main id="root"></main>'
Json = dict[str, Any]


def plain(number: int, text: str, probability: float, **more: Any) -> Json:
    return {"id": number, "text": text, "logprob": math.log(probability), **more}


def token(number: int, text: str, probability: float = 0.95, kind: str = "decoded", **more: Any) -> Json:
    """A token with two alternatives, as the server sends it."""
    own = plain(number, text, probability)
    rest = (1 - probability) / 2
    top = [own, plain(number + 1000, " other", rest), plain(number + 2000, "\n", rest / 2)]
    return {"top": top, "drafter": None, "rejected": None, **own, "kind": kind, **more}


ANSWER = [
    token(1, "A", kind="prefill"),
    token(2, " hash", 0.75, "accepted", drafter="suffix"),
    token(3, " table", 0.55, "accepted", drafter="model"),
    token(4, " is", 0.35, "corrected", drafter="model", rejected=" was"),
    token(5, " \ufffd", 0.9),
    token(6, "\ufffd", 0.5),
    token(7, "!", 0.15, "bonus"),
    token(8, "\n\n", 0.05),
    token(9, "\tdef", 0.999),
    token(10, " f", 0.8, "chosen", rejected=" g"),
    token(11, "    ", 0.8),
    token(12, "<b onclick=alert(1)>", 0.8, "accepted", drafter="suffix"),
]
CONTENT = "A hash table is 🎉!\n\n\tdef f    <b onclick=alert(1)>"


@pytest.fixture(scope="module")
def window(chromium: Browser) -> Iterator[BrowserPage]:
    with page_server(SHOW, body=BODY) as address, browser_page(address, within=chromium) as page:
        page.page.wait_for_function("() => Boolean(window.show)")
        yield page


@pytest.fixture
def page(window: BrowserPage) -> Page:
    """A page with nothing shown, the pointer away from everything."""
    window.page.mouse.move(0, 799)
    window.page.evaluate("localStorage.clear()")
    return window.page


def shown(page: Page, content: str = CONTENT, tokens: list[Json] | None = None, message: str = "m") -> Locator:
    """The text of an answer that is shown token by token."""
    page.evaluate("([id, content, tokens]) => window.show(id, content, tokens)", [message, content, tokens or ANSWER])
    listed = page.get_by_role("listbox", name="Tokens of the answer")
    expect(listed).to_be_visible()
    return listed


def details(page: Page) -> Locator:
    return page.get_by_role("dialog")


def test_the_tokens_are_the_text_and_blanks_can_be_seen(page: Page) -> None:
    listed = shown(page)
    assert listed.evaluate("(element) => element.textContent") == CONTENT
    pieces = listed.get_by_role("option").evaluate_all("(all) => all.map((each) => each.textContent)")
    # The two tokens of the emoji, one of which has the space before it, are one piece.
    texts = [each["text"] for each in ANSWER]
    assert pieces == [*texts[:4], " 🎉", *texts[6:]]
    assert page.evaluate("() => document.querySelectorAll('.token-text b').length") == 0
    page.evaluate("() => getSelection().selectAllChildren(document.querySelector('.token-text'))")
    assert page.evaluate("() => String(getSelection())").replace("\r\n", "\n") == CONTENT
    page.evaluate("() => getSelection().removeAllRanges()")
    for name, marks in (("line", ['"↵"'] * 2), ("tab", ['"⇥"']), ("space", ['"····"'])):
        content = "(all) => all.map((each) => getComputedStyle(each, '::before').content)"
        assert listed.locator(f".mark-{name}").evaluate_all(content) == marks


def test_colours_say_how_probable_tokens_are_or_where_they_come_from(page: Page) -> None:
    listed = shown(page)
    expect(page.locator(".token-summary")).to_have_text(
        "12 tokens · 3 accepted from drafts (25\u00a0%): 8 passes instead of 11 · mean probability 63\u00a0%"
    )

    colours = "(all) => all.map((each) => getComputedStyle(each).backgroundColor)"
    by_probability = listed.get_by_role("option").evaluate_all(colours)
    assert len(set(by_probability[:4])) == 4
    assert by_probability[0] == by_probability[7] == "rgba(0, 0, 0, 0)"
    page.get_by_label("origin").check()
    by_origin = listed.get_by_role("option").evaluate_all(colours)
    assert len({by_origin[1], by_origin[2], by_origin[3], by_origin[8]}) == 4
    assert by_origin[0] == by_origin[5] == "rgba(0, 0, 0, 0)"
    assert by_origin[10] == by_origin[1]
    legend = page.get_by_role("list", name="Meaning of the colours").get_by_role("listitem").all_inner_texts()
    assert [" ".join(entry.split()) for entry in legend] == [
        "accepted from suffix look-up 2",
        "accepted from the draft model 1",
        "corrected by the model 1",
        "the model's own 7",
        "chosen by you 1",
    ]
    shown(page)  # the choice is kept
    expect(page.get_by_label("origin")).to_be_checked()


def test_details_say_how_a_token_came_to_be(page: Page) -> None:
    tokens = shown(page).get_by_role("option")
    for piece, expected in (
        (0, ["95\u00a0%", "The first token, from the pass that read the prompt."]),
        (1, ["75\u00a0%", "Drafted by suffix look-up and accepted."]),
        (3, ["35\u00a0%", "The draft said “·was” (from the draft model); the model corrected it."]),
        (4, ["45\u00a0%", "2 tokens make up these characters"]),
        (5, ["15\u00a0%", "The model's own token behind an accepted draft, from the same pass."]),
        (6, ["5.0\u00a0%", "Decoded by the model in a pass of its own, without a draft."]),
        (7, ["99.9\u00a0%"]),
        (8, ["80\u00a0%", "Chosen by you in place of “·g”."]),
    ):
        tokens.nth(piece).click()
        for text in expected:
            expect(details(page)).to_contain_text(text)
        page.keyboard.press("Escape")
        expect(details(page)).to_have_count(0)

    tokens.nth(1).hover()
    expect(details(page)).to_have_attribute("aria-label", "Token “·hash”")
    tokens.nth(3).hover()
    expect(details(page)).to_have_attribute("aria-label", "Token “·is”")
    page.mouse.move(0, 799)
    expect(details(page)).to_have_count(0)
    tokens.nth(3).click()
    page.mouse.move(0, 799)
    tokens.nth(1).hover()
    expect(details(page)).to_have_attribute("aria-label", "Token “·is”")
    page.mouse.click(5, 790)
    expect(details(page)).to_have_count(0)


def test_a_click_on_an_alternative_branches_there(page: Page) -> None:
    listed = shown(page)
    listed.get_by_role("option", name="is", exact=False).first.click()
    listed.get_by_role("option").nth(3).hover()
    box = details(page)
    expect(box.get_by_role("button", name="“·is”, 35\u00a0%, written")).to_be_disabled()
    box.get_by_role("button", name="Branch here with “·other”, 33\u00a0%").click()
    assert page.evaluate("() => window.branched") == [[3, 1004]]
    expect(box).to_have_count(0)

    # A token that is not among the likeliest is listed with them.
    unlikely = token(5, " rare", 0.001)
    unlikely["top"] = [plain(1, " usual", 0.9), plain(2, "<|end|>", 0.05, special=True), plain(3, "\ufffd", 0.01)]
    shown(page, "x rare", [token(4, "x"), unlikely]).get_by_role("option").nth(1).click()
    names = box.locator(".token-alternative").evaluate_all("(all) => all.map((each) => each.ariaLabel)")
    assert [name.replace("\u00a0", " ") for name in names] == [
        "Branch here with “·usual”, 90 %",
        "Branch here with “<|end|>”, 5.0 %, control token",
        "“·rare”, 0.1 %, written",
    ]
    page.keyboard.press("Escape")


def test_keys_go_from_token_to_token(page: Page) -> None:
    listed = shown(page)

    def described() -> str:
        name = listed.evaluate(
            "(list) => document.getElementById(list.getAttribute('aria-activedescendant'))?.ariaLabel ?? ''"
        )
        return str(name).replace("\u00a0", " ")

    expect(listed).to_be_focused()  # it took the focus when it was opened
    page.get_by_label("probability").focus()
    page.keyboard.press("Tab")
    expect(listed).to_be_focused()
    page.keyboard.press("ArrowRight")
    assert described() == "“A”, 95 %. The first token, from the pass that read the prompt."
    expect(details(page)).to_be_visible()
    page.keyboard.press("ArrowRight")
    assert described() == "“·hash”, 75 %. Drafted by suffix look-up and accepted."
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert described().startswith("“A”")
    page.keyboard.press("ArrowDown")
    assert described().startswith(("“↵↵”", "“⇥def”"))
    page.keyboard.press("End")
    assert described().startswith("“<b onclick=alert(1)>”")
    page.keyboard.press("ArrowUp")
    assert described().startswith(("“A”", "“·hash”", "“·table”", "“·is”", "“·🎉”", "“!”", "“↵↵”"))
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(details(page).get_by_role("button", name="Close")).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Escape")
    expect(details(page)).to_have_count(0)
    expect(listed).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    expect(details(page).get_by_role("button", name="Branch here with “·other”")).to_be_focused()
    page.keyboard.press("Enter")
    assert page.evaluate("() => window.branched") == [[1, 1002]]
    expect(listed).to_be_focused()


def test_an_answer_whose_tokens_are_not_or_not_all_known(window: BrowserPage, page: Page) -> None:
    known = [token(1, " the"), token(2, " rest")]
    listed = shown(page, "edited by hand, the rest", known)
    assert listed.inner_text().strip() == "the rest"
    expect(page.locator(".token-unknown")).to_have_text("edited by hand,")
    # A stop sequence has cut the last token off.
    listed = shown(page, "the re", [token(1, "the"), token(2, " rest")], "cut")
    assert listed.inner_text() == "the re"
    page.evaluate("() => window.show('none', 'text', [])")
    expect(page.get_by_text("No details of the tokens were kept for this answer.")).to_be_visible()
    page.evaluate("() => window.show('lost', 'text', [])")
    expect(page.get_by_role("alert")).to_have_text("there is no such message")
    window.errors.clear()


def test_details_stay_within_a_small_window_and_have_no_serious_fault(window: BrowserPage, page: Page) -> None:
    tokens = [token(index, f" word{index}") for index in range(400)]
    listed = shown(page, "".join(each["text"] for each in tokens), tokens)
    for width, height in ((1280, 800), (390, 700), (320, 400)):
        page.set_viewport_size({"width": width, "height": height})
        for index in (0, 40, 399):
            element = listed.get_by_role("option").nth(index)
            # Details of a token that has come under the pointer by scrolling could cover the next one.
            page.mouse.move(0, 0)
            element.scroll_into_view_if_needed()
            element.click()
            box, place = details(page).bounding_box(), element.bounding_box()
            assert box is not None
            assert place is not None
            assert box["x"] >= 0
            assert box["y"] >= 0
            assert box["x"] + box["width"] <= width + 0.5
            assert box["y"] + box["height"] <= height + 0.5
            page.keyboard.press("Escape")
    page.set_viewport_size({"width": 1280, "height": 800})
    listed = shown(page)
    for mode in ("probability", "origin"):
        page.get_by_label(mode).check()
        listed.get_by_role("option").nth(1).click()
        expect(details(page)).to_be_visible()
        look(page, f"tokens-{mode}")
        page.keyboard.press("Escape")


def test_another_token_of_a_real_answer_makes_another_answer(tmp_path: Path, chromium: Browser) -> None:
    """From the question to the branch, in the app with the bundled model."""
    with opened(chromium, tmp_path) as app, app.window() as chat:
        page = chat.page
        answer = chat.ask("find files larger than 100 MB")
        content = page.evaluate(
            "async (id) => (await (await fetch(`/api/conversations/${id}`)).json()).messages[1].content", chat.id()
        )
        answer.get_by_role("button", name="Look inside: tokens and probabilities").click()
        listed = answer.get_by_role("listbox", name="Tokens of the answer")
        expect(listed).to_have_text(content, use_inner_text=False)
        expect(listed).to_be_focused()
        expect(answer.locator(".token-summary")).to_have_text(re.compile(r"^\d+ tokens · .* mean probability \d+"))
        counted = [answer.locator(name).inner_text().partition(" · ")[0] for name in (".statistics", ".token-summary")]
        assert counted == [f"{listed.locator('.token').count()} tokens"] * 2
        pieces = listed.locator(".token").all_text_contents()
        listed.locator(".token").nth(2).click()
        other = details(page).locator(".token-alternative:enabled code").first
        chosen = other.inner_text().replace("·", " ")
        other.click()
        expect(answer.get_by_text("Branch 2 of 2")).to_be_attached()
        branched = chat.in_state("complete")
        branched.focus()
        page.keyboard.press("t")
        expect(listed).to_be_focused()
        page.keyboard.press("ArrowRight")
        expect(listed.locator("[data-active]")).to_have_text(pieces[0])
        page.keyboard.press("Escape")
        page.keyboard.press("t")
        expect(listed).to_have_count(0)
        expect(branched).to_be_focused()
        page.keyboard.press("t")
        expect(listed.locator(".is-chosen")).to_have_text(chosen)
        assert listed.locator(".token").all_text_contents()[:3] == [*pieces[:2], chosen]
        answer.get_by_role("button", name="Previous branch").click()
        expect(answer.get_by_text("Branch 1 of 2")).to_be_attached()
        answer.get_by_role("button", name="Look inside").click()
        expect(listed).to_have_text(content)

        page.evaluate(
            """() => fetch("/api/settings", {
              method: "PATCH",
              headers: { "content-type": "application/json" },
              body: JSON.stringify({ token_details: false }),
            })"""
        )
        without = chat.ask("list all folders")
        expect(without.get_by_role("button", name="Regenerate")).to_be_attached()
        expect(without.get_by_role("button", name="Look inside")).to_have_count(0)


def test_tokens_of_a_model_that_fills_blocks_say_which_pass_found_them(tmp_path: Path, chromium: Browser) -> None:
    bundle = write_block_model(tmp_path / "model", max_position_embeddings=128)
    with opened(chromium, tmp_path / "home", bundle, "--draft", "none") as app, app.window() as chat:
        chat.send("the sea")
        answer = chat.in_state("length")
        answer.get_by_role("button", name="Look inside: tokens and probabilities").click()
        expect(answer.locator(".token-summary")).to_have_text(re.compile(r"in blocks, of which \d+\s% found in the"))
        answer.get_by_label("origin").click()
        expect(answer.get_by_role("list", name="Meaning of the colours")).to_contain_text("pass 1 over its block")
        answer.locator(".token.is-filled-2").first.click()
        expect(details(chat.page)).to_contain_text("Found in pass 2 over its block.")
        look(chat.page, "tokens-of-blocks")
