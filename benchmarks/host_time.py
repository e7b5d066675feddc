"""Time that the host takes between two passes of the model, by what it does.

Recorded answers are replayed over a graph with random weights: every pass runs, every choice is made from its logits,
and the tokens are those of the recording. What lies between two calls of ONNX Runtime is the host's time of a round. It
is measured where it is spent, between passes that have replaced everything in the processor's caches, and not in a loop
of its own, where it would be several times shorter. A round is counted by its number of draft tokens and of accepted
ones. `fixed` rounds always have `--draft` draft tokens, all right or all wrong.

In further turns every part of a round is timed by itself; the clock adds to those, so their sum is more than the whole.
Prints tables, then one JSON line.

Example: python benchmarks/host_time.py --model DIR/edge-run-int4-128 --data DATA
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

import edgerun
from edgerun.edge.bench.prompt_sets import read_recording
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.graph_choice import ChosenSession
from edgerun.runtime.graph.pass_inputs import PassInputs
from edgerun.runtime.graph.pass_outputs import LogitsOutput
from edgerun.runtime.kv.arena import KVArena
from edgerun.runtime.measure.pass_timing import measure_pass_cost
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.growth import TreeGrowth
from edgerun.runtime.speculation.learned_rates import Mixer
from edgerun.runtime.speculation.pass_cost import PassCost
from edgerun.runtime.speculation.replay import OracleDrafter, ReplaySampler
from edgerun.runtime.speculation.speculator import Speculator

_CONTEXT: Final = 4096
_RECORDINGS: Final = {
    "mt_bench": ("mt_bench_qwen2.5-7b.jsonl", 0),
    "mt_redundant, turn 2": ("mt_redundant_qwen2.5-7b.jsonl", 1),
}
"""File and turn of each recording."""
_PARTS: Final[tuple[tuple[str, type, str], ...]] = (
    ("binding", PassInputs, "write_tokens"),
    ("binding", PassInputs, "write_attention"),
    ("binding", LogitsOutput, "bind"),
    ("choosing tokens", Sampler, "choose"),
    ("compaction", KVArena, "compact"),
    ("drafters: new tokens", Speculator, "_sync_drafters"),
    ("drafters: growing the tree", TreeGrowth, "grow"),
    ("draft: pruning and the rest", Speculator, "propose"),
    ("learning: pass cost", PassCost, "observe"),
    ("learning: recycled candidates", RecycledTable, "learn"),
    ("learning: acceptance rates", Mixer, "learn"),
    ("learning: the rest", Speculator, "observe"),
    ("verification, the rest", Speculator, "verify"),
)
"""Name of a part and the method that does it; a method's time is without that of others in the list."""


@dataclass(frozen=True)
class Case:
    """What is replayed, and what drafts."""

    name: str
    turns: Sequence[tuple[list[int], list[int]]]
    """Prompt and answer of each turn, in token ids."""
    speculator: Callable[[list[int], int], Speculator | None]
    """Makes the speculator of a turn from its answer and the length of its prompt."""


@dataclass
class Measured:
    """Figures of the rounds of a case."""

    rounds: list[float] = field(default_factory=list)
    """Seconds of the host in each round."""
    emitted: int = 0
    drafted: int = 0
    by_part: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    parts_rounds: int = 0
    """Rounds whose parts were timed."""


