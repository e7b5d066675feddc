"""What the user decides about the calls of an answer, before any of them is made."""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import Final

from ....runtime.scheduling.request_run import Cancellation


class Decision(StrEnum):
    """What becomes of a call."""

    RUN = "run"
    ALWAYS = "always"
    """It is made, and so are later ones of this tool in the conversation."""
    REFUSE = "refuse"


class CallApprovals:
    """Hands decisions from the windows to the thread that waits for them."""

    def __init__(self) -> None:
        self._changed: Final = threading.Condition()
        self._decisions: Final[dict[str, Decision]] = {}

    def decide(self, call_id: str, decision: Decision) -> None:
        """Decide about a call; the first decision holds."""
        with self._changed:
            self._decisions.setdefault(call_id, decision)
            self._changed.notify_all()

    def wait(self, call_id: str, cancellation: Cancellation) -> Decision:
        """Wait until somebody has decided about a call.

        Raises:
            CancelledError: the answer was cancelled.
        """
        with cancellation.calling(self._wake), self._changed:
            while (decision := self._decisions.get(call_id)) is None:
                cancellation.check()
                self._changed.wait()
        return decision

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
