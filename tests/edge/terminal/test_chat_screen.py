"""The chat on an emulated terminal: what a user types, and sees."""

from __future__ import annotations

import base64
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import pytest

pytest.importorskip("onnx", reason="needs the export extra")

from edgerun.edge.conversations.records import MessageState, Role, StoredMessage
from edgerun.edge.conversations.store import FILE_NAME, ConversationStore
from support.nightly import some_nightly
from support.processes import EDGE_RUN
from support.terminal_screen import TerminalScreen, terminal_screen

OpenChat: TypeAlias = Callable[..., TerminalScreen]

UP = "\x1b[A"
ALT_ENTER = "\x1b\r"
CTRL_C = "\x03"
STARTED = (
    sys.executable,
    "-c",
    "import sys; from edgerun.edge.cli.ctrl_c import end_on_ctrl_c; end_on_ctrl_c(); print('started', flush=True); "
    "from edgerun.edge.cli.main import main; sys.exit(main())",
)
"""The command, which says when it has taken over Ctrl-C from Python's own start."""
QUIET = ("--spec", "off", "-n", "4")
"""Without drafting the model's speed is not measured, which would take the first answer seconds."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def open_chat(home: Path) -> Iterator[OpenChat]:
    """Opens a chat on a terminal of its own; every process has ended after the test."""
    with ExitStack() as opened:

        def open_(
            *arguments: object,
            command: Sequence[str] = EDGE_RUN,
            columns: int = 80,
            lines: int = 24,
            **environment: str,
        ) -> TerminalScreen:
            command = [*command, *map(str, arguments)]
            variables = {"EDGERUN_HOME": str(home), **environment}
            chat = opened.enter_context(terminal_screen(command, columns=columns, lines=lines, environment=variables))
            if STARTED[2] not in command:
                chat.until_prompt()
            return chat

        yield open_


def stored(home: Path) -> list[StoredMessage]:
    """The messages of the latest conversation, in the order in which they were added."""
    with ConversationStore(home / FILE_NAME) as store:
        return store.messages(store.conversations()[0].id)


def said(home: Path) -> list[str]:
    """What the user has said in the latest conversation."""
    return [message.content for message in stored(home) if message.role is Role.USER]


def say(chat: TerminalScreen, text: str) -> str:
    """Type a line at the prompt; returns what is on the screen at the next one."""
    shown = f"> {text}"[: chat.columns]
    before = chat.until_prompt().count(shown)
    chat.type(text + "\r")
    chat.wait_for(lambda: chat.text.count(shown) > before)
    return chat.until_prompt()


def leave(chat: TerminalScreen) -> None:
    chat.until_prompt()
    chat.type("/quit\r")
    assert chat.end() == 0


def test_sixty_pasted_lines_are_one_message(open_chat: OpenChat, long_bundle: Path, home: Path) -> None:
    chat = open_chat(long_bundle, *QUIET)
    text = "".join(f"{n}\té漢 \U0001f600\n" for n in range(60))
    chat.paste(text)
    chat.until("> [pasted text 1: 60 lines]")
    chat.type(" sum up")
    chat.until("60 lines] sum up")
    chat.type("\r")
    chat.until("tokens/s")
    leave(chat)
    assert said(home) == [f"{text} sum up"]
    assert chat.text.count("\n") < 12

    again = open_chat(long_bundle, *QUIET)
    again.type(UP)  # what was sent, whole
    again.until("59")
    again.type(CTRL_C)
    again.until("to leave: /quit or Ctrl-D")
    again.until_prompt()
    again.paste(text)
    again.until("60 lines]")
    again.type("\x7fshort")  # the words for a pasted text are erased as one
    again.until("> short")
    again.paste("pasted\n line")  # and a short one is shown
    again.until("line")
    again.type("\r")
    again.until("tokens/s")
    leave(again)
    assert said(home) == ["shortpasted\n line"]


def test_several_lines_and_wide_characters_are_edited(open_chat: OpenChat, tiny_bundle: Path, home: Path) -> None:
    chat = open_chat(tiny_bundle, *QUIET, columns=20)
    chat.type(f"one{ALT_ENTER}two\nthree\\\rfour\r")
    chat.until("> one\n  two\n  three\n  four\n")
    chat.until_prompt()
    chat.type("漢字かな" * 5 + "x")
    chat.wait_for(lambda: "x" in chat.text)
    chat.type("\x7f\x7f!\r")
    leave(chat)
    assert said(home) == ["one\ntwo\nthree\nfour", "漢字かな" * 4 + "漢字か!"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_what_was_typed_is_there_in_the_next_run_unless_it_is_not_to_be_kept(
    open_chat: OpenChat, tiny_bundle: Path, home: Path
) -> None:
    chat = open_chat(tiny_bundle, *QUIET)
    say(chat, "the first")
    leave(chat)
    kept = home / "typed.jsonl"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert (home / FILE_NAME).stat().st_mode & 0o777 == 0o600

    secret = open_chat(tiny_bundle, *QUIET, "--no-save")
    assert "not saved" in secret.text
    secret.type(UP + UP)
    secret.until("> the first")
    secret.type(" secret\r")
    secret.until("tokens/s")
    leave(secret)
    assert "secret" not in kept.read_text(encoding="utf-8")
    assert said(home) == ["the first"]
    assert not any(b"secret" in path.read_bytes() for path in home.rglob("*") if path.is_file())


def test_commands_paths_and_names_are_completed(open_chat: OpenChat, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "notes of today.txt").write_text("the other\n" * 5, encoding="utf-8")
    chat = open_chat(tiny_bundle, *QUIET)
    chat.type("/lo")
    chat.until("attach a text file")  # the only command that begins so
    chat.type("\t")
    chat.until("> /load")
    chat.type(f" {tmp_path}/not")
    chat.wait_for(lambda: "/not" in chat.text.replace("\n", "").replace("  ", ""))
    chat.type("\t")
    chat.wait_for(lambda: "today.txt" in chat.text.replace("\n", "").replace("  ", ""))
    chat.type("\r")
    chat.until("tokens, of a context of 256")
    chat.until("1 file attached")
    say(chat, "more")
    assert re.search(r"prompt \d+ tokens", say(chat, "/stats"))
    chat.type("/set temp")
    chat.until("> /set temp")
    chat.type("\t")
    chat.until("> /set temperature")
    chat.type(" 0.5\r")
    chat.until("\ntemperature 0.5\n")
    assert "did you mean top_k?" in say(chat, "/set top_kk 3")
    assert "seed is 'x'; write a whole number" in say(chat, "/set seed x")
    assert "it must be above 0 and at most 1" in say(chat, "/set top_p 7")
    leave(chat)
    question = next(message for message in stored(tmp_path / "home") if message.role is Role.USER)
    assert [(each.name, each.text) for each in question.attachments] == [("notes of today.txt", "the other\n" * 5)]


def test_the_tree_of_a_conversation(open_chat: OpenChat, tiny_bundle: Path, home: Path) -> None:
    chat = open_chat(tiny_bundle, *QUIET, lines=60)
    say(chat, "/set temperature 1.5")
    say(chat, "/set seed 7")
    say(chat, "the first")
    say(chat, "/regenerate")
    shown = say(chat, "/branch")
    assert "after you: the first" in shown
    assert re.search(r"  2  answer: .* \(shown\)", shown)
    assert "(shown)" in say(chat, "/branch 1")
    chat.type("/edit\r")
    chat.until("> the first\n")
    chat.type("!\r")
    chat.until("> the first!")
    shown = say(chat, "/branch")
    assert "at the beginning" in shown
    assert "2  you: the first! (shown)" in shown
    assert "there is no number '9'; write a number from 1 to" in say(chat, "/branch 9")
    say(chat, "/continue")
    say(chat, "more")
    assert "removed: you: more" in say(chat, "/undo")
    say(chat, "/title A fine title")
    assert "A fine title (this one)" in say(chat, "/conversations")
    leave(chat)
    messages = stored(home)
    assert [message.content for message in messages if message.role is Role.USER] == ["the first", "the first!"]
    assert len(messages) == 5
    assert all(message.state in {MessageState.LENGTH, MessageState.COMPLETE} for message in messages)
    assert len(messages[-1].content) > len(messages[2].content) // 4

    again = open_chat("--continue", *QUIET)
    shown = again.until_prompt()
    assert "A fine title\n> the first!\n" in shown
    assert "bundle on CPU" in shown  # the model of the conversation
    assert "new conversation" in say(again, "/new")
    say(again, "something else")
    assert "A fine title: " in say(again, "/search first!")
    assert "\n> the first!\n" in say(again, "/open 1")
    again.type("/delete\r")
    again.until("delete A fine title? [y/N]")
    again.type("y\r")
    again.until("deleted; /undelete restores it")
    assert "\n> the first!\n" in say(again, "/undelete")
    again.type("/delete\r")
    again.until("delete A fine title? [y/N]")
    again.type("y\r")
    again.until("deleted")
    leave(again)
    assert said(home) == ["something else"]


def test_a_context_that_is_full_leaves_out_the_first_turns(open_chat: OpenChat, tiny_bundle: Path) -> None:
    chat = open_chat(tiny_bundle, "--spec", "off", "-n", "20")
    for number in range(8):
        say(chat, f"{number} " + "the other " * 20)
    assert "the conversation is longer than the context of 256 tokens: the model no longer reads the" in " ".join(
        chat.text.split()
    )
    chat.type("x" * 300 + "\r")
    chat.until("the last message does not fit the context")
    chat.wait_for(lambda: chat.text.count("x" * 70) > 4)  # it is at the prompt again, to be shortened
    chat.type(CTRL_C)
    leave(chat)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_copying_and_exporting(open_chat: OpenChat, tiny_bundle: Path, tmp_path: Path, home: Path) -> None:
    chat = open_chat(tiny_bundle, *QUIET, DISPLAY="", WAYLAND_DISPLAY="")
    say(chat, "the first")
    assert "copied" in say(chat, "/copy")
    (answer,) = (message.content for message in stored(home) if message.role is Role.ASSISTANT)
    encoded = base64.b64encode(answer.encode()).decode()
    assert f"\x1b]52;c;{encoded}\x07" in chat.output
    path = tmp_path / "chat.md"
    assert "written to" in say(chat, f"/export {path}")
    assert "the first" in path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("mine", encoding="utf-8")
    chat.type(f"/export {path}\r")
    chat.until("replace it? [y/N]")
    chat.type("\r")
    chat.until("not saved")
    assert path.read_text(encoding="utf-8") == "mine"
    leave(chat)


def test_another_model_goes_on_with_the_conversation(
    open_chat: OpenChat, tiny_bundle: Path, long_bundle: Path, home: Path
) -> None:
    chat = open_chat(tiny_bundle, *QUIET)
    say(chat, "the first")
    assert "of 256 tokens" in chat.text
    assert "there is no model 'nothing'; on this machine are: shell-helper" in say(chat, "/model nothing")
    say(chat, f"/model {long_bundle}")
    assert "of 4096 tokens" in chat.text
    say(chat, "the second")
    leave(chat)
    models = {message.model for message in stored(home) if message.role is Role.ASSISTANT}
    assert models == {str(tiny_bundle.resolve()), str(long_bundle.resolve())}


def test_the_bundled_model_says_what_it_is(open_chat: OpenChat) -> None:
    chat = open_chat("--spec", "off")
    shown = " ".join(chat.until_prompt().split())
    assert "It turns a request into a shell command, without regard to earlier ones, and it does not chat." in shown
    assert "edge-run pull onnx-community/Qwen2.5-0.5B-Instruct" in shown
    assert "this model writes shell commands only" not in say(chat, "list all files")
    assert "this model writes shell commands only" in say(chat, "hi")
    leave(chat)


def test_resizing_during_input_and_during_an_answer(open_chat: OpenChat, endless_bundle: Path, home: Path) -> None:
    chat = open_chat(endless_bundle, "--spec", "off", "-t", "1", "--seed", "1")
    chat.type("several words that are typed")
    for columns, lines in ((30, 10), (100, 40), (20, 5), (80, 24)):
        chat.resize(columns, lines)
        chat.wait_for(lambda: "typed" in chat.text)
    chat.type("\r")
    chat.wait_for(lambda: len(chat.output) > 4000)
    for columns, lines in ((30, 10), (100, 40), (20, 5), (80, 24)):
        chat.resize(columns, lines)
        seen = len(chat.output)
        chat.wait_for(lambda seen=seen: len(chat.output) > seen + 1000)
    chat.type("kept for the prompt" + CTRL_C)
    chat.until("stopped")
    chat.until("> kept for the prompt")
    chat.type(CTRL_C)
    leave(chat)
    question, answer = stored(home)
    assert question.content == "several words that are typed"
    assert answer.state is MessageState.STOPPED
    assert answer.content


@pytest.mark.parametrize("seed", some_nightly(range(40), every=20))
def test_ctrl_c_at_any_moment(open_chat: OpenChat, endless_bundle: Path, seed: int) -> None:
    """A chat goes on, or has ended with the exit code of an interrupt; the terminal is as it was."""
    moments = random.Random(seed)
    chat = open_chat(endless_bundle, "--spec", "off", "-t", "1", "--seed", "1", command=STARTED)
    chat.until("started")
    keys = ["the other\r", "more\r", f"one{ALT_ENTER}two\r", "/help\r", "/regenerate\r", "/re\t", "/new\r"]
    if seed % 2:
        chat.read_for(moments.uniform(0, 3))
    else:
        chat.until_prompt()
    for _ in range(8):
        if chat.process.poll() is not None:
            break
        chat.type(moments.choice(keys))
        chat.read_for(moments.uniform(0, 0.4))
        if moments.random() < 0.5:
            chat.type(CTRL_C)
        else:
            chat.process.send_signal(signal.SIGINT)
        chat.read_for(moments.uniform(0, 0.2))
    for _ in range(240):  # two minutes, far above what it takes
        if chat.process.poll() is not None or chat.at_prompt:
            break
        chat.type(CTRL_C)  # keys that were waiting may have begun another answer
        chat.read_for(0.5)
    if chat.process.poll() is None:
        leave(chat)
    else:
        # At its very end Python gives the signal back to the system, and a shell sees 130 then as well.
        assert chat.end() in {130, -signal.SIGINT}
    assert "Traceback" not in chat.text
    assert "Exception" not in chat.text
    assert chat.modes == chat.first_modes
    assert chat.output.count("\x1b[?25l") <= chat.output.count("\x1b[?25h"), "the cursor is hidden"
    assert chat.output.count("\x1b[?2004h") <= chat.output.count("\x1b[?2004l"), "the terminal still marks pasted text"


def test_a_narrow_terminal_and_no_colour_where_none_is_wanted(open_chat: OpenChat, tiny_bundle: Path) -> None:
    chat = open_chat(tiny_bundle, *QUIET, columns=20, lines=12, NO_COLOR="1")
    for line in ("the first", "/help", "/conversations", "/dance"):
        say(chat, line)
    assert max(map(len, chat.lines)) <= 20
    assert "/stats: show statistics of the last answer" in " ".join(chat.text.split())
    leave(chat)
    colours = {int(code) for codes in re.findall(r"\x1b\[([0-9;]+)m", chat.output) for code in codes.split(";") if code}
    assert not {code for code in colours if 30 <= code <= 49 or 90 <= code <= 107}


MARKDOWN = """\
# Title

