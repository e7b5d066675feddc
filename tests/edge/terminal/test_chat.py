"""The chat on a terminal that cannot be drawn on (TERM=dumb), with its plain prompt."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import edgerun
from edgerun.edge.cli.run import RunOptions
from edgerun.edge.conversations.records import Attachment, Role
from edgerun.edge.conversations.store import ConversationStore
from edgerun.edge.terminal.chat.chat import Chat
from edgerun.edge.terminal.chat.chat_conversation import ChatModel
from edgerun.edge.terminal.interrupt import Interrupts
from edgerun.edge.tools.call_rounds import CallingAnswer
from edgerun.errors import DeviceError, EdgeError
from edgerun.models.progress import ProgressDisplay
from support.commands import Patch
from support.processes import EDGE_RUN
from support.terminal_screen import TerminalScreen, terminal_screen

PROMPT = "> "
IGNORING = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
"""Ignores Ctrl-C, as the parent process may."""


class Terminal:
    """A chat process, whose output is read piece by piece."""

    def __init__(self, screen: TerminalScreen) -> None:
        self.process, self.type, self.end = screen.process, screen.type, screen.end
        self.first = ""
        """What came before the first prompt."""
        self._screen = screen
        self._taken = 0

    @property
    def _unread(self) -> str:
        """What has not been read, without escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._screen.output).replace("\r\n", "\n")[self._taken :]

    def until(self, wanted: str) -> str:
        """Read up to and including `wanted`."""
        self._screen.wait_for(lambda: wanted in self._unread)
        found = self._unread.partition(wanted)[0] + wanted
        self._taken += len(found)
        return found

    def until_something(self, seconds: float = 120) -> bool:
        """Wait for any output that has not been read; returns whether there is some."""
        return bool(self._unread or self._screen.read(seconds))

    def say(self, line: str) -> str:
        """Type a line at the prompt; returns what came between it and the next prompt."""
        self.type(line + "\n")
        self.until(line + "\n")
        return self.until("\n" + PROMPT).removesuffix("\n" + PROMPT)

    def quit(self) -> None:
        """Leave the chat, which has to succeed."""
        self.type("/quit\n")
        assert self.end() == 0


OpenTerminal: TypeAlias = Callable[..., Terminal]


@contextmanager
def terminal(command: Sequence[str]) -> Iterator[Terminal]:
    """A terminal in which `command` runs."""
    with terminal_screen(command, columns=300, environment={"TERM": "dumb"}) as screen:
        yield Terminal(screen)


@pytest.fixture
def open_chat() -> Iterator[OpenTerminal]:
    """Opens a chat with the given arguments, up to its first prompt; every process has ended after the test."""
    with ExitStack() as opened:

        def open_(*arguments: str, ignoring: bool = False, first: str = "\n" + PROMPT) -> Terminal:
            program, option, code = EDGE_RUN
            chat = opened.enter_context(terminal([program, option, IGNORING * ignoring + code, *arguments]))
            chat.first = chat.until(first)
            return chat

        yield open_


def test_the_prefix_of_a_system_message_is_kept_on_disk_with_the_chat(
    open_chat: OpenTerminal, tiny_bundle: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path))
    for option, number in (("--no-save", 0), ("--save", 1)):
        system = "the one who is on to the other " * 8
        chat = open_chat(str(tiny_bundle), "-n", "4", "--ignore-eos", "--spec", "off", "--system", system, option)
        chat.type("hello\n")
        chat.until("hello\n")
        chat.until(PROMPT)  # the answer may be empty
        chat.quit()
        assert len(list(tmp_path.glob("prefixes/*/*.kv"))) == number


