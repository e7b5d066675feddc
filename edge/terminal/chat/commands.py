"""The commands of the chat."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from ....errors import InputError
from ....models.atomic import write_atomically
from ....models.safe_text import on_one_line
from ....models.text_files import read_text
from ....runtime.options import GenerateOptions
from ...conversations.context_fit import model_messages
from ...conversations.records import SAMPLING_FIELDS, Attachment, Conversation, Role, StoredMessage
from .chat import Chat
from .chat_conversation import ChatConversation
from .chat_model import is_bundled, local_models, model_name_of
from .clipboard import copy_to_clipboard

_LISTED: Final = 20
"""Largest number of conversations in a list."""
_TABLE_WIDTH: Final = 60
"""Number of columns below which lists are lines instead of tables."""
_BEGINNING: Final = 60
"""Number of characters that a list shows of a message."""
_KEYS: Final = (
    "Ctrl-C stops an answer. Enter sends; Alt+Enter, Ctrl-J, or Enter after a backslash begins a new line. "
    "Pasted lines are one message."
)


@dataclass(frozen=True)
class Command:
    """A command of the chat."""

    name: str
    argument: str
    """What its argument is called; empty if it takes none."""
    summary: str
    run: Callable[[str], None]
    candidates: Callable[[], Iterable[str]] = tuple
    """What its argument may be, for completion."""
    takes_path: bool = False


class ChatCommands:
    """The commands of a chat, by their names."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._listed: list[str] = []
        """Ids of the conversations in the last list, which `/open` takes by their number."""
        commands = [
            Command("/help", "", "show this list", self._help),
            Command(
                "/model",
                "[NAME]",
                "answer with another model, or list those on this machine",
                self._model,
                local_models,
            ),
            Command("/regenerate", "", "answer the last message once more", self._regenerate),
            Command("/continue", "", "let the last answer go on", self._continue),
            Command("/edit", "", "change the last message, and answer it again", self._edit),
            Command("/undo", "", "remove the last message and its answer", self._undo),
            Command("/branch", "[N]", "list the other answers and messages, or show number N", self._branch),
            Command(
                "/set",
                "[NAME VALUE]",
                "set a sampling option, such as temperature 0.7; without VALUE, undo that",
                self._set,
                lambda: SAMPLING_FIELDS,
            ),
            Command("/system", "[TEXT]", "set the system message (none for none), or show it", self._system),
            Command(
                "/preset",
                "[NAME]",
                "take system message and sampling of a preset, or list the presets",
                self._preset,
                self._preset_names,
            ),
            Command(
                "/load",
                "[FILE]",
                "attach a text file to the next message; without FILE, take all back",
                self._load,
                takes_path=True,
            ),
            Command("/copy", "", "copy the last answer to the clipboard", self._copy),
            Command("/raw", "", "show answers as they are, or as rendered Markdown again", self._raw),
            Command("/clear", "", "clear the screen", self._clear),
            Command("/stats", "", "show statistics of the last answer", self._stats),
            Command("/conversations", "", "list the latest conversations", self._conversations),
            Command("/open", "N|ID|TITLE", "go on with another conversation", self._open, self._titles),
            Command("/search", "TEXT", "find messages in all conversations", self._search),
            Command("/title", "TEXT", "name this conversation", self._title),
            Command("/new", "", "start a new conversation", self._new),
            Command("/delete", "", "delete this conversation", self._delete),
            Command(
                "/save",
                "PATH",
                "save the conversation for you alone; continue it later with --resume PATH",
                self._save,
                takes_path=True,
            ),
            Command(
                "/export",
                "PATH",
                "write the conversation as Markdown, or as JSON (PATH.json)",
                self._export,
                takes_path=True,
            ),
            Command("/quit", "", "leave", lambda _: None),
        ]
        self.by_name: Final[Mapping[str, Command]] = {command.name: command for command in commands}
        self._others: Final = {"/reset": "/new", "/exit": "/quit", "/list": "/conversations", "/?": "/help"}

    def run(self, text: str) -> bool:
        """Run a command; returns whether the text is one.

        Raises:
            EdgeError: the command is unknown, or it failed.
        """
        if not text.startswith("/") or "\n" in text.strip():
            return False
        word, _, argument = text.partition(" ")
        command = self.by_name.get(self._others.get(word, word))
        if command is None:
            close = get_close_matches(word, self.by_name, n=1, cutoff=0.7)
            hint = f"did you mean {close[0]}?" if close else "/help lists the commands"
            raise InputError(f"unknown command {word}", hint)
        command.run(argument.strip())
        return True

    def _help(self, _argument: str) -> None:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for command in self.by_name.values():
            words = f"{command.name} {command.argument}".rstrip()
            if self._chat.console.width < _TABLE_WIDTH:
                self._chat.console.print(f"{words}: {command.summary}")
            else:
                table.add_row(words, command.summary)
        if table.rows:
            self._chat.console.print(table)
        self._chat.note(f"{_KEYS} {self._chat.reader.end_key} leaves.")
        if is_bundled(self._chat.model.engine):
            self._chat.introduce_model()

    def _model(self, argument: str) -> None:
        chat = self._chat
        if not argument:
            current = model_name_of(chat.model.engine)
            chat.note(f"this model: {current}")
            for name in local_models():
                if name != current:
                    chat.note(f"/model {name}")
            return
        with chat.interrupts.raising():
            chat.model.switch(argument)
        chat.model_changed()

    def _regenerate(self, _argument: str) -> None:
        self._chat.answer(self._chat.conversation.last(Role.USER))

    def _continue(self, _argument: str) -> None:
        self._chat.continue_answer(self._chat.conversation.last(Role.ASSISTANT))

    def _edit(self, _argument: str) -> None:
        question = self._chat.conversation.last(Role.USER)
        text = self._chat.reader.read(question.content).strip()
        if text:
            self._chat.send(text, question.attachments, question.parent)

    def _undo(self, _argument: str) -> None:
        question = self._chat.conversation.last(Role.USER)
        self._chat.store.delete_message(question.id)
        self._chat.count_tokens()
        self._chat.note(f"removed: {_beginning(question)}")

    def _branch(self, argument: str) -> None:
        chat = self._chat
        points = chat.conversation.branch_points()
        choices = [message for point in points for message in point.alternatives]
        if not choices:
            raise InputError("there are no other answers or messages", "/regenerate and /edit make some")
        if argument:
            chosen = choices[_number(argument, len(choices)) - 1]
            chat.store.select_leaf(chosen.conversation, chosen.id)
            chat.open(chat.conversation)
            return
        number = 0
        for point in points:
            chat.note(f"after {_beginning(point.before)}" if point.before else "at the beginning")
            for index, message in enumerate(point.alternatives):
                number += 1
                shown = " (shown)" if index == point.shown else ""
                chat.note(f"  {number}  {_beginning(message)}{shown}")
        chat.note("/branch N shows one of them")

    def _set(self, argument: str) -> None:
        chat = self._chat
        name, _, value = argument.partition(" ")
        sampling = dict(chat.conversation.sampling)
        if name:
            if name not in SAMPLING_FIELDS:
                close = get_close_matches(name, SAMPLING_FIELDS, n=1)
                hint = f"did you mean {close[0]}?" if close else f"options are: {', '.join(SAMPLING_FIELDS)}"
                raise InputError(f"there is no sampling option {name!r}", hint)
            sampling.pop(name, None)
            if value.strip() not in {"", "default"}:
                sampling[name] = _sampling_value(name, value.strip())
            GenerateOptions().changed(sampling).sampling(chat.model.engine.model.defaults)
            chat.conversation.change(sampling=sampling)
        for each, its_value in sampling.items():
            chat.note(f"{each} {its_value}")
        if not sampling:
            chat.note("sampling: as the model recommends" if not name else f"{name}: as the model recommends")

    def _system(self, argument: str) -> None:
        if argument:
            self._chat.conversation.change(system="" if argument == "none" else argument)
            self._chat.count_tokens()
        self._chat.note(f"system message: {self._chat.conversation.system or 'none'}")

    def _preset(self, argument: str) -> None:
        presets = {preset.name: preset for preset in self._chat.store.presets()}
        if not argument:
            self._chat.note("presets: " + (", ".join(presets) or "none; edge-run app makes some"))
            return
        if (preset := presets.get(argument)) is None:
            raise InputError(f"there is no preset {argument!r}", f"presets are: {', '.join(presets) or 'none'}")
        self._chat.conversation.change(system=preset.system, sampling=dict(preset.sampling))
        self._system("")
        self._set("")

    def _load(self, argument: str) -> None:
        chat = self._chat
        if not argument:
            chat.attachments.clear()
            chat.note("no file is attached")
            return
        path = _path(argument)
        text = read_text(path, "attach a file with some text")
        tokens = len(chat.model.engine.tokenizer.encode(text, add_special_tokens=False))
        chat.attachments.append(Attachment(path.name, text))
        chat.note(
            f"{path.name}: {tokens} tokens, of a context of {chat.model.engine.context}; goes with the next message"
        )

    def _copy(self, _argument: str) -> None:
        answer = self._chat.conversation.last(Role.ASSISTANT)
        copy_to_clipboard(answer.content)
        self._chat.note(f"copied {len(answer.content)} characters")

    def _raw(self, _argument: str) -> None:
        self._chat.raw = not self._chat.raw
        self._chat.note("answers are shown as they are" if self._chat.raw else "answers are shown as rendered Markdown")

    def _clear(self, _argument: str) -> None:
        self._chat.console.clear()

    def _stats(self, _argument: str) -> None:
        self._chat.show_stats()

    def _conversations(self, _argument: str) -> None:
        conversations = self._chat.store.conversations()
        if not conversations:
            self._chat.note("no conversations yet")
            return
        self._list(conversations[:_LISTED])
        if len(conversations) > _LISTED:
            self._chat.note(f"... and {len(conversations) - _LISTED} older ones; /search TEXT finds them")

    def _list(self, conversations: Iterable[Conversation]) -> None:
        stored = self._chat.conversation.stored
        current = None if stored is None else stored.id
        self._listed = []
        table = Table(box=None, pad_edge=False, show_header=False)
        for justify in ("right", "left", "left"):
            table.add_column(justify=justify, overflow="fold")
        for conversation in conversations:
            self._listed.append(conversation.id)
            when = datetime.fromtimestamp(conversation.updated).astimezone().strftime("%Y-%m-%d %H:%M")
            title = (on_one_line(conversation.title) or "without a title") + " (this one)" * (
                conversation.id == current
            )
            if self._chat.console.width < _TABLE_WIDTH:
                self._chat.console.print(f"{len(self._listed)} {title}")
            else:
                table.add_row(str(len(self._listed)), when, title)
        if table.rows:
            self._chat.console.print(table)
        self._chat.note("/open N goes on with one")

    def _open(self, argument: str) -> None:
        if not argument:
            raise InputError("/open needs a conversation", "/conversations lists them")
        self._chat.open(ChatConversation(self._chat.store, conversation=self._found(argument)))

    def _found(self, argument: str) -> Conversation:
        """The conversation of a number in the last list, an id, or a part of a title.

        Raises:
            InputError: there is none, or there are several.
        """
        if argument.isdecimal() and self._listed:
            return self._chat.store.conversation(self._listed[_number(argument, len(self._listed)) - 1])
        conversations = self._chat.store.conversations()
        wanted = argument.lower()
        found = (
            [each for each in conversations if each.id == argument]
            or [each for each in conversations if each.title.lower() == wanted]
            or [each for each in conversations if wanted in each.title.lower()]
        )
        if not found:
            raise InputError(f"there is no conversation {argument!r}", "/conversations lists them")
        if len(found) > 1:
            self._list(found[:_LISTED])
            raise InputError(
                f"{len(found)} conversations have {argument!r} in their titles", "choose one by its number"
            )
        return found[0]

    def _search(self, argument: str) -> None:
        if not argument:
            raise InputError("/search needs a text", "write what to look for")
        hits = self._chat.store.search(argument, _LISTED)
        if not hits:
            self._chat.note("nothing found")
            return
        self._listed = []
        for hit in hits:
            self._listed.append(hit.conversation)
            self._chat.note(f"{len(self._listed)}  {on_one_line(hit.title)}: {on_one_line(hit.snippet)}")
        self._chat.note("/open N goes on with one")

    def _title(self, argument: str) -> None:
        if argument:
            self._chat.conversation.change(title=argument)
        self._chat.note(f"title: {self._chat.conversation.title or 'none'}")

    def _new(self, _argument: str) -> None:
        self._chat.open(ChatConversation(self._chat.store, self._chat.conversation.system))
        self._chat.note("new conversation")

    def _delete(self, _argument: str) -> None:
        stored = self._chat.conversation.stored
        if stored is not None:
            if not self._confirmed(f"delete {on_one_line(stored.title) or 'this conversation'}? [y/N] "):
                self._chat.note("not deleted")
                return
            self._chat.store.delete(stored.id)
            self._chat.note("deleted; for 30 days, edge-run app can restore it")
        self._new("")

    def _save(self, argument: str) -> None:
        path = self._destination("/save", argument)
        if path is None:
            return
        chat = self._chat
        session = chat.model.engine.session(system=chat.conversation.system or None)
        session.continue_from(model_messages("", chat.conversation.branch()))
        self._write(path, lambda: session.save(path))
        chat.saved_session = session
        chat.note(f"saved; continue with --resume {shlex.quote(str(path))}")

    def _export(self, argument: str) -> None:
        path = self._destination("/export", argument)
        if path is None:
            return
        stored = self._chat.conversation.last(Role.USER).conversation
        store = self._chat.store
        text = store.export_json([stored]) if path.suffix.lower() == ".json" else store.export_markdown(stored)
        self._write(path, lambda: write_atomically(path, text.encode(), private=True))
        self._chat.note(f"written to {path}")

    def _destination(self, command: str, argument: str) -> Path | None:
        """The path that a conversation is written to; None if a file is there that may not be replaced.

        Raises:
            InputError: it cannot be written there.
        """
        if not argument:
            raise InputError(f"{command} needs a path", "name a new file")
        path = _path(argument)
        if path.is_file():
            self._chat.note(f"{path} exists")
            if not self._confirmed("replace it? [y/N] "):
                self._chat.note("not saved")
                return None
        elif path.exists():
            raise InputError(f"{path} is {'a folder' if path.is_dir() else 'not a file'}", "name a new file")
        elif not path.parent.is_dir():
            raise InputError(f"the folder {path.parent} does not exist", "make it first, or save somewhere else")
        return path

    def _write(self, path: Path, write: Callable[[], object]) -> None:
        """Write a file.

        Raises:
            InputError: it cannot be written.
        """
        try:
            write()
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror or error}", "save somewhere else") from error

    def _confirmed(self, question: str) -> bool:
        try:
            return self._chat.reader.ask(question).strip().lower() in {"y", "yes"}
        except (EOFError, KeyboardInterrupt):
            self._chat.interrupts.take()
            return False

    def _titles(self) -> list[str]:
        return [conversation.title for conversation in self._chat.store.conversations() if conversation.title]

    def _preset_names(self) -> list[str]:
        return [preset.name for preset in self._chat.store.presets()]


def _path(text: str) -> Path:
    """The path that a user writes, which may begin with a home folder, or stand in quotes."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return Path(os.path.expanduser(text))  # unlike Path.expanduser, does not raise for an unknown user


def _beginning(message: StoredMessage) -> str:
    """The beginning of a message on one line."""
    who = "you" if message.role is Role.USER else "answer"
    text = " ".join(message.content.split())
    return f"{who}: {text if len(text) <= _BEGINNING else text[: _BEGINNING - 3] + '...'}"


def _number(text: str, most: int) -> int:
    """A number of a list.

    Raises:
        InputError: the list has no such number.
    """
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= most):
        raise InputError(f"there is no number {text!r:.40}", f"write a number from 1 to {most}")
    return int(text)


def _sampling_value(name: str, text: str) -> Any:
    """The value of a sampling option.

    Raises:
        InputError: it is not a number, or not a whole one.
    """
    if name == "stop":
        return text
    whole = name in {"top_k", "max_tokens", "seed"}
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise InputError(f"{name} is {text!r:.60}", f"write a {'whole ' * whole}number") from None
