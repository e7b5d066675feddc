"""An answer that a chat writes, and the question to the user before each call of a tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ....errors import CancelledError
from ....models.user_text import on_one_line
from ....runtime.result import Stats
from ...conversations.records import CallRound, CallState, StoredCall, StoredMessage
from ...conversations.store import ConversationStore
from ...tools.call_rounds import CallingAnswer, Decision

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
