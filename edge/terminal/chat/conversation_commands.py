"""Opens a chat and reads what the user types, and the commands that are about whole conversations."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path
from typing import Final

from rich.table import Table

from ....errors import ConversationError, EdgeError, InputError
from ....models.atomic import write_atomically
from ....models.find import BUNDLED_MODEL
from ....models.progress import ProgressDisplay
from ....models.regular_file import os_errors_as
from ....models.user_folders import data_folder
from ....models.user_text import on_one_line
from ....runtime.options import GenerateOptions
from ...cli.run import RunOptions
from ...conversations.answering import model_messages, takes_calls
from ...conversations.records import Conversation, Role
from ...conversations.store import ConversationStore
from ...tools.tool_servers import ToolServers
from ...tools.tool_settings import configured_servers
from ..interrupt import Interrupts
from ..output import can_draw, write_warning
from .chat import Chat
from .chat_conversation import ChatConversation, ChatModel, OpenModel, is_here, source_of
from .commands import TABLE_WIDTH, MessageCommands, listed_number, typed_path
from .prompt_reader import command, keys_kept_for_the_prompt

_LISTED: Final = 20
"""Largest number of conversations in a list."""
_OTHER_FORMATS: Final = frozenset(
    {".csv", ".docx", ".htm", ".html", ".json", ".jsonl", ".markdown", ".md", ".odt", ".pdf", ".rtf", ".txt", ".xml"}
)
"""Endings that name other formats than the one of `/save`."""


class ChatCommands(MessageCommands):
    """All commands of a chat: also those that list, open, name, delete and write conversations."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        self._listed: list[str] = []
        """Ids of the conversations in the last list, which `/open` takes by their number."""

    @command("/conversations")
    def _conversations(self, _argument: str) -> None:
        """List the latest conversations."""
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
            if self._chat.console.width < TABLE_WIDTH:
                self._chat.console.print(f"{len(self._listed)} {title}")
            else:
                table.add_row(str(len(self._listed)), when, title)
        if table.rows:
            self._chat.console.print(table)
        self._chat.note("/open N goes on with one")

    @command("/open", "N|ID|TITLE", lambda self: [it.title for it in self._chat.store.conversations() if it.title])
    def _open(self, argument: str) -> None:
        """Go on with another conversation."""
        if not argument:
            raise InputError("/open needs a conversation", "/conversations lists them")
        self._chat.open(ChatConversation(self._chat.store, conversation=self._found(argument)))

    def _found(self, argument: str) -> Conversation:
        """The conversation of a number in the last list, an id, or a part of a title.

        Raises:
            InputError: there is none, or there are several.
        """
        if argument.isdecimal() and self._listed:
            return self._chat.store.conversation(self._listed[listed_number(argument, len(self._listed)) - 1])
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

    @command("/search", "TEXT")
    def _search(self, argument: str) -> None:
        """Find messages in all conversations."""
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

    @command("/title", "TEXT")
    def _title(self, argument: str) -> None:
        """Name this conversation."""
        if argument:
            self._chat.conversation.change(title=argument)
        self._chat.note(f"title: {self._chat.conversation.fields.title or 'none'}")

    @command("/new")
    def _new(self, _argument: str) -> None:
        """Start a new conversation."""
        fields = self._chat.conversation.fields
        self._chat.open(ChatConversation(self._chat.store, fields.system))
        self._chat.conversation.change(tools=fields.tools)
        self._chat.note("new conversation")

    @command("/delete")
    def _delete(self, _argument: str) -> None:
        """Delete this conversation."""
        stored = self._chat.conversation.stored
        if stored is not None:
            if not self._confirmed(f"delete {on_one_line(stored.title) or 'this conversation'}? [y/N] "):
                self._chat.note("not deleted")
                return
            self._chat.store.delete(stored.id)
            self._chat.note("deleted; /undelete restores it, and for 30 days edge-run app can, too")
        self._new.run(self, "")

    @command("/undelete")
    def _undelete(self, _argument: str) -> None:
        """Restore the conversation that was deleted last."""
        deleted = self._chat.store.conversations(deleted=True)
        if not deleted:
            raise InputError("there is no deleted conversation", "/conversations lists the others")
        last = max(deleted, key=lambda conversation: conversation.deleted or 0.0)
        restored = self._chat.store.restore(last.id)
        self._chat.open(ChatConversation(self._chat.store, conversation=restored))

    @command("/save", "PATH", takes_path=True)
    def _save(self, argument: str) -> None:
        """Save the conversation for you alone; continue it later with --resume PATH."""
        if (ending := typed_path(argument).suffix.lower()) in _OTHER_FORMATS:
            raise InputError(
                f"/save writes messages and KV cache in a format of its own, not a {ending} file",
                "/export PATH writes Markdown or JSON to read; to continue later, name a file such as chat.kv",
            )
        path = self._destination("/save", argument)
        if path is None:
            return
        chat = self._chat
        engine = chat.model.engine
        session = engine.session(system=chat.conversation.fields.system or None)
        session.continue_from(model_messages("", chat.conversation.branch(), calls=takes_calls(engine)))
        with os_errors_as(InputError, f"{path} cannot be written", "save somewhere else"):
            session.save(path)
        chat.note(f"saved; continue with --resume {shlex.quote(str(path))}")

    @command("/export", "PATH", takes_path=True)
    def _export(self, argument: str) -> None:
        """Write the conversation as Markdown, or as JSON (PATH.json)."""
        path = self._destination("/export", argument)
        if path is None:
            return
        stored = self._chat.conversation.last(Role.USER).conversation
        store = self._chat.store
        text = store.export_json([stored]) if path.suffix.lower() == ".json" else store.export_markdown(stored)
        with os_errors_as(InputError, f"{path} cannot be written", "save somewhere else"):
            write_atomically(path, text.encode(), private=True)
        self._chat.note(f"written to {path}")

    def _destination(self, command: str, argument: str) -> Path | None:
        """The path that a conversation is written to; None if a file is there that may not be replaced.

        Raises:
            InputError: it cannot be written there.
        """
        if not argument:
            raise InputError(f"{command} needs a path", "name a new file")
        path = typed_path(argument)
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

    def _confirmed(self, question: str) -> bool:
        try:
            return self._chat.reader.ask(question).strip().lower() in {"y", "yes"}
        except (EOFError, KeyboardInterrupt):
            self._chat.interrupts.take()
            return False

    @command("/quit")
    def _quit(self, _argument: str) -> None:
        """Leave."""


