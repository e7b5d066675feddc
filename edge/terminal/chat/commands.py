"""The commands of the chat that are about messages and their answers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from ....errors import InputError
from ....models.user_text import read_text
from ....runtime.images.decoding import image_bytes, kept_image
from ....runtime.options import GenerateOptions
from ....runtime.scheduling.request_run import Cancellation
from ...conversations.answering import takes_calls
from ...conversations.records import SAMPLING_FIELDS, Attachment, Role, StoredMessage
from ...documents.document_index import with_index
from ...documents.retrieval import passage_encoder
from ..output import can_draw, set_clipboard, waiting_shown
from .chat import Chat
from .chat_conversation import INTRODUCTION, is_bundled, local_models, model_name_of
from .prompt_reader import Command, command

TABLE_WIDTH: Final = 60
"""Number of columns below which lists are lines instead of tables."""
_BEGINNING: Final = 60
"""Number of characters that a list shows of a message."""
_KEYS: Final = (
    "Ctrl-C stops an answer. Enter sends; Alt+Enter, Ctrl-J, or Enter after a backslash begins a new line. "
    "Pasted lines are one message."
)
_DROPPED: Final = re.compile(r"(?:'[^'\n]+'|\"[^\"\n]+\"|(?:\\[^\n]|[^\s\\])+)\s*")
"""What may be the path of a file: in quotes, or with a backslash before each blank."""
_BACKSLASH: Final = re.compile(r"\\(.)")
_IMAGE_ENDINGS: Final = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp"})
_COPY_S: Final = 5.0
"""Seconds that a program has to copy text."""
_COPY_PROGRAMS: Final[Mapping[str, Sequence[Sequence[str]]]] = {"darwin": [["pbcopy"]], "win32": [["clip"]]}
_COPY_ELSEWHERE: Final = (["wl-copy"], ["xclip", "-selection", "clipboard"], ["xsel", "--clipboard", "--input"])
"""Commands that copy their standard input; those of a desktop that is not there fail."""
_ENCODINGS: Final = {"clip": "utf-16"}
"""Encodings that these programs read, where it is not UTF-8."""


def typed_path(text: str) -> Path:
    """The path that a user writes, which may begin with a home folder, or stand in quotes."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return Path(os.path.expanduser(text))  # unlike Path.expanduser, does not raise for an unknown user


def listed_number(text: str, most: int) -> int:
    """A number of a list.

    Raises:
        InputError: the list has no such number.
    """
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= most):
        raise InputError(f"there is no number {text!r:.40}", f"write a number from 1 to {most}")
    return int(text)


