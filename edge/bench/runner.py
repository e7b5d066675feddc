"""Measures every turn of some conversations in every decoding mode.

Plain decoding is always one of the modes, and the modes answer a turn one right after the other, in changing order, so
a ratio compares answers that are seconds apart. Each mode has a cache of its own. All modes get the same prompt: a
later turn contains the answers of plain decoding to the earlier turns or, in a replay, the recorded answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Final

from ...errors import ContextError, InputError
from ...models.progress import Progress, silent
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ...runtime.result import Reply
from ...runtime.speculation.choice import Speculation
from ...runtime.speculation.replay import OracleMode
from .prompt_sets import Conversation, Exchange
from .ratios import PLAIN, MeasuredTurn

_WARM_UP_TOKENS: Final = 16


@dataclass(frozen=True)
class DecodingMode:
    """A way of decoding that is measured."""

    name: str
    speculation: Speculation
    oracle_mode: OracleMode = OracleMode.NONE
    """Oracle drafter that replaces all others; for replays only."""


PLAIN_MODE: Final = DecodingMode(PLAIN, Speculation.OFF)


ALL_TURNS: Final = range(1, 1_000_000)
"""The numbers of turns from the first one on."""


def parse_turns(text: str) -> range:
    """The turns that `all`, `2`, `1-2` or `2-` names.

    Raises:
        InputError: the text is none of these.
    """
    found = re.fullmatch(r"([0-9]{1,5})(?:(-)([0-9]{0,5}))?", "1-" if text == "all" else text)
    if found is not None:
        first = int(found[1])
        last = int(found[3]) if found[3] else ALL_TURNS[-1] if found[2] else first
        if 1 <= first <= last:
            return range(first, last + 1)
    raise InputError(f"--turns is {text!r}", "give all, a number such as 2, or a range such as 1-2 or 2-")


@dataclass(frozen=True)
class BenchSettings:
    """What is the same for all modes."""

    max_tokens: int
    turns: range = ALL_TURNS
    """The turns of a conversation that are measured; those before them are only part of the prompt."""
    replay: bool = False
    """Whether recorded answers are replayed."""
    raw: bool = False
    temperature: float = 0.0
    seed: int = 0
    exact: bool = False
    """Whether answers are exact; in a replay, whether the model's own graph runs all passes."""

    def measured_turns(self, conversation: Conversation) -> int:
        """How many turns of a conversation are measured."""
        return sum(turn in self.turns for turn in range(1, len(conversation.exchanges) + 1))

    def generate_options(self, mode: DecodingMode, max_tokens: int) -> GenerateOptions:
        """The options of one answer."""
        return GenerateOptions(
            max_tokens=max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            speculation=mode.speculation,
            exact=self.exact,
        )


@dataclass
class Measurements:
    """Everything that was measured."""

    turns: list[MeasuredTurn] = field(default_factory=list)
    shortened: int = 0
    """Number of prompts that were shortened to fit the context."""

    def add(self, other: Measurements) -> None:
        """Add what was measured of other turns."""
        self.turns += other.turns
        self.shortened += other.shortened


@dataclass(frozen=True)
class TurnTokens:
    """Token ids of a turn."""

    prompt: list[int]
    answer: list[int] | None
    """The recorded answer, in a replay."""
    shortened: bool