def test_a_conversation_with_every_command(open_chat: OpenTerminal, tiny_bundle: Path, tmp_path: Path) -> None:
    # Without drafting the model's speed is not measured, whose progress would be shown and erased around an answer. A
    # speed that was measured before would not do: one that other programs disturbed is measured again.
    chat = open_chat(str(tiny_bundle), "-n", "8", "--spec", "off")
    assert "/help for help" in chat.first
    assert "/save PATH" in chat.say("/help")
    assert "no answer yet" in chat.say("/stats")
    first = chat.say("the other is that the other")
    assert first
    shown = chat.say("/stats")
    assert "8 tokens at" in shown
    assert re.search(r", \d+ threads?\b", shown)
    chat.say("again")
    assert "reused" in chat.say("/stats")
    assert "new conversation" in chat.say("/reset")
    assert chat.say("the other is that the other") == first
    assert "saved; continue with --resume" in chat.say(f"/save {tmp_path / 'chat.kv'}")
    assert (tmp_path / "chat.kv").is_file()
    assert "system message: none" in chat.say("/system")
    assert "system message: speak up" in chat.say("/system speak up")
    assert "system message: speak up" in chat.say("/system")
    assert "unknown command /dance; /help lists the commands" in chat.say("/dance")
    assert "unknown command /regenrate; did you mean /regenerate?" in chat.say("/regenrate")
    assert "new conversation" in chat.say("/new")
    assert "title has 201 characters; at most 200 are kept" in chat.say(f"/title {'x' * 201}")
    assert "title: none" in chat.say("/title")
    chat.type("x" * 300 + "\n")
    chat.until("shorten it or its attachments, or load the model with a longer context")
    chat.until("\n" + PROMPT)
    assert chat.say("the other")
    chat.quit()

    shown = f"> the other is that the other\n{first}\n{PROMPT}"
    resumed = open_chat(str(tiny_bundle), "-n", "8", "--resume", str(tmp_path / "chat.kv"), "--no-save", first=shown)
    resumed.say("again")
    assert "reused" in resumed.say("/stats")
    resumed.type("\x04")
    assert resumed.end() == 0


def test_a_saved_conversation_is_private_and_replaces_only_what_it_may(
    open_chat: OpenTerminal, tiny_bundle: Path, tmp_path: Path
) -> None:
    path, folder = tmp_path / "my chat.kv", tmp_path / "folder"
    path.write_text("mine", encoding="utf-8")
    path.chmod(0o644)
    folder.mkdir()
    chat = open_chat(str(tiny_bundle), "-n", "2")
    chat.say("the other")
    for answer in ("n", "", "\x04"):
        chat.type(f"/save {path}\n")
        chat.until("replace it? [y/N] ")
        chat.type(answer + "\n" * (answer != "\x04"))
        assert "not saved" in chat.until("\n" + PROMPT)
        assert path.read_text(encoding="utf-8") == "mine"
    chat.type(f"/save {path}\n")
    chat.until("my chat.kv exists\nreplace it? [y/N] ")
    chat.type("y\n")
    assert f"saved; continue with --resume '{path}'" in chat.until("\n" + PROMPT)
    assert path.stat().st_mode & 0o777 == 0o600
    chat.say(f"/save {tmp_path / 'new.kv'}")
    assert (tmp_path / "new.kv").stat().st_mode & 0o777 == 0o600
    assert f"{folder} is a folder; name a new file" in chat.say(f"/save {folder}")
    assert "is not a file; name a new file" in chat.say("/save /dev/null")
    assert "does not exist; make it first, or save somewhere else" in chat.say(f"/save {tmp_path / 'no' / 'chat.kv'}")
    assert not (tmp_path / "no").exists()
    assert "/proc/chat.kv cannot be written" in chat.say("/save /proc/chat.kv")
    for name in ("chat.md", "chat.TXT", "chat.json", "chat.html"):
        assert "/export PATH writes Markdown or JSON" in chat.say(f"/save {tmp_path / name}")
        assert not (tmp_path / name).exists()
    chat.quit()


def test_ctrl_c_stops_the_answer_and_not_the_program(open_chat: OpenTerminal, endless_bundle: Path) -> None:
    chat = open_chat(str(endless_bundle), "-t", "1", "--seed", "1")
    for _ in range(2):
        chat.type("the\n")
        chat.until("the\n")
        assert chat.until_something()
        chat.process.send_signal(signal.SIGINT)
        assert "stopped" in chat.until("\n" + PROMPT)
    # A signal in the instant before readline waits for keys is seen at the next key: press again, as one does.
    for _ in range(20):
        chat.process.send_signal(signal.SIGINT)
        if chat.until_something(3):
            break
    chat.until("to leave: /quit or Ctrl-D\n" + PROMPT)
    chat.quit()


