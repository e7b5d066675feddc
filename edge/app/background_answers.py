"""Generates answers in the background: they go on whether or not a window shows them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

from ...errors import EdgeError, InputError
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ..conversations.answering import AnswerWriter, answer_state, generate_options, stats_object
from ..conversations.context_fit import fit_context, model_messages
from ..conversations.records import MessageState, StoredMessage, as_object
from ..server.error_objects import RefusedError
from ..service.cancellation import CancelledError
from .app_context import AppContext
from .app_settings import read_settings
from .live_answer import LiveAnswer

_log: Final = logging.getLogger(__name__)
MAX_ANSWERS: Final = 32
"""Largest number of answers that are generated or wait."""
_ALTERNATIVES: Final = 5
"""Alternatives that are kept with each token."""
_PUBLISH_S: Final = 1 / 30
"""Least time between two pieces of text of an answer for the windows, in seconds."""
_JOIN_S: Final = 10.0


@dataclass(frozen=True)
class AnswerStart:
    """What an answer begins with: text, and its tokens if they are known."""

    text: str = ""
    tokens: Sequence[Mapping[str, Any]] = ()
    """Stored tokens of the text; none if they are not known."""
    model: str | None = None
    """The model whose tokens these are."""


def text_of(tokens: Sequence[Mapping[str, Any]]) -> str:
    """The text of stored tokens; special tokens have none."""
    return "".join(token["text"] for token in tokens if not token.get("special"))


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

    def check_room(self) -> None:
        """Raise if no further answer can be begun.

        Raises:
            RefusedError: the app is ending, or too many answers are in progress.
        """
        if self._ending:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down", "the app is ending")
        if len(self._live) >= MAX_ANSWERS:
            raise RefusedError(
                HTTPStatus.TOO_MANY_REQUESTS, "busy", f"{MAX_ANSWERS} answers are in progress", "stop one, or wait"
            )

    def answer(self, question: StoredMessage, start: AnswerStart | None = None) -> StoredMessage:
        """Begin a new answer to a message of the user, and return it.

        Args:
            question: the message.
            start: what the answer begins with.

        Raises:
            RefusedError: no further answer can be begun.
            ConversationError: the message was deleted.
        """
        store = self._context.store
        conversation = store.conversation(question.conversation)
        model = start.model if start is not None and self._offers(start.model) else conversation.model
        model = model or self._context.default_model()
        with self._beginning:
            self.check_room()
            message = store.add_message(
                question.conversation, question.id, "assistant", "", model=model, state=MessageState.WRITING
            )
            self._begin(message, question, start)
        return message

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
        start = AnswerStart(message.content, store.tokens(message.id), message.model)
        model = message.model if self._offers(message.model) else store.conversation(message.conversation).model
        if (before := self.live(message.id)) is not None:
            # The windows are told of the end of an answer a moment before its thread ends.
            before.ended.wait(_JOIN_S)
        with self._beginning:
            self.check_room()
            store.write_answer(message.id, message.content, None)
            message = replace(store.message(message.id), model=model or self._context.default_model())
            self._context.events.publish("message", message=as_object(message))
            self._begin(message, question, start)
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

    def _begin(self, message: StoredMessage, question: StoredMessage, start: AnswerStart | None) -> None:
        live = LiveAnswer(message, self._context.events)
        with self._lock:
            if message.id in self._live:
                raise writing_error()
            self._live[message.id] = live
            if self._publisher is None:
                self._publisher = threading.Thread(target=self._publish, name="edge-run windows", daemon=True)
                self._publisher.start()
        work = _AnswerWork(self._context, live, question, start or AnswerStart(), self._pending)
        threading.Thread(target=self._run, args=(work, live), name="edge-run answer", daemon=True).start()

    def _run(self, work: _AnswerWork, live: LiveAnswer) -> None:
        try:
            work.run()
        finally:
            with self._lock:
                self._live.pop(live.id, None)
            live.ended.set()

    def _publish(self) -> None:
        """Publish what answers have added, now and then, in a thread of its own."""
        while not self._ending or self._live:
            self._pending.wait()
            self._pending.clear()
            for answer in self.all():
                answer.publish()
            time.sleep(_PUBLISH_S)


class _AnswerWork:
    """Generates one answer, in its thread.

    Args:
        context: the store, the models, and the windows.
        live: the answer.
        question: the message that it answers.
        start: what it begins with.
        pending: set whenever the answer has text to publish.
    """

    def __init__(
        self,
        context: AppContext,
        live: LiveAnswer,
        question: StoredMessage,
        start: AnswerStart,
        pending: threading.Event,
    ) -> None:
        self._context: Final = context
        self._live: Final = live
        self._question: Final = question
        self._start: Final = start
        self._pending: Final = pending
        # What an answer began with is kept where it cannot go on.
        self._writer = AnswerWriter(context.store, live.id, start.text, start.tokens)
        self._stats: dict[str, Any] | None = None

    def run(self) -> None:
        """Generate the answer to its end, whatever that is."""
        live, error = self._live, None
        try:
            with self._context.pool.use(live.message.model, live.progress, cancellation=live.cancellation) as engine:
                state = self._generate(engine)
        except EdgeError as problem:
            state = MessageState.FAILED
            error = str(problem)
            if live.cancellation.cancelled:
                state, error = live.state_if_cancelled, None
        except Exception as problem:  # noqa: BLE001  what it is goes to the log
            _log.error("an answer failed: %s", type(problem).__name__, exc_info=problem)
            state, error = MessageState.FAILED, f"the app failed: {type(problem).__name__}"
        live.publish()
        try:
            self._writer.finish(state, self._stats, error)
        except EdgeError as problem:
            # The disk is full, for example: the windows have the text, and are told that it is not kept.
            message = replace(live.message, content=self._writer.content, state=MessageState.FAILED, error=str(problem))
            self._context.events.publish("message", message=as_object(message))

    def _generate(self, engine: Engine) -> MessageState:
        """Generate the answer with a model; returns how it ended.

        Raises:
            EdgeError: it cannot be generated, or was cancelled.
        """
        live, store = self._live, self._context.store
        if engine.template is None:
            raise InputError(f"{live.message.model} has no chat template, so it cannot chat", "choose another model")
        if (ended := self._ended_start(engine)) is not None:
            self._writer = ended
            return MessageState.COMPLETE
        conversation = store.conversation(live.conversation)
        options = self._options(conversation.sampling)
        messages = store.branch(self._question.id)
        fit = fit_context(engine, conversation.system, messages, options)
        if fit.trimmed:
            self._context.events.publish(
                "trimmed", conversation=live.conversation, message=live.id, turns=list(fit.trimmed)
            )
        stream = engine.stream(model_messages(conversation.system, fit.messages), options)
        with closing(stream), live.cancellation.calling(stream.cancel):
            known = self._start.tokens if options.logprobs is not None and self._has_tokens else None
            self._writer = AnswerWriter(store, live.id, stream.start_text, known)
            live.begin(stream.start_text)
            for chunk in stream:
                self._writer.add(chunk)
                if live.add(chunk):
                    self._pending.set()
                if chunk.finish_reason is not None and chunk.stats is not None:
                    self._stats = stats_object(chunk.stats, fit.trimmed)
                    cancelled = chunk.finish_reason is FinishReason.CANCELLED
                    return live.state_if_cancelled if cancelled else answer_state(chunk.finish_reason)
        raise CancelledError("the answer has no end")

    def _ended_start(self, engine: Engine) -> AnswerWriter | None:
        """The whole answer if its last token is one that ends it: the user has chosen that."""
        *tokens, last = self._start.tokens or [{}]
        if not self._is_of_model or last.get("id") not in engine.tokenizer.eos:
            return None
        text = engine.tokenizer.decode([token["id"] for token in tokens])
        return AnswerWriter(self._context.store, self._live.id, text, tokens)

    @property
    def _is_of_model(self) -> bool:
        """Whether the tokens of the start are those of the model that answers."""
        return self._start.model == self._live.message.model

    @property
    def _has_tokens(self) -> bool:
        """Whether all tokens of the start are known, so that those of the whole answer can be kept."""
        return bool(self._start.tokens) or not self._start.text

    def _options(self, sampling: Mapping[str, Any]) -> GenerateOptions:
        start = self._start
        base = GenerateOptions(
            logprobs=_ALTERNATIVES if read_settings(self._context.store)["token_details"] else None,
            answer_start=[token["id"] for token in start.tokens] if start.tokens and self._is_of_model else start.text,
        )
        return generate_options(base, sampling)