class PromptEncoder:
    """Encodes turns of conversations so that they fit the context."""

    def __init__(self, engine: Engine, settings: BenchSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._raw = settings.raw or engine.template is None

    def encode(self, history: Sequence[Exchange], exchange: Exchange) -> TurnTokens:
        """Encode the prompt of an exchange that follows others.

        A prompt that is too long loses its oldest exchanges first, then the end of its last question.

        Raises:
            ContextError: not even a question of one character fits.
        """
        context, max_tokens, answer = self._engine.context, self._settings.max_tokens, None
        if self._settings.replay:
            answer = self._engine.tokenizer.encode(exchange.answer or "", add_special_tokens=False)[:max_tokens]
        room = max(context - (max_tokens if answer is None else len(answer)), context // 2)

        start, kept = 0, len(exchange.prompt)
        while len(prompt := self._prompt_ids(history[start:], exchange.prompt[:kept])) > room:
            if start < len(history):
                start += 1
            elif kept > 1:
                kept = min(kept - 1, max(1, kept * room // len(prompt)))
            else:
                raise ContextError(f"no prompt fits a context of {context} tokens", "give a longer --context")
        shortened = start > 0 or kept < len(exchange.prompt)
        return TurnTokens(prompt, None if answer is None else answer[: context - len(prompt)], shortened)

    def _prompt_ids(self, history: Sequence[Exchange], question: str) -> list[int]:
        texts = [*(text for each in history for text in (each.prompt, each.answer or "")), question]
        if self._raw:
            return self._engine.tokenizer.encode("\n\n".join(texts), add_special_tokens=True)
        roles = cycle(("user", "assistant"))
        return self._engine.encode_chat(
            [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        )


def measure_modes(
    engine: Engine,
    conversations: Sequence[Conversation],
    modes: Sequence[DecodingMode],
    settings: BenchSettings,
    progress: Progress = silent,
) -> Measurements:
    """Answer every measured turn with plain decoding and in every mode.

    Args:
        engine: the model.
        conversations: what to answer.
        modes: decoding modes other than plain decoding.
        settings: what is the same for all modes.
        progress: called with the fraction of the measured turns that are done.

    Raises:
        ContextError: a prompt cannot be shortened enough to fit the context.
    """
    runner = ConversationRunner(engine, modes, settings)
    measured = Measurements()
    total = sum(map(settings.measured_turns, conversations))
    progress("measuring", 0.0)
    parts = (part for number, each in enumerate(conversations) for part in runner.measure(number, each))
    for done, part in enumerate(parts, 1):
        measured.add(part)
        progress("measuring", done / total)
    return measured


class ConversationRunner:
    """Answers the turns of conversations in every mode, each with its cache; plain decoding is the first mode.

    Args:
        engine: the model.
        modes: decoding modes other than plain decoding.
        settings: what is the same for all modes.
    """

    def __init__(self, engine: Engine, modes: Sequence[DecodingMode], settings: BenchSettings) -> None:
        self._engine = engine
        self._modes = (PLAIN_MODE, *modes)
        self._settings = settings
        self._encoder = PromptEncoder(engine, settings)
        self._caches = {mode.name: engine.new_sequence() for mode in self._modes}
        self._done = 0
        self._warm = False

    def measure(self, number: int, conversation: Conversation) -> Iterator[Measurements]:
        """Measure one conversation, whose index is `number`; yields what was measured of each of its measured turns.

        Raises:
            ContextError: a prompt cannot be shortened enough to fit the context.
        """
        if not self._warm:
            self._warm_up(conversation)
            self._warm = True
        history: list[Exchange] = []
        turns = range(1, len(conversation.exchanges) + 1)
        last = max((turn for turn in turns if turn in self._settings.turns), default=0)
        for turn, exchange in enumerate(conversation.exchanges[:last], 1):
            answer = ""
            if turn in self._settings.turns:
                tokens = self._encoder.encode(history, exchange)
                measured = Measurements(shortened=int(tokens.shortened))
                if tokens.answer is None or tokens.answer:
                    replies = self._replies(tokens, self._done)
                    measured.turns.append(self._turn(conversation.category, number, turn, replies))
                    answer = replies[PLAIN].text
                self._done += 1
                yield measured
            elif not self._settings.replay:
                tokens = self._encoder.encode(history, exchange)
                answer = self._answer(PLAIN_MODE, tokens, self._settings).text
            history.append(exchange if self._settings.replay else Exchange(exchange.prompt, answer))

    def _warm_up(self, conversation: Conversation) -> None:
        """Answer briefly in every mode: the first passes allocate memory, and may measure the pass cost."""
        settings = BenchSettings(
            min(_WARM_UP_TOKENS, self._settings.max_tokens), replay=self._settings.replay, raw=self._settings.raw
        )
        tokens = PromptEncoder(self._engine, settings).encode((), conversation.exchanges[0])
        if tokens.answer is None or tokens.answer:
            for mode in self._modes:
                self._answer(mode, tokens, settings)

    def _replies(self, tokens: TurnTokens, number: int) -> Mapping[str, Reply]:
        """The answers of all modes; the mode that starts changes from turn to turn."""
        start = number % len(self._modes)
        order = (*self._modes[start:], *self._modes[:start])
        return {mode.name: self._answer(mode, tokens, self._settings) for mode in order}

    def _answer(self, mode: DecodingMode, tokens: TurnTokens, settings: BenchSettings) -> Reply:
        cache, recorded = self._caches[mode.name], tokens.answer
        options = settings.generate_options(mode, settings.max_tokens if recorded is None else len(recorded))
        if recorded is None:
            return Reply.of(self._engine.answer(tokens.prompt, options, cache))
        return Reply.of(self._engine.replay(cache, tokens.prompt, recorded, options, oracle_mode=mode.oracle_mode))

    def _turn(self, category: str, conversation: int, turn: int, replies: Mapping[str, Reply]) -> MeasuredTurn:
        plain = replies[PLAIN]
        differing = [
            mode
            for mode, reply in replies.items()
            if (reply.text, reply.stats.completion_tokens) != (plain.text, plain.stats.completion_tokens)
        ]
        return MeasuredTurn(
            category,
            conversation,
            turn,
            {mode: reply.stats for mode, reply in replies.items()},
            frozenset(() if self._settings.replay else differing),
            plain.stats.prompt_tokens,
        )
