"""The page in a real browser: the list of conversations, settings, windows, restarts, models, the palette."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import Browser, Locator, Page, expect

from edgerun.edge.conversations.store import ConversationStore
from support.app_server import running_app
from support.browser import browser_page, look
from support.chat_page import ChatPage, OpenedApp, opened
from support.waiting import wait_until

DAY_S = 86_400


def test_a_conversation_is_renamed_pinned_moved_deleted_restored_exported_and_imported(
    chat: ChatPage, tmp_path: Path
) -> None:
    page = chat.page
    chat.ask("print the current folder")
    chat.menu("print the current folder", "Rename …")
    page.get_by_role("dialog").get_by_role("textbox").fill("Where am I")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Where am I")
    chat.menu("Where am I", "Move to folder …")
    page.get_by_role("dialog").get_by_label("Folder").fill("Shell")
    page.keyboard.press("Enter")
    folder = page.locator("details.folder").filter(has_text="Shell")
    expect(folder.get_by_role("link", name="Where am I")).to_be_visible()
    chat.menu("Where am I", "Pin")
    pinned = page.locator(".group").filter(has_text="Pinned")
    expect(pinned.get_by_role("link", name="Where am I")).to_be_visible()
    page.reload()
    expect(pinned.get_by_role("link", name="Where am I")).to_be_visible()

    chat.menu("Where am I", "Delete")
    expect(chat.row("Where am I")).to_have_count(0)
    chat.notice.get_by_role("button", name="Undo").click()
    expect(chat.row("Where am I")).to_be_visible()
    expect(chat.messages).to_have_count(2)
    chat.menu("Where am I", "Delete")
    expect(chat.row("Where am I")).to_have_count(0)
    page.get_by_role("button", name="Deleted", exact=True).click()
    page.locator("li.row").filter(has_text="Where am I").get_by_role("button", name="Restore").click()
    page.get_by_role("button", name="Deleted", exact=True).click()
    chat.row("Where am I").click()
    expect(chat.messages).to_have_count(2)

    chat.row("Where am I").hover()
    page.get_by_role("button", name="Actions for Where am I").click()
    with page.expect_download() as downloading:
        page.get_by_role("menuitem", name="Export as JSON").click()
    file = tmp_path / downloading.value.suggested_filename
    downloading.value.save_as(file)
    chat.menu("Where am I", "Delete")
    expect(chat.row("Where am I")).to_have_count(0)
    page.get_by_role("link", name="Settings").click()
    chat.imported_files.set_input_files(file)
    page.locator(".notice", has_text="Imported 1 conversation").get_by_role("button", name="Open").click()
    expect(chat.messages).to_have_count(2)
    expect(chat.messages.first).to_contain_text("print the current folder")


def test_deleted_conversations_say_how_long_they_are_kept_and_there_is_a_way_back(
    tmp_path: Path, chromium: Browser
) -> None:
    path = tmp_path / "conversations.sqlite3"
    with ConversationStore(path) as store:
        store.create(title="Still here")
        for title in ("Old", "Oldest"):
            store.delete(store.create(title=title).id)
    with closing(sqlite3.connect(path)) as database:
        for title, days in (("Old", 3.5), ("Oldest", 29.5)):
            database.execute("UPDATE conversation SET deleted = ? WHERE title = ?", (time.time() - days * DAY_S, title))
        database.commit()
    with opened(chromium, tmp_path) as app, app.window() as chat:
        page = chat.page
        toggle = page.get_by_role("button", name="Deleted", exact=True)
        toggle.click()
        on = time.strftime("%b ", time.localtime(time.time() - 3.5 * DAY_S))
        rows = page.locator("li.row")
        expect(rows.nth(0)).to_contain_text(f"Old{on}")
        expect(rows.nth(0)).to_contain_text(", 27 days left")
        expect(rows.nth(1)).to_contain_text(", 1 day left")
        page.set_viewport_size({"width": 390, "height": 844})
        page.get_by_role("button", name="Show the sidebar").click()
        look(page, "deleted")
        page.get_by_role("button", name="Back to the conversations").click()
        expect(chat.row("Still here")).to_be_visible()
        expect(toggle).to_be_focused()
        expect(toggle).to_have_attribute("aria-pressed", "false")


def test_two_windows_show_the_same(bundled: OpenedApp) -> None:
    with bundled.window() as one:
        one.ask("show my user name")
        with bundled.window(path=f"/#/c/{one.id()}") as two:
            expect(two.messages).to_have_count(2)
            two.ask("show the host name")
            expect(one.messages).to_have_count(4)
            expect(one.answers.last).to_have_attribute("data-state", "complete")
            assert one.answers.last.locator(".md").inner_text() == two.answers.last.locator(".md").inner_text()
            one.answers.last.get_by_role("button", name="Regenerate").click()
            expect(two.answers.last.locator(".branches")).to_contain_text("2 / 2")
            two.menu("show my user name", "Rename …")
            two.page.get_by_role("dialog").get_by_role("textbox").fill("Names")
            two.page.keyboard.press("Enter")
            expect(one.page.get_by_role("heading", level=1)).to_have_text("Names")
            two.menu("Names", "Delete")
            expect(one.row("Names")).to_have_count(0)
            one.notice.get_by_role("button", name="Undo").click()
            expect(two.row("Names")).to_be_visible()
            expect(one.messages).to_have_count(4)


def test_settings_of_a_conversation_are_checked_and_kept(chat: ChatPage) -> None:
    page = chat.page
    chat.ask("show all processes")
    page.get_by_role("button", name="Settings of this conversation").click()
    dialog = page.get_by_role("dialog", name="Settings of this conversation")
    dialog.get_by_label("Temperature").fill("7")
    expect(dialog.get_by_text("This must be from 0 to 5.")).to_be_visible()
    dialog.get_by_role("button", name="Save", exact=True).click()
    expect(dialog.get_by_label("Temperature")).to_be_focused()
    dialog.get_by_label("Temperature").fill("0.5")
    dialog.get_by_label("Longest answer").fill("3")
    dialog.get_by_label("System prompt").fill("Answer briefly.")
    dialog.get_by_role("button", name="Save as preset …").click()
    page.get_by_role("dialog", name="Save as preset …").get_by_role("textbox").fill("Brief")
    page.keyboard.press("Enter")
    expect(dialog.get_by_label("Preset", exact=True)).to_have_value("Brief")
    dialog.get_by_role("button", name="Save", exact=True).click()
    expect(dialog).to_have_count(0)
    chat.send("show all processes of root")
    answer = chat.in_state("length")
    expect(answer).to_contain_text("The limit of tokens is reached.")

    chat.new_chat()
    page.get_by_role("button", name="Settings of this conversation").click()
    expect(dialog.get_by_label("Longest answer")).to_have_value("")
    dialog.get_by_label("Preset", exact=True).select_option("Brief")
    dialog.get_by_role("button", name="Apply").click()
    expect(dialog.get_by_label("Longest answer")).to_have_value("3")
    expect(dialog.get_by_label("System prompt")).to_have_value("Answer briefly.")
    dialog.get_by_role("button", name="Save", exact=True).click()
    expect(dialog).to_have_count(0)
    chat.send("show all processes of root")
    chat.in_state("length")


def test_a_conversation_that_outgrows_the_context_does_what_its_settings_say(
    tmp_path: Path, chromium: Browser, endless_bundle: Path
) -> None:
    with opened(chromium, tmp_path, endless_bundle, "--draft", "none", "--context", "64") as app, app.window() as chat:
        page = chat.page
        dialog = page.get_by_role("dialog", name="Settings of this conversation")
        choice = dialog.get_by_label("Longer than the context")

        def choose(words: str, shown: str) -> None:
            page.keyboard.press("Control+Shift+s")
            choice.focus()
            page.keyboard.type(words)  # what a list of choices takes for the beginning of one
            expect(choice).to_have_value(shown)
            dialog.get_by_role("button", name="Save", exact=True).press("Enter")
            expect(dialog).to_have_count(0)

        page.keyboard.press("Control+Shift+s")
        expect(choice).to_have_value("")
        dialog.get_by_label("Longest answer").fill("200")
        page.keyboard.press("Enter")
        expect(dialog).to_have_count(0)
        choose("Begin", "error")
        chat.send("a long message " * 30)
        expect(chat.in_state("failed")).to_contain_text("use the overflow trim or window")
        choose("Keep", "window")
        expect(page.locator(".meter-note")).to_have_text("The oldest text is left out")
        chat.answers.last.get_by_role("button", name="Regenerate").click()
        expect(chat.in_state("length").locator(".statistics")).to_contain_text("200 tokens")
        page.reload()
        page.keyboard.press("Control+Shift+s")
        expect(choice).to_have_value("window")
        expect(choice).to_have_accessible_description(
            "What happens when the conversation no longer fits what the model can read at once."
        )


def test_settings_of_the_app_hold_in_every_window(bundled: OpenedApp) -> None:
    with bundled.window(path="/#/settings") as one, bundled.window() as two:
        one.page.get_by_label("Dark").check()
        expect(two.page.locator("html")).to_have_attribute("data-theme", "dark")
        one.page.get_by_label("Ctrl+Enter sends, Enter begins a line").check()
        expect(two.page.get_by_text("Ctrl+Enter sends")).to_be_visible()
        two.composer.fill("first line")
        two.composer.press("Enter")
        expect(two.composer).to_have_value("first line\n")
        two.composer.press("Control+Enter")
        two.in_state("complete")
        one.page.get_by_label("As the system").check()
        one.page.get_by_label("Enter sends, Shift+Enter begins a line").check()
        expect(two.page.get_by_text("Enter sends, Shift+Enter begins a line")).to_be_visible()


def test_nothing_is_lost_when_the_app_ends_and_starts_again(
    tmp_path: Path, chromium: Browser, endless_bundle: Path
) -> None:
    options = (endless_bundle, "--draft", "none")
    with running_app(tmp_path, *options) as app, browser_page(app.url, within=chromium) as window:
        chat = ChatPage(window.page)
        chat.send("hello")
        chat.begun()
        # Tokens are kept from time to time.
        kept = "async (id) => (await (await fetch(`/api/messages/${id}/tokens`)).json()).tokens.length > 10"
        id_ = chat.answers.last.get_attribute("data-message")
        wait_until(lambda: bool(chat.page.evaluate(kept, id_)))
        app.process.kill()
        banner = chat.page.get_by_role("alert").filter(has_text="The edge-run app has ended; start it again.")
        expect(banner).to_be_visible()
        chat.composer.fill("a thought meanwhile")
        with running_app(tmp_path, *options, "--port", str(app.port)):
            expect(banner).to_have_count(0)
            answer = chat.in_state("interrupted")
            expect(answer.get_by_role("button", name="Continue")).to_be_visible()
            expect(answer.locator(".md")).not_to_be_empty()
            expect(chat.messages.first).to_contain_text("hello")
            expect(chat.composer).to_have_value("a thought meanwhile")
            chat.page.reload()
            expect(chat.answers.last).to_have_attribute("data-state", "interrupted")
            expect(chat.composer).to_have_value("a thought meanwhile")
            window.errors.clear()  # the browser reports every connection that failed


def test_a_new_chat_and_the_sidebar_on_a_phone(bundled: OpenedApp) -> None:
    with bundled.window(size=(390, 500)) as chat:
        expect(chat.page.locator(".example").last).to_be_attached()
        heading = chat.page.get_by_role("heading", name="Describe what the shell should do")
        expect(heading).to_be_in_viewport(ratio=1)
        assert chat.page.get_by_role("button", name="Jump to the latest").count() == 0
        chat.page.set_viewport_size({"width": 390, "height": 844})
        chat.ask("show the kernel version")
        expect(chat.row("show the kernel version")).not_to_be_visible()
        opener = chat.page.get_by_role("button", name="Show the sidebar")
        opener.click()
        expect(chat.row("show the kernel version")).to_be_visible()
        expect(chat.page.get_by_role("button", name="Hide the sidebar")).to_be_focused()
        chat.page.keyboard.press("Escape")
        expect(chat.row("show the kernel version")).not_to_be_visible()
        expect(opener).to_be_focused()
        assert chat.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_an_answer_is_regenerated_with_another_model(tmp_path: Path, chromium: Browser, tiny_bundle: Path) -> None:
    with ConversationStore(tmp_path / "conversations.sqlite3") as store:
        path = f"/#/c/{store.create(sampling={'max_tokens': 3}).id}"
    with opened(chromium, tmp_path, tiny_bundle, "--draft", "none") as app, app.window(path=path) as chat:
        page = chat.page
        chat.send("list files")
        first = chat.in_state("length")
        expect(first.locator(".message-name")).to_have_text("bundle")
        chat.more(first, "Regenerate with another model …")
        choices = page.get_by_role("dialog", name="Regenerate with").locator("li")
        expect(choices).to_have_count(1)
        look(page, "another-model")
        choices.get_by_role("button", name=re.compile("shell-helper")).click()
        second = chat.answers.last
        expect(second.locator(".message-name")).to_have_text("shell-helper")
        expect(second).to_have_attribute("data-state", re.compile("complete|length"))
        expect(second.locator(".branches")).to_contain_text("2 / 2")
        look(page, "another-answer")
        second.get_by_role("button", name="Previous branch").click()
        expect(first.locator(".message-name")).to_have_text("bundle")
        chat.send("and hidden ones")  # the conversation still has its own model
        expect(chat.answers).to_have_count(2)
        expect(chat.in_state("length").locator(".message-name")).to_have_text("bundle")

        page.keyboard.press("Control+,")
        use = page.get_by_role("region", name="Use of the models").get_by_role("row")
        expect(use).to_have_count(4)
        expect(use.filter(has_text="bundle").get_by_role("cell").first).to_have_text("2")
        expect(use.filter(has_text="shell-helper").get_by_role("cell").first).to_have_text("1")
        expect(use.last).to_have_text(re.compile(r"^Total3\d+"))
        use.last.scroll_into_view_if_needed()
        look(page, "usage")


ANSWER = "## Sizes\n\n- **Large** files: `<img src=x onerror=alert(1)>`\n- see `du -sh *.py`"


@pytest.fixture(scope="module")
def palette(tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Iterator[Page]:
    """A window of an app with two conversations."""
    home = tmp_path_factory.mktemp("home")
    with ConversationStore(home / "conversations.sqlite3") as store:
        first = store.create(title="Disk usage").id
        question = store.add_message(first, None, "user", "What takes room?")
        store.add_message(first, question.id, "assistant", ANSWER)
        store.create(title="Models of clouds")
    with running_app(home) as app, browser_page(app.url, within=chromium) as window:
        expect(window.page.get_by_role("link", name="Disk usage")).to_be_visible()
        yield window.page


def entries_of(page: Page, query: str) -> Locator:
    """Open the palette by its keys and type; returns its entries once the messages are known."""
    page.keyboard.press("Control+k")
    page.keyboard.type(query)
    expect(page.get_by_role("status").filter(has_text="ound")).to_be_visible()
    return page.get_by_role("option")


def test_entries_are_chosen_by_keys_alone(palette: Page) -> None:
    page = palette
    page.keyboard.press("Control+k")
    entries = page.get_by_role("option")
    expect(entries.nth(0)).to_contain_text("Models of cloudsConversation")
    expect(entries.filter(has_text="New chat")).to_be_visible()
    look(page, "palette")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)

    entries = entries_of(page, "models")
    expect(entries).to_have_text(["ModelsAction", "Models of cloudsConversation"])
    page.keyboard.press("ArrowDown")
    expect(entries.nth(1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Models of clouds")

    entries_of(page, "models")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Models")
    entries_of(page, "keyb")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    for theme in ("dark", "light"):
        entries_of(page, "theme")
        page.keyboard.press("Enter")
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
    entries_of(page, "deleted conv")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Back to the conversations").click()

    # Messages are shown without marks of Markdown, and with the words marked.
    hit = entries_of(page, "large onerror")
    expect(hit).to_have_count(1)
    expect(hit.locator("span")).to_have_text("Sizes Large files: <img src=x onerror=alert(1)> see du -sh *.py")
    expect(hit.locator("span mark")).to_have_text(["Large", "onerror"])
    assert hit.locator("img").count() == 0
    look(page, "palette-messages")
    box = page.get_by_role("combobox", name="Words to search for")
    box.fill("no such thing at all")
    expect(page.get_by_text("Nothing found")).to_be_visible()
    box.fill("LARGE onerror")
    hit.click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator(".message.assistant")).to_be_focused()