def open_chat(open_model: OpenModel, model: str | None, chosen: RunOptions, options: GenerateOptions) -> int:
    """Chat until the user leaves; returns the exit code.

    Args:
        open_model: loads a model.
        model: the model that is named; None for the model of the conversation, or the bundled one.
        chosen: what the chat begins with.
        options: options of its answers.

    Raises:
        EdgeError: the model or the conversation cannot be opened.
    """
    if sum(map(bool, (chosen.resume, chosen.conversation, chosen.continue_))) > 1:
        raise InputError("more than one conversation is named", "give one of --resume, --continue and --conversation")
    if not chosen.save and (chosen.conversation or chosen.continue_):
        raise InputError("a conversation that is kept cannot go on without being saved", "leave out --no-save")
    servers = configured_servers(chosen.tools) if chosen.tools else ()
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        stack.enter_context(keys_kept_for_the_prompt())
        store = stack.enter_context(_open_store(chosen))
        conversation = _conversation(store, chosen)
        if conversation is not None and model is None:
            name = conversation.model  # where it is not on this machine, the bundled model answers
            model = None if name is None or name == BUNDLED_MODEL or not is_here(name) else source_of(name)
        progress = stack.enter_context(ProgressDisplay(transient=True))
        with interrupts.raising():
            chat_model = stack.enter_context(closing(ChatModel(open_model, model, progress)))
        tools = stack.enter_context(closing(ToolServers(data_folder(), servers=servers)))
        return _until_left(Chat(chat_model, store, interrupts, chosen, options, conversation, tools))


def _until_left(chat: Chat) -> int:
    """Read messages and commands until `/quit` or the end of the input; returns the exit code."""
    commands = ChatCommands(chat)
    if can_draw():
        # prompt_toolkit takes time to import.
        from .line_editor import ChatCompleter, LineEditor, PromptHistory  # noqa: PLC0415

        history = PromptHistory(data_folder() / "typed.jsonl", writing=chat.chosen.save)
        chat.reader = LineEditor(chat.interrupts, history, ChatCompleter(commands.by_name, commands), chat.status)
    chat.introduce_model()
    chat.open(chat.conversation)
    if chat.chosen.tools:
        commands.run("/tools all")
    while True:
        try:
            draft, chat.draft = chat.draft, ""
            text = commands.without_dropped_images(chat.reader.read(draft).strip())
            if text.split(" ")[0] in {"/quit", "/exit"}:
                return 0
            if text and not commands.run(text):
                chat.say(text)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            chat.interrupts.take()
            chat.note(f"to leave: /quit or {chat.reader.end_key}")
        except EdgeError as error:
            chat.note(str(error), "red")


def _open_store(chosen: RunOptions) -> ConversationStore:
    """The store of conversations; one in memory if nothing is to be kept, or nothing can be."""
    if chosen.save:
        try:
            return ConversationStore(notice=write_warning)
        except ConversationError as error:
            if chosen.conversation is not None or chosen.continue_:
                raise
            write_warning(f"this chat is not saved: {error}")
    return ConversationStore.in_memory()


def _conversation(store: ConversationStore, chosen: RunOptions) -> Conversation | None:
    """The stored conversation that the options name.

    Raises:
        ConversationError: there is none.
    """
    if chosen.conversation is not None:
        return store.conversation(chosen.conversation)
    if not chosen.continue_:
        return None
    if conversations := store.conversations():
        return max(conversations, key=lambda each: each.updated)
    raise ConversationError("there is no conversation yet", "leave out --continue")
