"""Generates answers in the background: they go on whether or not a window shows them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Final

from ...errors import InputError
from ...runtime.scheduling.request_run import Run
from ..conversations.records import MessageState, StoredMessage, as_object
from ..server.http_messages import RefusedError
from .answer_work import AnswerWork, StoredStart
from .app_context import AppContext
from .live_answer import LiveAnswer

MAX_ANSWERS: Final = 32
"""Largest number of answers that are generated or wait."""
_PUBLISH_S: Final = 1 / 30
"""Least time between two pieces of text of an answer for the windows, in seconds."""
_JOIN_S: Final = 10.0


def writing_error() -> RefusedError:
    """The error for a change of an answer that is being written."""
    return RefusedError(HTTPStatus.CONFLICT, "writing", "the answer is being written", "stop it first")


class BackgroundAnswers:
    """The answers that this process generates, each in a thread of its own.

    Args:
        context: the store, the models, and the windows.
    """

    def __init__(self, context: AppContext) -> None:
        self._context: Final = context
        self._lock: Final = threading.Lock()
        self._beginning: Final = threading.RLock()
        """Held from the moment when windows are told of an answer until it is in `_live`, where it can be stopped."""
        self._live: Final[dict[str, LiveAnswer]] = {}
        self._ending = False
        self._pending: Final = threading.Event()
        """Set while there may be text to publish."""
        self._publisher: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether an answer is in progress."""
        return bool(self._live)

    def live(self, message_id: str) -> LiveAnswer | None:
        """The answer with an id, if it is in progress."""
        return self._live.get(message_id)

    def of_conversation(self, conversation_id: str) -> list[LiveAnswer]:
        """Answers of a conversation that are in progress, also one that is beginning."""
        with self._beginning:
            return [answer for answer in self.all() if answer.conversation == conversation_id]

    def all(self) -> list[LiveAnswer]:
        """All answers in progress."""
        with self._lock:
            return list(self._live.values())

    def check_room(self, count: int = 1) -> None:
        """Raise if no further answers can be begun.

        Raises:
            RefusedError: the app is ending, or too many answers are in progress.
        """
        if self._ending:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down", "the app is ending")
        if len(self._live) + count > MAX_ANSWERS:
            raise RefusedError(
                HTTPStatus.TOO_MANY_REQUESTS, "busy", f"{MAX_ANSWERS} answers are in progress", "stop one, or wait"
            )

    def answer(self, question: StoredMessage, start: StoredStart | None = None) -> StoredMessage:
        """Begin a new answer to a message of the user, and return it; arguments and errors as for `answers`."""
        return self.answers(question, 1, start)[0]

    def answers(self, question: StoredMessage, count: int, start: StoredStart | None = None) -> list[StoredMessage]:
        """Begin new answers to a message of the user, which are written one after another, and return them.

        The first one is shown.

        Args:
            question: the message.
            count: number of answers.
            start: what they begin with.

        Raises:
            RefusedError: no further answers can be begun.
            ConversationError: the message was deleted.
        """
        store = self._context.store
        conversation = store.conversation(question.conversation)
        model = start.model if start is not None and self._offers(start.model) else conversation.model
        model = model or self._context.default_model()
        with self._beginning:
            self.check_room(count)
            messages = [
                store.add_message(
                    question.conversation,
                    question.id,
                    "assistant",
                    "",
                    model=model,
                    state=MessageState.WRITING,
                    rounds=() if start is None else start.rounds,
                )
                for _ in range(count)
            ]
            if count > 1:
                store.select_leaf(question.conversation, messages[0].id)
            self._begin(messages, question, start)
        return messages

    def resume(self, message: StoredMessage) -> StoredMessage:
        """Let an answer that has ended go on.

        Raises:
            RefusedError: no further answer can be begun, or it is in progress.
            ConversationError: the message was deleted, or another process writes it.
        """
        store = self._context.store
        if message.parent is None:
            raise InputError("the answer has no question", "write a message")
        question = store.message(message.parent)
        rounds = [each.undecided() for each in message.rounds]
        start = StoredStart(message.content, store.tokens(message.id), message.model, rounds)
        model = message.model if self._offers(message.model) else store.conversation(message.conversation).model
        if (before := self.live(message.id)) is not None:
            # The windows are told of the end of an answer a moment before its thread ends.
            before.ended.wait(_JOIN_S)
        with self._beginning:
            self.check_room()
            store.write_answer(message.id, message.content, None)
            message = replace(store.message(message.id), model=model or self._context.default_model())
            self._context.events.publish("message", message=as_object(message))
            self._begin([message], question, start)
        return message

    def stop(self, message_id: str) -> None:
        """End an answer after its current pass; one that has ended stays as it is."""
        with self._beginning:
            answer = self.live(message_id)
        if answer is not None:
            answer.cancellation.cancel()

    def interrupt_all(self) -> None:
        """Begin no further answers, and end those in progress as interrupted."""
        with self._beginning:
            self._ending = True
        for answer in self.all():
            answer.state_if_cancelled = MessageState.INTERRUPTED
            answer.cancellation.cancel()

    def close(self) -> None:
        """End all answers, and wait for their end."""
        self.interrupt_all()
        until = time.monotonic() + _JOIN_S
        for answer in self.all():
            answer.ended.wait(max(until - time.monotonic(), 0.0))
        self._pending.set()

    def _offers(self, model: str | None) -> bool:
        return model is not None and any(entry.id == model for entry in self._context.pool.names())

    def _begin(self, messages: Sequence[StoredMessage], question: StoredMessage, start: StoredStart | None) -> None:
        work = AnswerWork(self._context, messages, question, start or StoredStart(), self._pending)
        with self._lock:
            if any(live.id in self._live for live in work.answers):
                raise writing_error()
            self._live.update({live.id: live for live in work.answers})
            if self._publisher is None:
                self._publisher = threading.Thread(target=self._publish, name="edge-run windows", daemon=True)
                self._publisher.start()
        Run(partial(self._generate, work), "edge-run answer").start()

    def _generate(self, work: AnswerWork, run: Run[None]) -> None:
        try:
            for live in work.generate(run.cancellation):
                self._forget(live)
        finally:
            for live in work.answers:
                self._forget(live)

    def _forget(self, live: LiveAnswer) -> None:
        with self._lock:
            if self._live.get(live.id) is live:  # it may go on already, as another one
                del self._live[live.id]
        live.ended.set()

    def _publish(self) -> None:
        """Publish what answers have added, now and then, in a thread of its own."""
        while not self._ending or self._live:
            self._pending.wait()
            self._pending.clear()
            for answer in self.all():
                answer.publish()
            time.sleep(_PUBLISH_S)