class MessageCommands:
    """The commands of a chat that are about messages and their answers."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._others: Final = {"/reset": "/new", "/exit": "/quit", "/list": "/conversations", "/?": "/help"}
        attributes = (each for kind in reversed(type(self).__mro__) for each in vars(kind).values())
        self.by_name: Final = {each.name: each for each in attributes if isinstance(each, Command)}

    def run(self, text: str) -> bool:
        """Run a command; returns whether the text is one.

        Raises:
            EdgeError: the command is unknown, or it failed.
        """
        if not text.startswith("/") or "\n" in text.strip():
            return False
        word, _, argument = text.partition(" ")
        chosen = self.by_name.get(self._others.get(word, word))
        if chosen is None:
            close = get_close_matches(word, self.by_name, n=1, cutoff=0.7)
            hint = f"did you mean {close[0]}?" if close else "/help lists the commands"
            raise InputError(f"unknown command {word}", hint)
        chosen.run(self, argument.strip())
        return True

    @command("/help")
    def _help(self, _argument: str) -> None:
        """Show this list."""
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        chat = self._chat
        for each in self.by_name.values():
            words = f"{each.name} {each.argument}".rstrip()
            if chat.console.width < TABLE_WIDTH:
                chat.console.print(f"{words}: {each.summary}")
            else:
                table.add_row(words, each.summary)
        if table.rows:
            chat.console.print(table)
        chat.note(f"{_KEYS} {chat.reader.end_key} leaves.")
        if is_bundled(chat.model.engine):
            chat.note(INTRODUCTION)

    @command("/model", "[NAME]", lambda _: local_models())
    def _model(self, argument: str) -> None:
        """Answer with another model, or list those on this machine."""
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

    @command("/regenerate")
    def _regenerate(self, _argument: str) -> None:
        """Answer the last message once more."""
        self._chat.answer(self._chat.conversation.last(Role.USER))

    @command("/continue")
    def _continue(self, _argument: str) -> None:
        """Let the last answer go on."""
        self._chat.continue_answer(self._chat.conversation.last(Role.ASSISTANT))

    @command("/edit")
    def _edit(self, _argument: str) -> None:
        """Change the last message, and answer it again."""
        question = self._chat.conversation.last(Role.USER)
        text = self._chat.reader.read(question.content).strip()
        if text:
            self._chat.send(text, question.attachments, question.parent)

    @command("/undo")
    def _undo(self, _argument: str) -> None:
        """Remove the last message and its answer."""
        question = self._chat.conversation.last(Role.USER)
        self._chat.store.delete_message(question.id)
        self._chat.count_tokens()
        self._chat.note(f"removed: {_beginning(question)}")

    @command("/branch", "[N]")
    def _branch(self, argument: str) -> None:
        """List the other answers and messages, or show number N."""
        chat = self._chat
        points = chat.conversation.branch_points()
        choices = [message for _, alternatives, _ in points for message in alternatives]
        if not choices:
            raise InputError("there are no other answers or messages", "/regenerate and /edit make some")
        if argument:
            chosen = choices[listed_number(argument, len(choices)) - 1]
            chat.store.select_leaf(chosen.conversation, chosen.id)
            chat.open(chat.conversation)
            return
        number = 0
        for before, alternatives, shown in points:
            chat.note(f"after {_beginning(before)}" if before else "at the beginning")
            for message in alternatives:
                number += 1
                chat.note(f"  {number}  {_beginning(message)}{' (shown)' if message.id == shown.id else ''}")
        chat.note("/branch N shows one of them")

    @command("/set", "[NAME VALUE]", lambda _: SAMPLING_FIELDS)
    def _set(self, argument: str) -> None:
        """Set a sampling option, such as temperature 0.7; without VALUE, undo that."""
        chat = self._chat
        name, _, value = argument.partition(" ")
        sampling = dict(chat.conversation.fields.sampling)
        if name:
            if name not in SAMPLING_FIELDS:
                close = get_close_matches(name, SAMPLING_FIELDS, n=1)
                hint = f"did you mean {close[0]}?" if close else f"options are: {', '.join(SAMPLING_FIELDS)}"
                raise InputError(f"there is no sampling option {name!r}", hint)
            sampling.pop(name, None)
            if value.strip() not in {"", "default"}:
                sampling[name] = _sampling_value(name, value.strip())
            GenerateOptions().changed(sampling)
            chat.conversation.change(sampling=sampling)
        for each, its_value in sampling.items():
            chat.note(f"{each} {its_value}")
        if not sampling:
            chat.note("sampling: as the model recommends" if not name else f"{name}: as the model recommends")

    @command("/system", "[TEXT]")
    def _system(self, argument: str) -> None:
        """Set the system message (none for none), or show it."""
        if argument:
            self._chat.conversation.change(system="" if argument == "none" else argument)
            self._chat.count_tokens()
        self._chat.note(f"system message: {self._chat.conversation.fields.system or 'none'}")

    @command("/preset", "[NAME]", lambda self: [each.name for each in self._chat.store.presets()])
    def _preset(self, argument: str) -> None:
        """Take system message and sampling of a preset, or list the presets."""
        presets = {preset.name: preset for preset in self._chat.store.presets()}
        if not argument:
            self._chat.note("presets: " + (", ".join(presets) or "none; edge-run app makes some"))
            return
        if (preset := presets.get(argument)) is None:
            raise InputError(f"there is no preset {argument!r}", f"presets are: {', '.join(presets) or 'none'}")
        self._chat.conversation.change(system=preset.system, sampling=dict(preset.sampling))
        self._system.run(self, "")
        self._set.run(self, "")

    @command("/tools", "[all|none|NAME ...]", lambda _: ("all", "none"))
    def _tools(self, argument: str) -> None:
        """Choose tools of MCP servers that answers may ask for, or list them."""
        chat, cancellation = self._chat, Cancellation()
        with chat.interrupts.calling(cancellation.cancel), waiting_shown("starting the tools"):
            chat.tools.offered([server["name"] for server in chat.tools.list()["servers"]], cancellation)
        servers = chat.tools.list()["servers"]
        ids = [tool["id"] for server in servers for tool in server["tools"]]
        if words := set(argument.split()):
            if unknown := sorted(words - {"all", "none", *ids, *(server["name"] for server in servers)}):
                raise InputError(f"there is no tool {unknown[0]!r:.100}", "/tools lists the tools and their servers")
            chosen = [each for each in ids if {"all", each, each.partition("/")[0]} & words]
            chat.conversation.change(tools=chosen)
        for server in servers:
            chat.note(f"{server['name']}: {server['error'] or server['state']}")
            for tool in server["tools"]:
                mark = "*" if tool["id"] in chat.conversation.fields.tools else " "
                chat.note(f"{mark} {tool['id']}  {tool['description'].partition(chr(10))[0]}")
        chat.note("* is offered to the model" if servers else "add servers in edge-run app, or start with --tools FILE")
        if not takes_calls(chat.model.engine):
            chat.note("this model has no form for calls of tools, so it is not told of any")

    @command("/load", "[FILE]", takes_path=True)
    def _load(self, argument: str) -> None:
        """Attach a text file to the next message; without FILE, take all back."""
        chat = self._chat
        if not argument:
            chat.attachments.clear()
            chat.note("no file is attached")
            return
        path = typed_path(argument)
        text = read_text(path, "attach a file with some text")
        tokens = len(chat.model.engine.tokenizer.encode(text, add_special_tokens=False))
        chat.attachments.append(Attachment(path.name, text))
        context = chat.model.engine.context
        goes = (
            "passages of it that fit the next message go with it" if tokens >= context else "goes with the next message"
        )
        chat.note(f"{path.name}: {tokens} tokens, of a context of {context}; {goes}")

    @command("/image", "FILE", takes_path=True)
    def _image(self, argument: str) -> None:
        """Let the model see an image with the next message; dropping a file on the prompt does so, too."""
        if not argument:
            raise InputError("/image needs a file", "name a PNG, JPEG, WEBP, GIF or BMP file")
        self._attach_image(typed_path(argument))

    def _attach_image(self, path: Path) -> None:
        kept, engine = kept_image(image_bytes({"type": "image", "image": path}, "/image")), self._chat.model.engine
        tokens = engine.count_tokens([{"role": "user", "content": [{"type": "image", "image": kept}]}])
        self._chat.attachments.append(Attachment(path.name, "", kept))
        self._chat.note(f"{path.name}: {tokens} tokens, of a context of {engine.context}; goes with the next message")

    def without_dropped_images(self, text: str) -> str:
        """Attach the image files whose paths a text begins with, as a terminal writes them where a file is dropped on
        it; returns the rest of the text.

        Raises:
            InputError: one of them is not an image.
        """
        while (found := _DROPPED.match(text)) is not None:
            path = typed_path(_BACKSLASH.sub(r"\1", found[0].strip()) if os.sep == "/" else found[0].strip())
            if path.suffix.lower() not in _IMAGE_ENDINGS or not path.is_absolute() or not path.is_file():
                break
            self._attach_image(path)
            text = text[found.end() :]
        return text

    @command("/documents", "[PATH]", takes_path=True)
    def _documents(self, argument: str) -> None:
        """Answer from a folder of text files or from a file too; without PATH, from none."""
        chat = self._chat
        paths = list(chat.conversation.fields.documents) if argument else []
        if argument:
            path = typed_path(argument).absolute()
            with chat.model.progress, chat.interrupts.raising():
                update = with_index(path, lambda index: index.update(chat.model.progress))
                if (encoder := passage_encoder(chat.chosen.embedding_model)) is not None:
                    with_index(path, lambda index: index.embed(encoder, chat.model.progress))
            paths.append(str(path))
            left_out = "".join(f", {count} {reason}" for reason, count in update.skipped.items())
            by_meaning = "" if encoder is None else f"; found by meaning too, with {encoder.name}"
            chat.note(f"{path}: {update.documents} documents{left_out}{by_meaning}")
        chat.conversation.change(documents=paths)
        if not paths:
            chat.note("answers are not found in documents")

    @command("/copy")
    def _copy(self, _argument: str) -> None:
        """Copy the last answer to the clipboard."""
        answer = self._chat.conversation.last(Role.ASSISTANT)
        commands = _COPY_PROGRAMS.get(sys.platform, _COPY_ELSEWHERE)
        by_program = any(_copied_by(each, answer.content) for each in commands)
        if can_draw():  # through the terminal, which reaches other machines too
            set_clipboard(answer.content)
        elif not by_program:
            raise InputError("this terminal has no clipboard", "install xclip or wl-clipboard, or select the text")
        self._chat.note(f"copied {len(answer.content)} characters")

    @command("/raw")
    def _raw(self, _argument: str) -> None:
        """Show answers as they are, or as rendered Markdown again."""
        self._chat.raw = not self._chat.raw
        self._chat.note("answers are shown as they are" if self._chat.raw else "answers are shown as rendered Markdown")

    @command("/clear")
    def _clear(self, _argument: str) -> None:
        """Clear the screen."""
        self._chat.console.clear()

    @command("/stats")
    def _stats(self, _argument: str) -> None:
        """Show statistics of the last answer."""
        self._chat.show_stats()


def _beginning(message: StoredMessage) -> str:
    """The beginning of a message on one line."""
    who = "you" if message.role is Role.USER else "answer"
    text = " ".join(message.content.split())
    return f"{who}: {text if len(text) <= _BEGINNING else text[: _BEGINNING - 3] + '...'}"


def _sampling_value(name: str, text: str) -> Any:
    """The value of a sampling option.

    Raises:
        InputError: it is not a number, or not a whole one.
    """
    if name in {"stop", "overflow"}:
        return text
    whole = name in {"top_k", "max_tokens", "seed"}
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise InputError(f"{name} is {text!r:.60}", f"write a {'whole ' * whole}number") from None


def _copied_by(command: Sequence[str], text: str) -> bool:
    """Whether a command copied text to the clipboard."""
    program = shutil.which(command[0])
    if program is None:
        return False
    data = text.encode(_ENCODINGS.get(command[0], "utf-8"), "replace")
    nowhere = subprocess.DEVNULL
    try:
        subprocess.run(  # noqa: S603
            [program, *command[1:]], input=data, stdout=nowhere, stderr=nowhere, timeout=_COPY_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return True
