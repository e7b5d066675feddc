"""Generates messages in the background: they go on whether or not a window shows them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

from ..conversations.records import CallRound, MessageState, StoredMessage
from ..server.http_protocol import RefusedError
from .app_context import AppContext
from .generation_run import GenerationRun, MessageGeneration

MAX_ANSWERS: Final = 32
"""Largest number of messages that are generated or wait."""
_JOIN_S: Final = 10.0


def writing_error() -> RefusedError:
    """The error for a change of a message that is being generated."""
    return RefusedError(HTTPStatus.CONFLICT, "writing", "the answer is being written", "stop it first")


class Generations:
    """The messages that this process generates.

    Args:
        context: the store, the models, and the windows.
    """

    def __init__(self, context: AppContext) -> None:
        self._context: Final = context
        self.lock: Final = threading.RLock()
        """Held from the moment when windows are told of a message until it is in `_live`, where it can be stopped; and
        while what the store has is read and windows are told of it."""
        self._live: Final[dict[str, MessageGeneration]] = {}
        self._ending = False

    @property
    def busy(self) -> bool:
        """Whether a message is being generated."""
        return bool(self._live)

    def live(self, message_id: str) -> MessageGeneration | None:
        """The generation of the message with an id, if it is in progress, also one that is beginning."""
        with self.lock:
            return self._live.get(message_id)

    def all(self, conversation_id: str | None = None) -> list[MessageGeneration]:
        """The generations in progress, also one that is beginning: all of them, or only a conversation's."""
        with self.lock:
            live = list(self._live.values())
        return live if conversation_id is None else [each for each in live if each.conversation == conversation_id]

    def check_room(self, count: int = 1) -> None:
        """Raise if no further messages can be begun.

        Raises:
            RefusedError: the app is ending, or too many messages are in progress.
        """
        if self._ending:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down", "the app is ending")
        if len(self._live) + count > MAX_ANSWERS:
            what = f"{MAX_ANSWERS} answers are in progress"
            raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, "busy", what, "stop one, or wait")

    def begin(
        self,
        question: StoredMessage,
        model: str | None = None,
        content: str = "",
        tokens: Sequence[Mapping[str, Any]] = (),
        rounds: Sequence[CallRound] = (),
        count: int = 1,
    ) -> list[StoredMessage]:
        """Begin new answers to a message of the user, the first of which is shown, and return them.

        Args:
            question: the message.
            model: the model, if it is offered; else the conversation's model answers.
            content: what the answers begin with.
            tokens: stored tokens of `content` by `model`; none if they are not known.
            rounds: calls of tools before the content.
            count: number of answers.

        Raises:
            RefusedError: no further answers can be begun.
            ConversationError: the message was deleted.
        """
        store, conversation = self._context.store, question.conversation
        chosen = self._model(model, conversation)
        with self.lock:
            self.check_room(count)
            messages = [
                store.add_message(
                    conversation,
                    question.id,
                    "assistant",
                    content,
                    model=chosen,
                    state=MessageState.WRITING,
                    rounds=rounds,
                )
                for _ in range(count)
            ]
            if count > 1:
                store.select_leaf(conversation, messages[0].id)
            self._start(messages, question, tokens, model)
        return messages

    def resume(self, message: StoredMessage, question: StoredMessage) -> StoredMessage:
        """Let an answer to a message of the user go on, which has ended.

        Raises:
            RefusedError: no further answer can be begun, or it is in progress.
            ConversationError: the message was deleted, or another process writes it.
        """
        store = self._context.store
        with self.lock:
            self.check_room()
            message = store.message(message.id)
            if message.state is MessageState.WRITING:
                raise writing_error()
            tokens = store.tokens(message.id)
            model = self._model(message.model, message.conversation)
            store.write_answer(message.id, message.content, None)
            rounds = tuple(each.undecided() for each in message.rounds)
            resumed = replace(store.message(message.id), model=model, rounds=rounds)
            self._context.events.publish("message", message=resumed)
            self._start([resumed], question, tokens, message.model)
        return resumed

    def interrupt_all(self) -> None:
        """Begin no further messages, and end those in progress as interrupted."""
        with self.lock:
            self._ending = True
        for each in self.all():
            each.state_if_cancelled = MessageState.INTERRUPTED
            each.cancellation.cancel()

    def close(self) -> None:
        """End all generations, and wait for their end."""
        self.interrupt_all()
        until = time.monotonic() + _JOIN_S
        for each in self.all():
            each.run.join(max(until - time.monotonic(), 0.0))

    def _model(self, wanted: str | None, conversation: str) -> str | None:
        """The model that answers: the wanted one if it is offered, else the conversation's."""
        if wanted is not None and any(entry.id == wanted for entry in self._context.pool.offered.entries()):
            return wanted
        return self._context.store.conversation(conversation).model or self._context.default_model()

    def _start(
        self,
        messages: Sequence[StoredMessage],
        question: StoredMessage,
        tokens: Sequence[Mapping[str, Any]],
        model_of_tokens: str | None,
    ) -> None:
        """Begin a run; the lock is held."""
        own_tokens = messages[0].model == model_of_tokens
        run = GenerationRun(self._context, messages, question, tokens, own_tokens, self._forget)
        self._live.update({each.id: each for each in run.generations})
        run.generations[0].run.start()

    def _forget(self, generation: MessageGeneration) -> None:
        with self.lock:
            if self._live.get(generation.id) is generation:  # it may go on already, in another run
                del self._live[generation.id]
