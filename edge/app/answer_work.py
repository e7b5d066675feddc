"""Generates answers to one message with the model, and keeps them in the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ...errors import CancelledError, EdgeError, InputError
from ...models.find import BUNDLED_MODEL
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ...runtime.result import Stats
from ...runtime.scheduling.request_run import Cancellation
from ...runtime.tools.calls import joined_calls
from ...runtime.tools.function_tools import MAX_ROUNDS
from ..conversations.answering import (
    AnswerWriter,
    answer_state,
    fit_context,
    generate_options,
    is_small_talk,
    stats_object,
    takes_calls,
)
from ..conversations.records import CallRound, MessageState, ReasoningText, StoredCall, StoredMessage, as_object
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


def text_of(tokens: Sequence[Mapping[str, Any]]) -> str:
    """The text of stored tokens; special tokens have none."""
    return "".join(token["text"] for token in tokens if not token.get("special"))


class AnswerWork:
    """Generates answers to one message, in a thread of their own.

    Args:
        context: the store, the models, and the windows.
        messages: the answers in the store, which are written one after another.
        question: the message that they answer.
        start: what they begin with.
        pending: set whenever an answer has text to publish.
    """

    def __init__(
        self,
        context: AppContext,
        messages: Sequence[StoredMessage],
        question: StoredMessage,
        start: StoredStart,
        pending: threading.Event,
    ) -> None:
        self._context: Final = context
        self._model: Final = messages[0].model
        self._question: Final = question
        self._start: Final = start
        self._pending: Final = pending
        # What an answer began with is kept where it cannot go on.
        self.answers: Final = tuple(
            LiveAnswer(message, context.events, self._writer(message.id, start.text, start.tokens), index)
            for index, message in enumerate(messages)
        )
        self._left: Final = list(self.answers)
        """Those that have not ended."""
        self._tools: Sequence[OfferedTool] = ()

    def generate(self, cancellation: Cancellation) -> Iterator[LiveAnswer]:
        """Generate the answers to their ends, whatever these are; yields each when it has ended.

        Args:
            cancellation: that of the run, which ends when all answers are cancelled.
        """

        def cancel_if_all_are() -> None:
            if all(live.cancellation.cancelled for live in self.answers):
                cancellation.cancel()

        error = None
        try:
            with ExitStack() as watching:
                for live in self.answers:
                    watching.enter_context(live.cancellation.calling(cancel_if_all_are))
                for live in self._all(cancellation):
                    self._finish(live)
                    yield live
        except EdgeError as problem:
            error = str(problem)
        except Exception as problem:  # noqa: BLE001  what it is goes to the log
            _log.error("an answer failed: %s", type(problem).__name__, exc_info=problem)
            error = f"the app failed: {type(problem).__name__}"
        for live in list(self._left):
            cancelled = live.cancellation.cancelled
            live.state, live.stats = live.state_if_cancelled if cancelled else MessageState.FAILED, None
            self._finish(live, None if cancelled else error)
            yield live

    def _finish(self, live: LiveAnswer, error: str | None = None) -> None:
        """Keep an answer that has ended."""
        self._left.remove(live)
        live.publish()
        try:
            live.writer.finish(live.state or MessageState.FAILED, live.stats, error)
        except EdgeError as problem:
            # The disk is full, for example: the windows have the text, and are told that it is not kept.
            message = replace(live.message, content=live.writer.content, rounds=live.writer.rounds)
            message = replace(message, state=MessageState.FAILED, error=str(problem))
            self._context.events.publish("message", message=as_object(message))

    def _progress(self, stage: str, fraction: float | None) -> None:
        """Tell the windows what the next answer waits for; the others wait for that one."""
        if self._left:
            self._left[0].progress(stage, fraction)

    def _all(self, cancellation: Cancellation) -> Iterator[LiveAnswer]:
        """Generate the answers; yields each when it ends.

        Raises:
            EdgeError: they cannot be generated, or were cancelled.
        """
        tools, first = self._context.tools, self.answers[0]
        if chosen := self._context.store.conversation(first.conversation).tools:
            self._progress("starting the tools", None)
            self._tools = tools.offered(chosen, cancellation)
        if self._tools or self._start.rounds:
            for live in self.answers:
                self._with_calls(live)
                yield live
        else:
            with self._context.pool.use(self._model, self._progress, cancellation=cancellation) as engine:
                yield from self._generate(engine, self.answers, self._start, cancellation)

    def _with_calls(self, live: LiveAnswer) -> None:
        """Generate one answer and make the calls of tools that it asks for, until it asks for none.

        No model is in use while the user decides about a call.

        Raises:
            EdgeError: it cannot be generated.
        """
        start = self._start
        maker = CallMaker(self._context.store, self._context.tools, self._tools)
        try:
            for _ in range(MAX_ROUNDS):
                writer = live.writer
                if writer.rounds and not writer.rounds[-1].decided and not writer.content:
                    maker.make(live, writer)
                    start = replace(start, rounds=writer.rounds)
                use = self._context.pool.use(self._model, self._progress, cancellation=live.cancellation)
                with use as engine:
                    for _ended in self._generate(engine, (live,), start, live.cancellation):
                        pass
                calls = tuple(StoredCall(call.id, call.name, call.arguments) for call in joined_calls(live.calls))
                if not calls:
                    return
                writer = live.writer
                writer.begin_round([*writer.rounds, CallRound(writer.content.strip(), calls)])
                live.show_rounds(writer.rounds)
                if live.state is not MessageState.COMPLETE:
                    return
                start = StoredStart(rounds=writer.rounds)
        except CancelledError:
            if not live.cancellation.cancelled:
                raise
            live.state, live.stats = live.state_if_cancelled, None
        else:
            live.state = MessageState.LENGTH

    def _generate(
        self, engine: Engine, answers: Sequence[LiveAnswer], start: StoredStart, cancellation: Cancellation
    ) -> Iterator[LiveAnswer]:
        """Generate answers with a model; yields each when it ends.

        Args:
            engine: the model.
            answers: the answers.
            start: what they begin with.
            cancellation: ends all of them.

        Raises:
            EdgeError: they cannot be generated, or were cancelled.
        """
        store, first = self._context.store, answers[0]
        if engine.template is None:
            raise InputError(f"{self._model} has no chat template, so it cannot chat", "choose another model")
        if self._has_ended(engine, start):
            tokens = start.tokens[:-1]
            text = engine.tokenizer.decode([token["id"] for token in tokens])
            first.writer, first.state = self._writer(first.id, text, tokens), MessageState.COMPLETE
            yield first
            return
        conversation = store.conversation(first.conversation)
        options = self._options(conversation.sampling, engine, answers, start)
        messages = store.branch(self._question.id)
        if start.rounds:
            messages.append(replace(first.message, content="", rounds=tuple(start.rounds)))
        fit = fit_context(engine, conversation.system, messages, options)
        for live in answers if fit.trimmed else ():
            self._context.events.publish(
                "trimmed", conversation=live.conversation, message=live.id, turns=list(fit.trimmed)
            )
        with ExitStack() as watching:
            stream = watching.enter_context(cancellation.reading(engine.answer(fit.prompt, options)))
            known = start.tokens if options.logprobs is not None and start.has_tokens else None
            for number, live in enumerate(answers):
                watching.enter_context(live.cancellation.calling(partial(stream.cancel, number)))
                live.written, live.calls, live.state = ReasoningText(), [], None
                begun = live.written.push(stream.start_parts.reasoning, stream.start_parts.text)
                live.writer = self._writer(live.id, begun, known, start.rounds)
                live.begin(begun)
            for chunk in stream:
                live = answers[chunk.index]
                text = live.written.push(chunk.reasoning, chunk.text)
                live.calls += chunk.tool_calls
                live.writer.add(chunk, text)
                if live.add(text, chunk.completion_tokens):
                    self._pending.set()
                if chunk.finish_reason is not None and chunk.stats is not None:
                    cancelled = chunk.finish_reason is FinishReason.CANCELLED
                    live.state = live.state_if_cancelled if cancelled else answer_state(chunk.finish_reason)
                    live.stats = self._stats(chunk.stats, fit.trimmed, engine)
                    yield live
        if any(live.state is None for live in answers):
            raise CancelledError("the answer has no end")

    def _writer(
        self,
        message_id: str,
        content: str,
        tokens: Sequence[Mapping[str, Any]] | None,
        rounds: Sequence[CallRound] | None = None,
    ) -> AnswerWriter:
        """A writer of an answer that goes on behind calls of tools."""
        chosen = self._start.rounds if rounds is None else rounds
        return AnswerWriter(self._context.store, message_id, content, tokens, chosen)

    def _stats(self, stats: Stats, trimmed: Sequence[str], engine: Engine) -> dict[str, Any]:
        shown = stats_object(stats, trimmed)
        if self._tools and not takes_calls(engine):
            shown["tools_ignored"] = True
        if self._model == BUNDLED_MODEL and is_small_talk(self._question.content):
            shown["small_talk"] = True  # the page says why the answer is a shell command
        return shown

    def _has_ended(self, engine: Engine, start: StoredStart) -> bool:
        """Whether the last token that an answer begins with is one that ends it: the user has chosen that."""
        last = start.tokens[-1] if start.tokens else {}
        return start.model == self._model and last.get("id") in engine.tokenizer.eos

    def _options(
        self, sampling: Mapping[str, Any], engine: Engine, answers: Sequence[LiveAnswer], start: StoredStart
    ) -> GenerateOptions:
        is_of_model = start.model == self._model
        base = GenerateOptions(
            logprobs=_ALTERNATIVES if read_settings(self._context.store)["token_details"] else None,
            answer_start=[token["id"] for token in start.tokens] if start.tokens and is_of_model else start.text,
            keep_prefix=True,
            tools=[each.definition for each in self._tools] if takes_calls(engine) else (),
        )
        options = generate_options(base, sampling)
        if len(self.answers) == 1:
            return options
        # Greedy answers would all be equal, so they are sampled, unless the user has set the temperature.
        greedy = "temperature" not in sampling and options.sampling(engine.defaults).greedy
        changes: dict[str, Any] = {"temperature": 1.0} if greedy else {}
        if len(answers) > 1:
            changes["n"] = len(answers)
        elif options.seed is not None:  # as that of several answers at a time
            changes["seed"] = options.seed + answers[0].index
        return options.changed(changes)