class TimedSession:
    """A session of ONNX Runtime that notes the seconds outside its passes.

    Args:
        session: the session.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self.between: list[float] = []
        self._ended = 0.0

    def restart(self) -> None:
        """Do not count the time since the last pass."""
        self._ended = 0.0

    def run_with_iobinding(self, io: Any, options: Any) -> None:
        """Run a pass."""
        started = time.perf_counter()
        if self._ended:
            self.between.append(started - self._ended)
        self._session.run_with_iobinding(io, options)
        self._ended = time.perf_counter()


@contextmanager
def timed_parts(by_part: dict[str, float]) -> Iterator[None]:
    """Time the methods of `_PARTS` during the block and add their seconds to `by_part`."""
    inner = [0.0]
    originals = [(owner, name, getattr(owner, name)) for _, owner, name in _PARTS]

    def timed(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                taken = time.perf_counter() - started
                by_part[part] += taken - inner.pop()
                inner[-1] += taken

        return call

    for (part, owner, name), (_, _, original) in zip(_PARTS, originals, strict=True):
        setattr(owner, name, timed(part, original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def run(
    bound: BoundSession, session: TimedSession, case: Case, measured: Measured, rounds: int, *, parts: bool
) -> None:
    """Replay a case until it has had `rounds` rounds."""
    left = rounds
    for prompt, answer in case.turns:
        bound.arena.rewind_to(0)
        sampler = ReplaySampler(answer, len(prompt), SamplingParams(), bound.graph_io.vocab_size)
        limits = DecodeLimits(len(answer))
        steps = decode(bound, prompt, sampler, limits, case.speculator(answer, len(prompt)))
        next(steps)
        session.restart()
        session.between.clear()
        for step in steps:
            measured.emitted += len(step.tokens)
            measured.drafted += 0 if step.round is None else step.round.width - 1
            left -= 1
            if not left:
                break
        steps.close()
        if parts:
            measured.parts_rounds += len(session.between)
        else:
            measured.rounds += session.between
        if not left:
            return


def recorded_turns(data: Path, file: str, turn: int, limit: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers of one turn of recorded conversations, in token ids of the recording's tokenizer."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizers" / "qwen2.5" / "tokenizer.json"))
    turns = []
    for conversation in read_recording(data / "replay" / file):
        if len(conversation.exchanges) <= turn:
            continue
        before = "\n".join(f"{each.prompt}\n{each.answer}" for each in conversation.exchanges[:turn])
        prompt = f"{before}\n{conversation.exchanges[turn].prompt}\n"
        answer = conversation.exchanges[turn].answer or ""
        ids = tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids
        if len(ids[0]) + len(ids[1]) < _CONTEXT and len(ids[1]) > 1:
            turns.append(ids)
    # Answers from all over the file, which is ordered by category.
    return turns[:: max(1, len(turns) // limit)][:limit]


def cases(data: Path, cost: PassCost, vocab_size: int, draft: int, limit: int) -> list[Case]:
    """What is measured."""
    table = RecycledTable(vocab_size)

    def usual(answer: list[int], start: int) -> Speculator:
        del answer, start
        return Speculator([SuffixDrafter(), RecyclingDrafter(table)], cost)

    def fixed(shift: int) -> Callable[[list[int], int], Speculator]:
        def make(answer: list[int], start: int) -> Speculator:
            oracle = OracleDrafter()
            oracle.set_answer([(token + shift) % vocab_size for token in answer], start)
            flat = PassCost({0: {1: 1.0, 16: 1.0 + 1e-9}})
            speculator = Speculator([oracle, RecyclingDrafter(RecycledTable(vocab_size))], flat, max_width=draft + 1)
            speculator.balance.observe = lambda *_, **__: None  # type: ignore[method-assign]
            return speculator

        return make

    turns = {name: recorded_turns(data, file, turn, limit) for name, (file, turn) in _RECORDINGS.items()}
    first = turns["mt_bench"]
    return [
        Case("plain", first, lambda answer, start: None),  # noqa: ARG005
        *(Case(name, each, usual) for name, each in turns.items()),
        Case(f"fixed, {draft} right", first, fixed(0)),
        Case(f"fixed, {draft} wrong", first, fixed(1)),
    ]


def show(console: Console, found: dict[str, Measured]) -> None:
    """Print the tables."""
    table = Table(title="host time between two passes", title_justify="left")
    table.add_column("case")
    for name in ("rounds", "draft tokens\na round", "tokens\na round", "median us", "quartiles", "mean us"):
        table.add_column(name, justify="right")
    parts = Table(title="by part, mean us a round", title_justify="left")
    parts.add_column("part")
    for name, each in found.items():
        micro = [1e6 * seconds for seconds in each.rounds]
        low, middle, high = statistics.quantiles(micro, n=4)
        all_rounds = len(each.rounds) + each.parts_rounds
        table.add_row(
            name,
            str(len(micro)),
            f"{each.drafted / all_rounds:.2f}",
            f"{each.emitted / all_rounds:.2f}",
            f"{middle:.0f}",
            f"{low:.0f} to {high:.0f}",
            f"{statistics.mean(sorted(micro)[: int(0.98 * len(micro))]):.0f}",
        )
        parts.add_column(name, justify="right")
    for part in dict.fromkeys(part for part, _, _ in _PARTS):
        parts.add_row(part, *(f"{1e6 * each.by_part[part] / max(each.parts_rounds, 1):.1f}" for each in found.values()))
    console.print(table)
    console.print(parts)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="bundle; see artifacts.py")
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGERUN_DATA"), metavar="DIR")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft", type=int, default=8, metavar="N", help="draft tokens of fixed rounds (8)")
    parser.add_argument("--rounds", type=int, default=120, metavar="N", help="rounds of a turn of a case (120)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="turns of every case (3)")
    parser.add_argument("--limit", type=int, default=4, metavar="N", help="recorded answers of each recording (4)")
    parser.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True, help="also time the parts")
    options = parser.parse_args()
    if options.data is None:
        parser.error("give --data, or set EDGERUN_DATA")

    found: dict[str, Measured] = defaultdict(Measured)
    with edgerun.load(options.model, threads=options.threads, context=_CONTEXT, draft=None) as engine:
        bound = engine.model.new_sequence().bound
        if isinstance(bound, ChosenSession):  # the model's own graph runs all passes here
            bound = bound._base
        if not isinstance(bound, BoundSession):
            raise SystemExit("the model does not run as one graph")
        cost = measure_pass_cost(bound, threads=options.threads)
        session = TimedSession(bound._session)
        bound._session = session
        measured_cases = cases(Path(options.data), cost, engine.graph_io.vocab_size, options.draft, options.limit)
        for _ in range(options.repeat):
            for case in measured_cases:
                run(bound, session, case, found[case.name], options.rounds, parts=False)
        if options.parts:
            for case in measured_cases:
                with timed_parts(found[case.name].by_part):
                    run(bound, session, case, found[case.name], options.rounds, parts=True)
    console = Console()
    if not console.is_terminal:
        console.width = 130
    show(console, found)
    rows = {
        name: {
            "rounds": len(each.rounds),
            "median_us": 1e6 * statistics.median(each.rounds),
            "tokens": each.emitted / (len(each.rounds) + each.parts_rounds),
        }
        for name, each in found.items()
    }
    print(json.dumps({"benchmark": "host_time", "edgerun": edgerun.__version__, "draft": options.draft, "cases": rows}))


if __name__ == "__main__":
    main()
