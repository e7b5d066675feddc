"""The messages that answer one question, and the run that generates them: the model, and the calls of tools between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ...errors import CancelledError, EdgeError, InputError
from ...models.find import BUNDLED_MODEL
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ...runtime.result import Chunk
from ...runtime.scheduling.request_run import Cancellation, Run
from ...runtime.tools.answer_parts import AnswerParts
from ..conversations.answering import (
    END_STATES,
    fit_answers,
    is_small_talk,
    stats_object,
    takes_calls,
)
from ..conversations.records import CallRound, MessageState, StoredCall, StoredMessage
from ..conversations.store import ConversationStore
from ..tools.call_rounds import CallingAnswer, Decision
from ..tools.mcp_connection import ServerTool
from .app_context import AppContext, EventChannel, read_settings
from .models.model_endpoints import record_speed
from .models.work_queue import outcome

_ALTERNATIVES: Final = 5
"""Alternatives that are kept with each token."""
_PROGRESS_S: Final = 0.1
"""Least time between two events of progress of one stage, in seconds."""
_PUBLISH_S: Final = 1 / 30
"""Least time between two pieces of text for the windows, in seconds."""


class GenerationRun:
    """Generates messages that answer one message of the user.

    Args:
        context: the store, the models, and the windows.
        messages: the messages in the store, which all begin with the same.
        question: the message that they answer.
        tokens: stored tokens of what they begin with; none if they are not known.
        own_tokens: whether these are tokens of the model that generates.
        ended: called with each message when it ends, and again at the end of the run.
    """

    def __init__(
        self,
        context: AppContext,
        messages: Sequence[StoredMessage],
        question: StoredMessage,
        tokens: Sequence[Mapping[str, Any]],
        own_tokens: bool,
        ended: Callable[[MessageGeneration], None],
    ) -> None:
        run = Run[None](self._work, "edge-run answer")
        self.generations: Final = [
            MessageGeneration(context.store, context.events, message, tokens, run) for message in messages
        ]
        self._context: Final = context
        self._model: Final = messages[0].model
        self._question: Final = question
        self._own_tokens: Final = own_tokens
        self._ended: Final = ended
        self._tools: Mapping[str, ServerTool] = {}

    def _work(self, run: Run[None]) -> None:
        """Generate the messages to their ends, whatever these are."""

        def cancel_if_all_are() -> None:
            if all(each.cancellation.cancelled for each in self.generations):
                run.cancellation.cancel()

        def generate() -> None:
            with ExitStack() as watching:
                for each in self.generations:
                    watching.enter_context(each.cancellation.calling(cancel_if_all_are))
                for each in self._generate_all(run.cancellation):
                    each.finish()
                    self._ended(each)

        _, error = outcome("the answer", generate)
        try:
            for each in self.generations:
                if not each.ended:
                    cancelled = each.cancellation.cancelled
                    each.state, each.stats = each.state_if_cancelled if cancelled else MessageState.FAILED, None
                    each.finish(None if cancelled else error or "the answer was cancelled")
        finally:
            for each in self.generations:
                self._ended(each)

    def _progress(self, stage: str, fraction: float | None) -> None:
        """Tell the windows what the next message waits for; the others wait for that one."""
        if (waiting := next((each for each in self.generations if not each.ended), None)) is not None:
            waiting.progress(stage, fraction)

    def _generate_all(self, cancellation: Cancellation) -> Iterator[MessageGeneration]:
        """Generate the messages; yields each when it ends.

        Raises:
            EdgeError: they cannot be generated, or were cancelled.
        """
        if chosen := self._context.store.conversation(self._question.conversation).tools:
            self._progress("starting the tools", None)
            self._tools = self._context.tools.offered(chosen, cancellation)
        if self._tools or self.generations[0].rounds:
            for each in self.generations:
                self._with_calls(each)
                yield each
        else:
            with self._context.pool.use(self._model, self._progress, cancellation=cancellation) as engine:
                yield from self._generate(engine, self.generations, cancellation)

    def _with_calls(self, generation: MessageGeneration) -> None:
        """Generate one message and make the calls of tools that it asks for, until it asks for none.

        No model is in use while the user decides about a call.

        Raises:
            EdgeError: it cannot be generated.
        """
        context, cancellation = self._context, generation.cancellation

        def generate() -> None:
            with context.pool.use(self._model, self._progress, cancellation=cancellation) as engine:
                for _ in self._generate(engine, [generation], cancellation):
                    pass

        try:
            generation.tools = self._tools
            generation.generate_with_calls(context.tools, generate)
        except CancelledError:
            if not cancellation.cancelled:
                raise
            generation.state, generation.stats = generation.state_if_cancelled, None

    def _generate(
        self, engine: Engine, generations: Sequence[MessageGeneration], cancellation: Cancellation
    ) -> Iterator[MessageGeneration]:
        """Generate messages with a model; yields each when it ends.

        Args:
            engine: the model.
            generations: the messages, which all begin with the same.
            cancellation: ends all of them.

        Raises:
            EdgeError: they cannot be generated, or were cancelled.
        """
        if engine.template is None:
            raise InputError(f"{self._model} has no chat template, so it cannot chat", "choose another model")
        first = generations[0]
        text, tokens = first.content, first.tokens or []
        if self._own_tokens and tokens and tokens[-1].get("id") in engine.tokenizer.eos:  # the user has chosen the end
            ended = engine.tokenizer.decode([token["id"] for token in tokens[:-1]])
            first.begin(AnswerParts(ended), tokens[:-1])
            first.state = MessageState.COMPLETE
            yield first
            return
        sampling = self._context.store.conversation(first.conversation).sampling
        options = self._options(sampling, engine, generations)
        asked = [each.message for each in generations]
        store, embedding_model = self._context.store, self._context.embedding_model
        fit = fit_answers(engine, store, asked, options, self._progress, cancellation, embedding_model, first.rounds)
        for each in generations:
            each.message = replace(each.message, passages=fit.passages)
        known = tokens if options.logprobs is not None and (tokens or not text) else None
        with ExitStack() as watching:
            stream = watching.enter_context(cancellation.reading(engine.answer(fit.prompt, options)))
            for number, each in enumerate(generations):
                if fit.trimmed:
                    self._context.events.publish(
                        "trimmed", conversation=each.conversation, message=each.id, turns=fit.trimmed
                    )
                watching.enter_context(each.cancellation.calling(partial(stream.cancel, number)))
                each.begin(stream.start_parts, known)
            for chunk in stream:
                each = generations[chunk.index]
                each.add(chunk)
                if chunk.finish_reason is not None and chunk.stats is not None:
                    cancelled = chunk.finish_reason is FinishReason.CANCELLED
                    each.state = each.state_if_cancelled if cancelled else END_STATES[chunk.finish_reason]
                    each.stats = self._stats(stats_object(chunk.stats, fit.trimmed, no_passage=fit.no_passage), engine)
                    record_speed(self._context, self._model, chunk.stats)
                    yield each
        if any(each.state is None for each in generations):
            raise CancelledError("the answer has no end")

    def _stats(self, shown: dict[str, Any], engine: Engine) -> dict[str, Any]:
        if self._tools and not takes_calls(engine):
            shown["tools_ignored"] = True
        if self._model == BUNDLED_MODEL and is_small_talk(self._question.content):
            shown["small_talk"] = True  # the page says why the answer is a shell command
        return shown

    def _options(
        self, sampling: Mapping[str, Any], engine: Engine, generations: Sequence[MessageGeneration]
    ) -> GenerateOptions:
        first = generations[0]
        options = GenerateOptions(
            logprobs=_ALTERNATIVES if read_settings(self._context.store)["token_details"] else None,
            answer_start=[token["id"] for token in first.tokens]
            if first.tokens and self._own_tokens
            else first.content,
            keep_prefix=True,
            tools=[tool.definition(name) for name, tool in self._tools.items()] if takes_calls(engine) else (),
        ).changed(sampling)
        if len(self.generations) == 1:
            return options
        # Greedy answers would all be equal, so they are sampled, unless the user has set the temperature.
        greedy = "temperature" not in sampling and options.sampling(engine.defaults).greedy
        changes: dict[str, Any] = {"temperature": 1.0} if greedy else {}
        if len(generations) > 1:
            changes["n"] = len(generations)
        elif options.seed is not None:  # the seed that it has among several answers at a time
            changes["seed"] = options.seed + self.generations.index(first)
        return options.changed(changes)


class MessageGeneration(CallingAnswer):
    """A message that this process generates; its run writes it, and any thread may ask for it, or cancel it.

    Args:
        store: keeps it.
        events: the windows, which get its text in numbered pieces.
        message: the message in the store, with what it begins with.
        tokens: stored tokens of what it begins with; none if they are not known.
        run: the run that generates it.
    """

    def __init__(
        self,
        store: ConversationStore,
        events: EventChannel,
        message: StoredMessage,
        tokens: Sequence[Mapping[str, Any]],
        run: Run[None],
    ) -> None:
        super().__init__(store, message, tokens)
        self.id: Final = message.id
        self.run: Final = run
        self.state_if_cancelled = MessageState.STOPPED
        self.ended = False
        """Whether `finish` has begun: no further text comes, but the store may not have the end yet."""
        self._events: Final = events
        self._lock: Final = threading.Condition()
        """Guards all that follows, and the order of the events of this message."""
        self._decisions: Final[dict[str, Decision]] = {}
        self._published = len(message.content)
        """Number of characters of the content that the windows have."""
        self._sequence = 0
        self._tokens = 0
        self._started = self._published_at = time.monotonic()
        self._first_token: float | None = None
        self._stage: dict[str, Any] = {}
        self._stage_at = 0.0

    def begin(self, parts: AnswerParts, tokens: Sequence[Mapping[str, Any]] | None) -> None:
        """Begin its next text, and tell the windows where that is not what they have."""
        with self._lock:
            known = self.content[: self._published]
            super().begin(parts, tokens)
            self._published = len(self.content)
            if self.content != known:
                self._events.publish("message", message=self._as_known(self.message))

    def add(self, chunk: Chunk) -> str:
        """Add a piece, and tell the windows now and then."""
        text = super().add(chunk)
        now = time.monotonic()
        with self._lock:
            if self._first_token is None:
                self._first_token = now
            self._tokens, self._stage = chunk.completion_tokens, {}
            if now - self._published_at >= _PUBLISH_S:
                self._publish_pending()
        return text

    def set_rounds(self, rounds: Sequence[CallRound]) -> None:
        """Keep calls of tools, and tell the windows of them."""
        super().set_rounds(rounds)
        with self._lock:
            self._published, self._stage = 0, {}
            self._tokens, self._first_token = 0, None  # what it writes next has a rate of its own
            self._events.publish("message", message=self._as_known(self.message))

    def finish(self, error: str | None = None) -> None:
        """Keep the whole message, and tell the windows of its end.

        Args:
            error: why it failed, in a sentence.
        """
        with self._lock:
            self.ended = True
            self._publish_pending()
        try:
            super().finish(error)
        except EdgeError as problem:
            # The disk is full, for example: the windows have the text, and are told that it is not kept.
            message = replace(self.message, content=self.content, rounds=self.rounds)
            message = replace(message, state=MessageState.FAILED, error=str(problem))
            self._events.publish("message", message=message)

    def progress(self, stage: str, fraction: float | None) -> None:
        """Tell the windows what the message waits for; a `Progress`, and None where nobody knows how far it is."""
        now = time.monotonic()
        with self._lock:
            if stage == self._stage.get("stage") and fraction != 1 and now - self._stage_at < _PROGRESS_S:
                return
            self._stage, self._stage_at = {"stage": stage, "fraction": fraction}, now
            self._events.publish("progress", conversation=self.conversation, message=self.id, **self._stage)

    @contextmanager
    def snapshot(self, message: StoredMessage) -> Iterator[tuple[StoredMessage, dict[str, Any]]]:
        """The message as the windows know it, and how far that is; no further piece is published in the block."""
        with self._lock:
            progress = {"message": self.id, "sequence": self._sequence, "rate": self._rate(), **self._stage}
            yield self._as_known(message), progress

    def decide(self, call_id: str, decision: Decision) -> None:
        """Decide about a call of a tool; the first decision holds."""
        with self._lock:
            self._decisions.setdefault(call_id, decision)
            self._lock.notify_all()

    def wait_for_decision(self, call: StoredCall) -> Decision:
        """Wait until a window has decided about a call."""
        with self.cancellation.calling(self._wake), self._lock:
            while (decision := self._decisions.get(call.id)) is None:
                self.cancellation.check()
                self._lock.wait()
        return decision

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _publish_pending(self) -> None:
        """Tell the windows what has been added; the lock is held."""
        if text := self.content[self._published :]:
            self._sequence += 1
            self._published_at = time.monotonic()
            self._published += len(text)
            fields = {"conversation": self.conversation, "message": self.id, "sequence": self._sequence}
            self._events.publish("delta", **fields, text=text, rate=self._rate())

    def _as_known(self, message: StoredMessage) -> StoredMessage:
        return replace(message, content=self.content[: self._published], rounds=self.rounds)

    def _rate(self) -> dict[str, Any]:
        first = self._first_token
        seconds = 0.0 if first is None else time.monotonic() - first
        return {
            "tokens": self._tokens,
            "tokens_per_second": (self._tokens - 1) / seconds if seconds > 0 and self._tokens > 1 else 0.0,
            "first_token_s": None if first is None else first - self._started,
        }
