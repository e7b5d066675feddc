"""Running a measurement: every turn is answered by every contender, one right after the other, in changing order.

Plain decoding is always a contender, so a ratio compares answers that are seconds apart on the same machine. Each
contender keeps a cache of its own. All are asked the same: a later turn holds plain decoding's answers to the earlier
ones, or in a replay the recorded answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...errors import ContextError, InputError
from ...runtime.engine import Engine
from ...runtime.generation import CachedSequence
from ...runtime.options import GenerateOptions
from ...runtime.request_queue import AnswerStream
from ...runtime.result import Reply, Stats
from ...runtime.speculation.choice import Speculation
from ...runtime.speculation.replay import OracleMode
from .prompt_sets import Conversation, Exchange
from .ratios import PLAIN, Count, Run, Trial

_WARM_UP_TOKENS: Final = 16


@dataclass(frozen=True)
class Contender:
    """A way of decoding."""

    name: str
    speculation: Speculation
    oracle_mode: OracleMode = OracleMode.NONE
    """What takes the drafters' place. Replay only."""


PLAIN_CONTENDER: Final = Contender(PLAIN, Speculation.OFF)


@dataclass(frozen=True)
class TurnRange:
    """Which turns of a conversation are measured; those before them are only read."""

    first: int = 1
    last: int | None = None

    @classmethod
    def parse(cls, text: str) -> TurnRange:
        """From `all`, `2`, `1-2` or `2-`.

        Raises:
            InputError: it is none of these.
        """
        if text == "all":
            return cls()
        first, dash, last = text.partition("-")
        numbers = [part for part in (first, last) if part]
        if first and all(part.isascii() and part.isdigit() and len(part) < 6 for part in numbers):
            turns = cls(int(first), int(last) if last else None if dash else int(first))
            if 1 <= turns.first <= (turns.last or turns.first):
                return turns
        raise InputError(f"turns is {text!r}", "it must be all, a number such as 2, or a range such as 1-2 or 2-")

    def __contains__(self, turn: int) -> bool:
        return self.first <= turn <= (self.last or turn)


@dataclass(frozen=True)
class Plan:
    """What is the same for all contenders."""

    max_tokens: int
    turns: TurnRange = TurnRange()
    replay: bool = False
    raw: bool = False
    temperature: float = 0.0
    seed: int = 0

    def measured(self, conversation: Conversation) -> int:
        """How many turns of a conversation are measured."""
        return sum(turn in self.turns for turn in range(1, len(conversation.exchanges) + 1))

    def options(self, contender: Contender, max_tokens: int) -> GenerateOptions:
        """One answer's."""
        return GenerateOptions(
            max_tokens=max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            speculation=contender.speculation,
        )


@dataclass
class Findings:
    """Everything measured."""

    trials: list[Trial] = field(default_factory=list)
    cut: int = 0
    """Prompts that were shortened to fit the context."""


@dataclass(frozen=True)
class Asked:
    """A turn, ready to be answered: token ids of the prompt and, in a replay, of the answer."""

    prompt: list[int]
    answer: list[int] | None
    cut: bool


