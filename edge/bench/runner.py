"""Measures every turn of some conversations in every decoding mode.

Plain decoding is always one of the modes, and the modes answer a turn one right after the other, in changing order, so
a ratio compares answers that are seconds apart. Each mode has a cache of its own. All modes get the same prompt: a
later turn contains the answers of plain decoding to the earlier turns or, in a replay, the recorded answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Final, NamedTuple

from ...errors import ContextError, InputError
from ...models.progress import Progress, silent
from ...runtime.engine import Engine
from ...runtime.kv.prefix_cache import CachedSequence
from ...runtime.measure.comparison import Comparison
from ...runtime.measure.exactness import ExactnessReport
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
    options: GenerateOptions = GenerateOptions(temperature=0.0, seed=0)  # noqa: RUF009  it cannot be changed
    """Options of every answer; in a replay, `exact` says whether the model's own graph runs all passes."""

    def measured_turns(self, conversation: Conversation) -> int:
        """How many turns of a conversation are measured."""
        return sum(turn in self.turns for turn in range(1, len(conversation.exchanges) + 1))


class TurnTokens(NamedTuple):
    """Token ids of a turn."""

    prompt: list[int]
    answer: list[int] | None
    """The recorded answer, in a replay."""
    shortened: bool


def encode_turn(
    engine: Engine, settings: BenchSettings, exchange: Exchange, history: Sequence[Exchange] = ()
) -> TurnTokens:
    """Encode an exchange that follows others so that it fits the context.

    A prompt that is too long loses its oldest exchanges first, then the end of its last question.

    Raises:
        ContextError: not even a question of one character fits.
    """
    context, answer, room = engine.context, None, settings.max_tokens
    if settings.replay:
        answer = engine.tokenizer.encode(exchange.answer or "", add_special_tokens=False)[:room]
        room = len(answer)
    room = max(context - room, context // 2)

    def prompt_ids(history: Sequence[Exchange], question: str) -> list[int]:
        texts = [*(text for each in history for text in (each.prompt, each.answer or "")), question]
        if settings.options.raw or engine.template is None:
            return engine.tokenizer.encode("\n\n".join(texts), add_special_tokens=True)
        roles = cycle(("user", "assistant"))
        return engine.encode_chat([{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)])

    start, kept = 0, len(exchange.prompt)
    while len(prompt := prompt_ids(history[start:], exchange.prompt[:kept])) > room:
        if start < len(history):
            start += 1
        elif kept > 1:
            kept = min(kept - 1, max(1, kept * room // len(prompt)))
        else:
            raise ContextError(f"no prompt fits a context of {context} tokens", "give a longer --context")
    shortened = start > 0 or kept < len(exchange.prompt)
    return TurnTokens(prompt, None if answer is None else answer[: context - len(prompt)], shortened)


def compare_texts(
    engine: Engine, conversations: Sequence[Conversation], max_tokens: int, progress: Progress
) -> tuple[ExactnessReport, list[list[int]]]:
    """Compare speculative with plain texts over the first prompts of conversations, and keep the report for `exact`.

    Returns:
        The report, and the token ids of the prompts, each with its plain greedy answer.

    Raises:
        ContextError: a prompt cannot be shortened enough to fit the context.
    """
    comparison, settings = Comparison(engine, max_tokens), BenchSettings(max_tokens)
    prompts = [encode_turn(engine, settings, each.exchanges[0]).prompt for each in conversations]
    report = comparison.report(prompts, partial(progress, "comparing texts"))
    engine.drafters.store_exactness_report(report)
    return report, comparison.texts


def measure_modes(
    engine: Engine,
    conversations: Mapping[int, Conversation],
    modes: Sequence[DecodingMode],
    settings: BenchSettings,
    progress: Progress = silent,
) -> Iterator[list[MeasuredTurn]]:
    """Answer every measured turn with plain decoding and in every mode; yields the turns of each conversation.

    Args:
        engine: the model.
        conversations: what to answer, by index; at least one.
        modes: decoding modes other than plain decoding.
        settings: what is the same for all modes.
        progress: called with the fraction of the measured turns that are done.

    Raises:
        ContextError: a prompt cannot be shortened enough to fit the context.
    """
    modes = (PLAIN_MODE, *modes)
    answer = partial(_answer, engine, settings.options, {mode.name: engine.new_sequence() for mode in modes})
    total, done = sum(map(settings.measured_turns, conversations.values())), 0
    progress("measuring", 0.0)
    # The first passes allocate memory, and may measure the pass cost.
    brief = replace(settings, max_tokens=min(_WARM_UP_TOKENS, settings.max_tokens))
    tokens = encode_turn(engine, brief, next(iter(conversations.values())).exchanges[0])
    for mode in modes if tokens.answer != [] else ():
        answer(mode, tokens, brief.max_tokens)
    for number, conversation in conversations.items():
        measured: list[MeasuredTurn] = []
        history: list[Exchange] = []
        last = settings.turns[-1] if settings.measured_turns(conversation) else 0
        for turn, exchange in enumerate(conversation.exchanges[:last], 1):
            tokens, text = encode_turn(engine, settings, exchange, history), ""
            if turn in settings.turns and tokens.answer != []:
                start = done % len(modes)  # the mode that starts changes from turn to turn
                order = (*modes[start:], *modes[:start])
                replies = {mode.name: answer(mode, tokens, settings.max_tokens) for mode in order}
                said = {mode: (reply.text, reply.stats.completion_tokens) for mode, reply in replies.items()}
                measured.append(
                    MeasuredTurn(
                        conversation.category,
                        number,
                        turn,
                        {mode: reply.stats for mode, reply in replies.items()},
                        frozenset(mode for mode in said if said[mode] != said[PLAIN] and not settings.replay),
                        tokens.shortened,
                    )
                )
                text = replies[PLAIN].text
                done += 1
                progress("measuring", done / total)
            elif not settings.replay:
                text = answer(PLAIN_MODE, tokens, settings.max_tokens).text
            history.append(exchange if settings.replay else Exchange(exchange.prompt, text))
        yield measured


def _answer(
    engine: Engine,
    options: GenerateOptions,
    caches: Mapping[str, CachedSequence],
    mode: DecodingMode,
    tokens: TurnTokens,
    max_tokens: int,
) -> Reply:
    options = replace(options, speculation=mode.speculation, max_tokens=max_tokens)
    if tokens.answer is None:
        return Reply.of(engine.answer(tokens.prompt, options, caches[mode.name]))
    return Reply.of(
        engine.replay(caches[mode.name], tokens.prompt, tokens.answer, options, oracle_mode=mode.oracle_mode)
    )