def test_where_ctrl_c_is_ignored_a_chat_ignores_it(open_chat: OpenTerminal, endless_bundle: Path) -> None:
    chat = open_chat(str(endless_bundle), "-t", "1", "--seed", "1", "-n", "100", ignoring=True)
    chat.type("the\n")
    chat.until("the\n")
    assert chat.until_something()
    chat.process.send_signal(signal.SIGINT)
    assert "stopped" not in chat.until("\n" + PROMPT)
    chat.process.send_signal(signal.SIGINT)
    assert "100 tokens at" in chat.say("/stats")
    chat.quit()


def test_a_chat_starts_where_python_has_no_readline(tiny_bundle: Path) -> None:
    program = "import sys; sys.modules['readline'] = None; from edgerun.edge.cli.main import main; sys.exit(main())"
    with terminal([sys.executable, "-c", program, str(tiny_bundle), "-n", "4"]) as chat:
        chat.until("\n" + PROMPT)
        assert chat.say("the other")
        chat.quit()


def test_a_line_that_ends_in_a_backslash_continues(open_chat: OpenTerminal, tiny_bundle: Path) -> None:
    chat = open_chat(str(tiny_bundle), "-n", "4")
    chat.type("the\\\n")
    chat.until("  ")
    chat.type("other\n")
    assert chat.until("\n" + PROMPT)
    chat.quit()


@pytest.mark.parametrize("failing", ["the store", "the model at once", "the model after some text"])
def test_a_message_that_cannot_be_answered_comes_back_with_its_attachments(
    tiny_bundle: Path, monkeypatch: Patch, failing: str
) -> None:
    def open_model(name: str | None, _progress: object) -> edgerun.Engine:
        return edgerun.load(name, cache=False)

    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise DeviceError("the device is gone", "start again")

    def fail_after_text(answer: CallingAnswer, chunk: edgerun.Chunk) -> str:
        answer.content += chunk.text
        if answer.content:
            fail()
        return ""

    attached = Attachment("notes.txt", "the other")
    with ConversationStore.in_memory() as store, ExitStack() as stack:
        model = ChatModel(open_model, str(tiny_bundle), ProgressDisplay())
        stack.callback(model.close)
        chat = Chat(model, store, Interrupts(), RunOptions(), edgerun.GenerateOptions(max_tokens=4))
        chat.say("the one")
        before = chat.conversation.branch()
        if failing == "the store":
            monkeypatch.setattr(store, "add_message", fail)
        elif failing == "the model at once":
            monkeypatch.setattr(model.engine, "answer", fail)
        else:
            monkeypatch.setattr(CallingAnswer, "add", fail_after_text)
        chat.attachments.append(attached)
        with pytest.raises(EdgeError, match="the device is gone"):
            chat.say("the other")
        if failing == "the model after some text":
            *_, question, answer = chat.conversation.branch()
            assert (question.content, question.attachments) == ("the other", (attached,))
            assert answer.content
            assert answer.error
            assert (chat.draft, chat.attachments) == ("", [])
        else:
            assert chat.conversation.branch() == before
            assert before[-1].role is Role.ASSISTANT
            assert (chat.draft, chat.attachments) == ("the other", [attached])


@pytest.mark.parametrize("options", [["--raw"], ["--json"], ["--json-stream"]])
def test_options_that_need_a_prompt_are_refused_in_a_chat(
    open_chat: OpenTerminal, tiny_bundle: Path, options: list[str]
) -> None:
    chat = open_chat(str(tiny_bundle), *options, first="standard input")
    assert f"edge-run: error: {options[0]} needs a prompt; give -p TEXT" in chat.first
    assert chat.end() == 2
