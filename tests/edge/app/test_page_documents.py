"""The page in a real browser: answers from documents of this machine, with their sources."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import Browser, expect

from support.chat_page import opened

ANSWER = "The bakery is in Canal Street."
DROP = """
(text) => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([text], "report.txt", { type: "text/plain" }));
    document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
}
"""


def test_an_answer_shows_the_passages_that_it_was_given_and_keeps_them(
    tmp_path: Path, chromium: Browser, long_bundle: Path
) -> None:
    folder = tmp_path / "town"
    folder.mkdir()
    for number in range(200):
        text = f"Report number {number} about the market and the harbour. " * 4
        (folder / f"{number}.txt").write_text(text + ANSWER * (number == 123), encoding="utf-8")
    with opened(chromium, tmp_path / "home", long_bundle, "--draft", "none") as app, app.window() as chat:
        page = chat.page
        dialog = page.get_by_role("dialog", name="Settings of this conversation")
        page.get_by_role("button", name="Settings of this conversation").click()
        dialog.get_by_label("Longest answer").fill("3")
        dialog.get_by_label("Documents").fill(str(folder))
        dialog.get_by_role("button", name="Save", exact=True).click()
        expect(dialog).to_have_count(0)
        chat.send("Which street is the bakery in?")
        answer = chat.in_state("length")
        sources = answer.get_by_role("region", name="From the documents")
        first = sources.get_by_role("listitem").first
        expect(first.locator("summary")).to_have_text("town/123.txt:1")
        expect(first.get_by_text(ANSWER)).to_be_hidden()
        first.locator("summary").click()
        expect(first.get_by_text(ANSWER)).to_be_visible()
        expect(answer.get_by_text("No passage of the documents fits the question.")).to_have_count(0)
        chat.send("zzz")
        expect(chat.in_state("length").get_by_text("No passage of the documents fits the question.")).to_be_visible()
        page.reload()
        sources = chat.answers.first.get_by_role("region", name="From the documents")
        expect(sources.get_by_role("listitem").first.locator("summary")).to_have_text("town/123.txt:1")


def test_a_dropped_file_that_does_not_fit_is_read_in_passages(
    tmp_path: Path, chromium: Browser, long_bundle: Path
) -> None:
    lines = [f"Report number {number} about the market and the harbour." for number in range(2_000)]
    lines[1_500] = ANSWER
    with opened(chromium, tmp_path / "home", long_bundle, "--draft", "none") as app, app.window() as chat:
        page = chat.page
        dialog = page.get_by_role("dialog", name="Settings of this conversation")
        page.get_by_role("button", name="Settings of this conversation").click()
        dialog.get_by_label("Longest answer").fill("3")
        dialog.get_by_role("button", name="Save", exact=True).click()
        expect(dialog).to_have_count(0)
        page.evaluate(DROP, "\n".join(lines))
        attached = page.get_by_role("list", name="Attached files")
        expect(attached).to_contain_text("report.txt")
        expect(attached).to_contain_text("too long: what fits the question is read")
        for question in ("Which street is the bakery in?", "Is the bakery in Canal Street?"):
            chat.send(question)
            sources = chat.in_state("length").get_by_role("region", name="From the documents")
            first = sources.get_by_role("listitem").first
            expect(first.locator("summary")).to_contain_text("report.txt:")
            first.locator("summary").click()
            expect(first.get_by_text(ANSWER)).to_be_visible()
        expect(chat.messages.first.get_by_role("list", name="Attached files")).to_contain_text("report.txt")
        expect(page.get_by_role("meter")).to_be_visible()
        expect(page.get_by_role("status").filter(has_text="does not fit")).to_have_count(0)
