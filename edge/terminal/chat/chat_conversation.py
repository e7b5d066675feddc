"""The conversation that the chat is in, with the tree of its messages, and an answer that it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from ....errors import CancelledError, ConversationError
from ....models.user_text import on_one_line
from ....runtime.result import Stats
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
from ...tools.call_rounds import CallingAnswer, Decision


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
        """Set `title`, `system`, `sampling`, `tools` or `documents`."""
        if self._id is None:
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


_QUESTION: Final = "run this? y = once, a = always in this conversation, n = refuse: "
_DECISIONS: Final[Mapping[str, Decision]] = {"y": "run", "a": "always", "n": "refuse"}
_SHOWN: Final = 600
"""Characters that are shown of the result of a call; the model reads all of it."""


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