Some **bold** words, `code`, and enough further words that the paragraph takes several lines.

- first item
- second item

| name | value |
|------|-------|
| one  | 1     |

```python
def f():
\treturn "x"
```

<think>kept</think> *.txt \\x1b[2J last words
"""
DRAWING = """
import sys, time
from edgerun.edge.terminal.chat.answer_view import MarkdownView
from edgerun.edge.terminal.output import SafeConsole
view = MarkdownView(SafeConsole())
for start in range(0, len(sys.argv[1]), 6):
    view.write(sys.argv[1][start : start + 6])
    time.sleep(0.01)  # it is drawn at most every 80 ms
view.close()
print("done")
"""


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (20, 6)])
def test_an_answer_is_rendered_while_it_grows(columns: int, lines: int) -> None:
    with terminal_screen([sys.executable, "-c", DRAWING, MARKDOWN * 3], columns=columns, lines=lines) as screen:
        screen.until("done")
        assert screen.end() == 0
        words = screen.text.split()
        assert screen.output.count("\x1b[2K") > 5, "it was drawn once only"
    for word in ("Title", "bold", "paragraph", "name", "def", "<think>kept</think>", "*.txt", "last"):
        assert words.count(word) == 3, f"{word} in {screen.text}"
    assert "**" not in screen.text
    assert "```" not in screen.text
    assert "\\x1b[2J" in screen.text
    assert "    return" in screen.text
    assert max(map(len, screen.lines)) <= columns
