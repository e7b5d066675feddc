"""What a chat has: its model, the conversation that it is in, with the tree of messages, and an answer it writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from ....errors import BundleError, CancelledError, ConversationError, EdgeError
from ....models.find import BUNDLED_MODEL, bundled_folder, find_model, may_be_model, named_models
from ....models.hub.downloaded_model import read_downloaded
from ....models.progress import Progress, ProgressDisplay
from ....models.user_text import on_one_line
from ....runtime.engine import Engine
from ....runtime.result import Stats
from ...conversations.conversation_table import checked_fields
from ...conversations.records import (
    Attachment,
    CallRound,
    CallState,
    Conversation,
    MessageState,
    Role,
    StoredCall,
    StoredMessage,
)
from ...conversations.store import ConversationStore
from ...service.offered_models import OfferedModels, capabilities_at
from ...tools.call_rounds import CallingAnswer, Decision
from ..output import waiting_shown

OpenModel: TypeAlias = Callable[[str | None, Progress], Engine]
"""Loads the model of a name, None for the bundled one; its answers report their progress."""

_CHAT_MODEL: Final = "onnx-community/Qwen2.5-0.5B-Instruct"
INTRODUCTION: Final = f"""\
This small model comes with edge-run. It turns a request into a shell command, without regard to earlier
ones, and it does not chat.
Ask for a command: find files larger than 100 MB
To get a model that chats: edge-run pull {_CHAT_MODEL}
and then: edge-run {_CHAT_MODEL}"""
NO_CHAT: Final = (
    "this model writes shell commands only, whatever it is asked; try: list open ports. /help says how to get another"
)
_QUESTION: Final = "run this? y = once, a = always in this conversation, n = refuse: "
_DECISIONS: Final[Mapping[str, Decision]] = {"y": "run", "a": "always", "n": "refuse"}
_SHOWN: Final = 600
"""Characters that are shown of the result of a call; the model reads all of it."""


class ChatConversation:
    """A conversation of the store, or a new one, which is stored with its first message.

    Args:
        store: the store.
        system: system message of a new conversation.
        conversation: the conversation to go on with; None for a new one.
    """

    def __init__(self, store: ConversationStore, system: str = "", conversation: Conversation | None = None) -> None:
        self._store = store
        self._id = None if conversation is None else conversation.id
        self._new = SimpleNamespace(system=system, sampling={}, title="", tools=(), documents=())
        """Fields of a conversation that is not stored yet."""

    @property
    def stored(self) -> Conversation | None:
        """What is stored of it; None for a new one."""
        return None if self._id is None else self._store.conversation(self._id)

    @property
    def fields(self) -> Conversation | SimpleNamespace:
        """Its `title`, `system`, `sampling`, `tools` and `documents`, as they are stored or will be."""
        return self.stored or self._new

    def change(self, **fields: Any) -> None:
        """Set `title`, `system`, `sampling`, `tools` or `documents`.

        Raises:
            ConversationError: a value is not valid.
        """
        if self._id is None:
            checked_fields(fields)
            vars(self._new).update(fields)
        else:
            self._store.change(self._id, **fields)

    def branch(self) -> list[StoredMessage]:
        """The messages that are shown, the first one first."""
        return [] if self._id is None else self._store.shown(self._id)[1]

    def add_question(
        self, content: str, attachments: Sequence[Attachment], parent: str | None, model: str
    ) -> StoredMessage:
        """Add a message of the user after `parent`."""
        if self._id is None:
            self._id = self._store.create(model=model, **vars(self._new)).id
        return self._store.add_message(self._id, parent, Role.USER, content, attachments=attachments)

    def add_answer(self, question: StoredMessage, model: str) -> StoredMessage:
        """Add an answer that is going to be written."""
        return self._store.add_message(
            question.conversation, question.id, Role.ASSISTANT, "", model=model, state=MessageState.WRITING
        )

    def last(self, role: Role) -> StoredMessage:
        """The last message of the user, or the last answer.

        Raises:
            ConversationError: there is none.
        """
        found = next((message for message in reversed(self.branch()) if message.role is role), None)
        if found is None:
            what = "message" if role is Role.USER else "answer"
            raise ConversationError(f"there is no {what} yet", "write a message first")
        return found

    def branch_points(self) -> list[tuple[StoredMessage | None, list[StoredMessage], StoredMessage]]:
        """Where the conversation has alternatives to what is shown, the last place first.

        Returns:
            For each place the message before it (None for first messages), the alternatives, and the one that is shown.
        """
        branch = self.branch()
        messages = self._store.messages(branch[0].conversation) if branch else []
        points = []
        for before, message in zip([None, *branch], branch, strict=False):
            alternatives = [each for each in messages if each.parent == message.parent]
            if len(alternatives) > 1:
                points.append((before, alternatives, message))
        return points[::-1]


class ChatAnswer(CallingAnswer):
    """An answer that is written.

    Args:
        store: keeps it.
        message: the message in the store, with what it begins with.
        ask: asks the user a question; raises `EOFError` or `KeyboardInterrupt` as a prompt does.
        note: shows a remark.
    """

    def __init__(
        self, store: ConversationStore, message: StoredMessage, ask: Callable[[str], str], note: Callable[[str], None]
    ) -> None:
        super().__init__(store, message, None)
        self.last_stats: Stats | None = None
        """Statistics of its last text."""
        self._ask: Final = ask
        self._note: Final = note
        made = [call for each in message.rounds for call in each.calls if call.result is not None]
        self._shown = {(call.id, result) for call in made for result in (None, call.result)}

    def set_rounds(self, rounds: Sequence[CallRound]) -> None:
        """Keep the calls so far, and show the calls that are made, and their results."""
        super().set_rounds(rounds)
        for call in rounds[-1].calls:
            if call.state is not CallState.WAITING:
                self._show(call, None)
                self._show(call, call.result)

    def wait_for_decision(self, call: StoredCall) -> Decision:
        """Show a call, and ask until the user has decided about it; Ctrl-C cancels the answer."""
        self._show(call, None)
        while True:
            try:
                reply = self._ask(_QUESTION).strip().lower()
            except (EOFError, KeyboardInterrupt):
                raise CancelledError("the call was not decided about") from None
            if reply in _DECISIONS:
                return _DECISIONS[reply]

    def _show(self, call: StoredCall, result: str | None) -> None:
        """Show a call, or its result, once."""
        if (call.id, result) in self._shown:
            return
        self._shown.add((call.id, result))
        if result is None:
            name = self.tools[call.name].id if call.name in self.tools else call.name
            self._note(f"{name} {on_one_line(call.arguments)}")
            return
        self._note(result if len(result) <= _SHOWN else f"{result[:_SHOWN]}\n... of {len(result)} characters")


def model_name_of(engine: Engine) -> str:
    """The name by which a conversation remembers its model: its id in the app, or a path."""
    folder = engine.bundle.folder.resolve()
    downloaded = read_downloaded(folder)
    if downloaded is not None:
        return downloaded.id
    return next((name for name, path in named_models().items() if path.resolve() == folder), str(folder))


def short_name(name: str) -> str:
    """A model's name without the folders or the organization before it."""
    return Path(name).name or name