class Asking:
    """Turns conversations into token ids that fit the context."""

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self._engine = engine
        self._plan = plan
        self._raw = plan.raw or engine.template is None

    def ask(self, before: Sequence[Exchange], asked: Exchange) -> Asked:
        """The prompt for `asked` after what was said `before`.

        Where it is too long, the oldest exchanges are left out, and then the end of the question.

        Raises:
            ContextError: not even a question of one character fits.
        """
        context, most, answer = self._engine.context, self._plan.max_tokens, None
        if self._plan.replay:
            answer = self._engine.tokenizer.encode(asked.answer or "", add_special_tokens=False)[:most]
        room = max(context - (most if answer is None else len(answer)), context // 2)

        def fitting(prompt: list[int], *, cut: bool) -> Asked:
            return Asked(prompt, None if answer is None else answer[: context - len(prompt)], cut)

        for start in range(len(before) + 1):
            prompt = self._encoded(before[start:], asked.prompt)
            if len(prompt) <= room:
                return fitting(prompt, cut=start > 0)
        kept = len(asked.prompt)
        while kept > 1:
            kept = min(kept - 1, max(1, kept * room // len(prompt)))
            prompt = self._encoded((), asked.prompt[:kept])
            if len(prompt) <= room:
                return fitting(prompt, cut=True)
        raise ContextError(f"a context of {context} tokens holds no prompt", "give more with --context")

    def _encoded(self, before: Sequence[Exchange], question: str) -> list[int]:
        if self._raw:
            said = [text for exchange in before for text in (exchange.prompt, exchange.answer or "")]
            return self._engine.tokenizer.encode("\n\n".join([*said, question]), add_special_tokens=True)
        messages = []
        for exchange in before:
            messages.append({"role": "user", "content": exchange.prompt})
            messages.append({"role": "assistant", "content": exchange.answer or ""})
        return self._engine.model.encode_chat([*messages, {"role": "user", "content": question}])


def measure(
    engine: Engine,
    conversations: Sequence[Conversation],
    contenders: Sequence[Contender],
    plan: Plan,
    progress: Callable[[int, int], None],
) -> Findings:
    """Answer every measured turn with plain decoding and every contender; `progress` is told turns done and to do.

    Raises:
        ContextError: a prompt cannot be made to fit.
    """
    found = Findings()
    asking = Asking(engine, plan)
    everyone = (PLAIN_CONTENDER, *contenders)
    caches = {each.name: engine.model.new_sequence() for each in everyone}
    todo = sum(map(plan.measured, conversations))
    _warm_up(engine, conversations, everyone, plan, caches)
    done = 0
    progress(done, todo)
    for number, conversation in enumerate(conversations):
        before: list[Exchange] = []
        last = max((turn for turn in range(1, len(conversation.exchanges) + 1) if turn in plan.turns), default=0)
        for turn, exchange in enumerate(conversation.exchanges[:last], 1):
            if turn in plan.turns:
                asked = asking.ask(before, exchange)
                found.cut += asked.cut
                if asked.answer is None or asked.answer:
                    order = _rotated(everyone, done)
                    replies = {each.name: _answer(engine, caches[each.name], each, asked, plan) for each in order}
                    found.trials.append(_trial(conversation.category, number, turn, replies, plan))
                    answer = replies[PLAIN].text
                done += 1
                progress(done, todo)
            elif not plan.replay:
                answer = _answer(engine, caches[PLAIN], PLAIN_CONTENDER, asking.ask(before, exchange), plan).text
            before.append(exchange if plan.replay else Exchange(exchange.prompt, answer))
    return found


def _warm_up(
    engine: Engine,
    conversations: Sequence[Conversation],
    everyone: Sequence[Contender],
    plan: Plan,
    caches: dict[str, CachedSequence],
) -> None:
    """First passes allocate memory and may time the machine: let nobody be charged for it."""
    short = Plan(min(_WARM_UP_TOKENS, plan.max_tokens), replay=plan.replay, raw=plan.raw, temperature=0.0)
    asked = Asking(engine, short).ask((), conversations[0].exchanges[0])
    if asked.answer is None or asked.answer:
        for each in everyone:
            _answer(engine, caches[each.name], each, asked, short)


def _rotated(everyone: Sequence[Contender], by: int) -> Sequence[Contender]:
    """Whoever is first changes from turn to turn."""
    start = by % len(everyone)
    return (*everyone[start:], *everyone[:start])


def _answer(engine: Engine, text: CachedSequence, contender: Contender, asked: Asked, plan: Plan) -> Reply:
    stream: AnswerStream
    if asked.answer is None:
        stream = engine.model.answer(text, asked.prompt, plan.options(contender, plan.max_tokens))
    else:
        options = plan.options(contender, len(asked.answer))
        stream = engine.model.replay(text, asked.prompt, asked.answer, options, oracle_mode=contender.oracle_mode)
    return Reply.of(stream)


def _trial(category: str, conversation: int, turn: int, replies: dict[str, Reply], plan: Plan) -> Trial:
    plain = replies[PLAIN]
    differing = [
        name
        for name, reply in replies.items()
        if (reply.text, reply.stats.completion_tokens) != (plain.text, plain.stats.completion_tokens)
    ]
    return Trial(
        category,
        conversation,
        turn,
        {name: run_of(reply.stats) for name, reply in replies.items()},
        frozenset(() if plan.replay else differing),
        plain.stats.prompt_tokens,
    )


def run_of(stats: Stats) -> Run:
    """What counts of an answer's account."""
    return Run(
        tokens=max(stats.completion_tokens - 1, 0),
        seconds=stats.total_s - stats.first_token_s,
        passes=stats.decode_passes,
        candidates=Count(stats.drafted, stats.accepted),
        by_source={name: Count(count.drafted, count.accepted) for name, count in stats.by_source.items()},
        by_depth=tuple(Count(count.drafted, count.accepted) for count in stats.by_depth),
        draft_s=stats.draft_s,
        target_s=stats.target_s,
        host_s=stats.host_s,
        prompt_s=stats.first_token_s,
    )
