"""Generates answers to one message with the model, and keeps them in the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ...errors import EdgeError, InputError
from ...models.find import BUNDLED_MODEL
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ...runtime.result import Stats
from ...runtime.tools.calls import ToolCall, ToolCallDelta, joined_calls
from ...runtime.tools.function_tools import MAX_ROUNDS
from ..conversations.answering import (
    AnswerWriter,
    answer_state,
    fit_context,
    generate_options,
    is_small_talk,
    model_messages,
    stats_object,
    takes_calls,
)
from ..conversations.records import CallRound, MessageState, ReasoningText, StoredCall, StoredMessage, as_object
from ..service.cancellation import Cancellation, CancelledError
from .app_context import AppContext, read_settings
from .live_answer import LiveAnswer
from .tools.call_making import CallMaker
from .tools.tool_servers import OfferedTool

_log: Final = logging.getLogger(__name__)
_ALTERNATIVES: Final = 5
"""Alternatives that are kept with each token."""


@dataclass(frozen=True)
class StoredStart:
    """What an answer begins with: text, and its tokens if they are known."""

    text: str = ""
    tokens: Sequence[Mapping[str, Any]] = ()
    """Stored tokens of the text; none if they are not known."""
    model: str | None = None
    """The model whose tokens these are."""
    rounds: Sequence[CallRound] = ()
    """Calls of tools before the text."""

    @property
    def has_tokens(self) -> bool:
        """Whether all tokens of the start are known, so that those of the whole answer can be kept."""
        return bool(self.tokens) or not self.text


@dataclass(frozen=True)
class _Ended:
    """How the generating of an answer, or of what it writes before its calls, ended."""

    index: int
    state: MessageState
    stats: dict[str, Any] | None = None
    calls: Sequence[ToolCall] = ()


def text_of(tokens: Sequence[Mapping[str, Any]]) -> str:
    """The text of stored tokens; special tokens have none."""
    return "".join(token["text"] for token in tokens if not token.get("special"))


class AnswerWork:
    """Generates answers to one message, in a thread of their own.

    Args:
        context: the store, the models, and the windows.
        answers: the answers, which are written one after another.
        question: the message that they answer.
        start: what they begin with.
        pending: set whenever an answer has text to publish.
    """

    def __init__(
        self,
        context: AppContext,
        answers: Sequence[LiveAnswer],
        question: StoredMessage,
        start: StoredStart,
        pending: threading.Event,
    ) -> None:
        self._context: Final = context
        self._answers: Final = tuple(answers)
        self._model: Final = answers[0].message.model
        self._question: Final = question
        self._start: Final = start
        self._pending: Final = pending
        # What an answer began with is kept where it cannot go on.
        self._writers = [self._writer(live, start.text, start.tokens) for live in answers]
        self._tools: Sequence[OfferedTool] = ()
        self._ended: Final[set[int]] = set()
        """Indices of the answers that have ended."""
        self._cancellation: Final = Cancellation()
        """Cancelled when all answers are."""

    def run(self) -> Iterator[LiveAnswer]:
        """Generate the answers to their ends, whatever these are; yields each when it has ended."""
        error = None
        try:
            with ExitStack() as watching:
                for live in self._answers:
                    watching.enter_context(live.cancellation.calling(self._cancel_if_all_are))
                for ended in self._all():
                    self._finish(ended.index, ended.state, ended.stats)
                    yield self._answers[ended.index]
        except EdgeError as problem:
            error = str(problem)
        except Exception as problem:  # noqa: BLE001  what it is goes to the log
            _log.error("an answer failed: %s", type(problem).__name__, exc_info=problem)
            error = f"the app failed: {type(problem).__name__}"
        for index, live in enumerate(self._answers):
            if index in self._ended:
                continue
            if live.cancellation.cancelled:
                self._finish(index, live.state_if_cancelled)
            else:
                self._finish(index, MessageState.FAILED, error=error)
            yield live

    def _finish(
        self, index: int, state: MessageState, stats: dict[str, Any] | None = None, error: str | None = None
    ) -> None:
        """Keep an answer that has ended."""
        self._ended.add(index)
        live, writer = self._answers[index], self._writers[index]
        live.publish()
        try:
            writer.finish(state, stats, error)
        except EdgeError as problem:
            # The disk is full, for example: the windows have the text, and are told that it is not kept.
            message = replace(live.message, content=writer.content, rounds=writer.rounds)
            message = replace(message, state=MessageState.FAILED, error=str(problem))
            self._context.events.publish("message", message=as_object(message))

    def _cancel_if_all_are(self) -> None:
        if all(live.cancellation.cancelled for live in self._answers):
            self._cancellation.cancel()

    def _progress(self, stage: str, fraction: float | None) -> None:
        """Tell the windows what the next answer waits for; the others wait for that one."""
        waiting = [live for index, live in enumerate(self._answers) if index not in self._ended]
        if waiting:
            waiting[0].progress(stage, fraction)

    def _all(self) -> Iterator[_Ended]:
        """Generate the answers; yields each when it ends.

        Raises:
            EdgeError: they cannot be generated, or were cancelled.
        """
        tools, first = self._context.tools, self._answers[0]
        if chosen := self._context.store.conversation(first.conversation).tools:
            self._progress("starting the tools", None)
            self._tools = tools.offered(chosen, self._cancellation)
        if self._tools or self._start.rounds:
            for index in range(len(self._answers)):
                yield self._with_calls(index)
        else:
            with self._context.pool.use(self._model, self._progress, cancellation=self._cancellation) as engine:
                yield from self._generate(engine, range(len(self._answers)), self._start)

    def _with_calls(self, index: int) -> _Ended:
        """Generate one answer and make the calls of tools that it asks for, until it asks for none.

        No model is in use while the user decides about a call.

        Raises:
            EdgeError: it cannot be generated.
        """
        live, start = self._answers[index], self._start
        maker = CallMaker(self._context.store, self._context.tools, self._tools)
        try:
            for _ in range(MAX_ROUNDS):
                writer = self._writers[index]
                if writer.rounds and not writer.rounds[-1].decided and not writer.content:
                    maker.make(live, writer)
                    start = replace(start, rounds=writer.rounds)
                use = self._context.pool.use(self._model, self._progress, cancellation=live.cancellation)
                with use as engine:
                    (ended,) = self._generate(engine, (index,), start)
                if not ended.calls:
                    return ended
                writer = self._writers[index]
                calls = tuple(StoredCall(call.id, call.name, call.arguments) for call in ended.calls)
                writer.begin_round([*writer.rounds, CallRound(writer.content.strip(), calls)])
                live.show_rounds(writer.rounds)
                if ended.state is not MessageState.COMPLETE:
                    return ended
                start = StoredStart(rounds=writer.rounds)
        except CancelledError:
            if not live.cancellation.cancelled:
                raise
            return _Ended(index, live.state_if_cancelled)
        return replace(ended, state=MessageState.LENGTH)

    def _generate(self, engine: Engine, indices: Sequence[int], start: StoredStart) -> Iterator[_Ended]:
        """Generate answers with a model; yields each when it ends.

        Args:
            engine: the model.
            indices: which of the answers.
            start: what they begin with.

        Raises:
            EdgeError: they cannot be generated, or were cancelled.
        """
        store, lives = self._context.store, [self._answers[index] for index in indices]
        if engine.template is None:
            raise InputError(f"{self._model} has no chat template, so it cannot chat", "choose another model")
        if (ended := self._ended_start(engine, start)) is not None:
            self._writers[indices[0]] = ended
            yield _Ended(indices[0], MessageState.COMPLETE)
            return
        conversation = store.conversation(lives[0].conversation)
        options = self._options(conversation.sampling, engine, indices, start)
        messages = store.branch(self._question.id)
        if start.rounds:
            messages.append(replace(lives[0].message, content="", rounds=tuple(start.rounds)))
        fit = fit_context(engine, conversation.system, messages, options)
        for live in lives if fit.trimmed else ():
            self._context.events.publish(
                "trimmed", conversation=live.conversation, message=live.id, turns=list(fit.trimmed)
            )
        stream = engine.stream(model_messages(conversation.system, fit.messages, calls=takes_calls(engine)), options)
        with closing(stream), ExitStack() as watching:
            watching.enter_context(self._cancellation.calling(stream.cancel))
            for number, live in enumerate(lives):
                watching.enter_context(live.cancellation.calling(partial(stream.cancel, number)))
            known = start.tokens if options.logprobs is not None and start.has_tokens else None
            texts = [ReasoningText() for _ in lives]
            for number, live in enumerate(lives):
                begun = texts[number].push(stream.start_parts.reasoning, stream.start_parts.text)
                self._writers[indices[number]] = self._writer(live, begun, known, start.rounds)
                live.begin(begun)
            calls: list[list[ToolCallDelta]] = [[] for _ in lives]
            unfinished = len(lives)
            for chunk in stream:
                live, index = lives[chunk.index], indices[chunk.index]
                text = texts[chunk.index].push(chunk.reasoning, chunk.text)
                calls[chunk.index] += chunk.tool_calls
                self._writers[index].add(chunk, text)
                if live.add(text, chunk.completion_tokens):
                    self._pending.set()
                if chunk.finish_reason is not None and chunk.stats is not None:
                    unfinished -= 1
                    cancelled = chunk.finish_reason is FinishReason.CANCELLED
                    state = live.state_if_cancelled if cancelled else answer_state(chunk.finish_reason)
                    stats = self._stats(chunk.stats, fit.trimmed, engine)
                    yield _Ended(index, state, stats, joined_calls(calls[chunk.index]))
        if unfinished:
            raise CancelledError("the answer has no end")

    def _writer(
        self,
        live: LiveAnswer,
        content: str,
        tokens: Sequence[Mapping[str, Any]] | None,
        rounds: Sequence[CallRound] | None = None,
    ) -> AnswerWriter:
        """A writer of an answer that goes on behind calls of tools."""
        chosen = self._start.rounds if rounds is None else rounds
        return AnswerWriter(self._context.store, live.id, content, tokens, chosen)

    def _stats(self, stats: Stats, trimmed: Sequence[str], engine: Engine) -> dict[str, Any]:
        shown = stats_object(stats, trimmed)
        if self._tools and not takes_calls(engine):
            shown["tools_ignored"] = True
        if self._model == BUNDLED_MODEL and is_small_talk(self._question.content):
            shown["small_talk"] = True  # the page says why the answer is a shell command
        return shown

    def _ended_start(self, engine: Engine, start: StoredStart) -> AnswerWriter | None:
        """The whole answer if its last token is one that ends it: the user has chosen that."""
        *tokens, last = start.tokens or [{}]
        if start.model != self._model or last.get("id") not in engine.tokenizer.eos:
            return None
        text = engine.tokenizer.decode([token["id"] for token in tokens])
        return self._writer(self._answers[0], text, tokens)

    def _options(
        self, sampling: Mapping[str, Any], engine: Engine, indices: Sequence[int], start: StoredStart
    ) -> GenerateOptions:
        is_of_model = start.model == self._model
        base = GenerateOptions(
            logprobs=_ALTERNATIVES if read_settings(self._context.store)["token_details"] else None,
            answer_start=[token["id"] for token in start.tokens] if start.tokens and is_of_model else start.text,
            keep_prefix=True,
            tools=[each.definition for each in self._tools] if takes_calls(engine) else (),
        )
        options = generate_options(base, sampling)
        if len(self._answers) == 1:
            return options
        # Greedy answers would all be equal, so they are sampled, unless the user has set the temperature.
        greedy = "temperature" not in sampling and options.sampling(engine.model.defaults).greedy
        changes: dict[str, Any] = {"temperature": 1.0} if greedy else {}
        if len(indices) > 1:
            changes["n"] = len(indices)
        elif options.seed is not None:  # as that of several answers at a time
            changes["seed"] = options.seed + indices[0]
        return options.changed(changes)