def is_bundled(engine: Engine) -> bool:
    """Whether this is the model that comes with edge-run."""
    return engine.bundle.folder.resolve() == bundled_folder().resolve()


def local_models() -> list[str]:
    """Names of the models on this machine that write texts, or do not say what they are for."""
    found = ((entry.id, capabilities_at(Path(entry.source))) for entry in OfferedModels([]).entries())
    return [name for name, capabilities in found if not capabilities or "completion" in capabilities]


def source_of(name: str) -> str:
    """What `edgerun.load` opens for a name: the name of a model on this machine, a path or an id on the hub.

    Raises:
        EdgeError: there is no such model.
    """
    for entry in OfferedModels([]).entries():
        if name in (entry.id, *entry.aliases) and not os.path.lexists(name):
            return entry.source
    if not may_be_model(name):
        raise BundleError(f"there is no model {name!r:.200}", f"on this machine are: {', '.join(local_models())}")
    return name


def is_here(name: str) -> bool:
    """Whether the model that a conversation remembers is on this machine."""
    return name in local_models() or (Path(name).is_absolute() and Path(name).exists())


class ChatModel:
    """The model that answers, which can be replaced by another.

    Args:
        open_model: loads a model.
        name: the first model; None for the bundled one.
        progress: shows what an answer waits for.

    Raises:
        EdgeError: it cannot be loaded.
    """

    def __init__(self, open_model: OpenModel, name: str | None, progress: ProgressDisplay) -> None:
        self.progress: Final = progress
        self._open_model = open_model
        self._source = name
        self.engine = self._open(name)

    def switch(self, name: str) -> None:
        """Load another model in place of this one, which is loaded again if that fails.

        Raises:
            EdgeError: it cannot be loaded.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        source = source_of(name)
        find_model(source)
        self.engine.close()
        try:
            self.engine = self._open(source)
            self._source = source
        except (EdgeError, KeyboardInterrupt):
            self.engine = self._open(self._source)
            raise

    @property
    def name(self) -> str:
        """Its name for people."""
        return short_name(model_name_of(self.engine))

    def close(self) -> None:
        """Free its memory."""
        self.engine.close()

    def _open(self, name: str | None) -> Engine:
        find_model(name)  # a download shows its own progress
        with waiting_shown(f"loading {on_one_line(short_name(name or BUNDLED_MODEL))}"):
            return self._open_model(name, self.progress)
