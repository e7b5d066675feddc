"""Replays a recording with the engines of one model, conversation by conversation."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from rich.console import Console

import edgerun
from edgerun.edge.bench.bench_result import BenchConditions, BenchResult
from edgerun.edge.bench.prompt_sets import limit_per_category, read_recording
from edgerun.edge.bench.ratios import PLAIN, ModeResult
from edgerun.edge.bench.runner import BenchSettings, DecodingMode, measure_modes, parse_turns
from edgerun.runtime.measure.system_load import LoadMeter
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.replay import OracleMode
from replay_results import ConversationResult, ResultFile, gain
from timed_passes import ChargedPasses

ORACLE: Final = "oracle"
_WRONG: Final = "always wrong"
_CATEGORIES: Final = 8
"""Number of categories of MT-Bench; a recording of one category gets as many conversations as all of them."""


@dataclass(frozen=True)
class Recording:
    """A recording, and the turns of it that are measured."""

    name: str
    file: str
    turns: str = "all"


RECORDINGS: Final = (
    Recording("mt_bench", "mt_bench_qwen2.5-7b.jsonl"),
    Recording("mt_redundant, turn 2", "mt_redundant_qwen2.5-7b.jsonl", "2"),
    Recording("aider", "aider_sessions.md"),
)


@dataclass(frozen=True)
class Variant:
    """An engine over the weights that all share, with some arguments of `edgerun.load` of its own."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    base_graph: bool = False
    """Whether passes run in the model's own graph alone."""
    real_passes: bool = False
    """Whether passes run, also with `--passes timed`."""

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read `key=value` as Python's keyword argument; values other than numbers and booleans are text."""
        key, _, value = text.partition("=")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        return cls(text, base_graph=bool(parsed)) if key == "base_graph" else cls(text, {key: parsed})

    def load(self, model: Path, options: argparse.Namespace) -> edgerun.Engine:
        """Load the engine."""
        arguments = dict(self.arguments)
        if options.passes == "timed":
            # No figure contains the prompt, and the graph that reads it would be made by a thread of this process.
            arguments["prefill"] = "plain"
        return edgerun.load(model, threads=options.threads, context=options.context, draft=None, **arguments)


BASE: Final = Variant("as it is")
REAL: Final = Variant("real passes", real_passes=True)


class RecordingReplay:
    """One recording replayed by the engines of one model."""

    def __init__(
        self,
        engines: Mapping[str, edgerun.Engine],
        charged: Mapping[str, ChargedPasses],
        recording: Recording,
        options: argparse.Namespace,
        shape: str,
    ) -> None:
        self._engines = engines
        self._charged = charged
        self._recording = recording
        self._options = options
        conversations = read_recording(options.data / "replay" / recording.file)
        each = options.limit * (_CATEGORIES if len({each.category for each in conversations}) == 1 else 1)
        self._conversations = limit_per_category(conversations, each or None)
        self._plan = BenchSettings(options.max_tokens, parse_turns(recording.turns), replay=True)
        self._modes = modes_of(options)
        settings = {
            "modes": [mode.name for mode in self._modes],
            **{name: getattr(options, name) for name in ("max_tokens", "context", "block", "threads")},
            "edgerun": edgerun.__version__,
            **({"passes": "timed"} if options.passes == "timed" else {}),
        }
        name = f"{shape}-{Path(recording.file).stem}-{recording.turns}"
        self._file = ResultFile(options.work / "replay", name, settings)
        self._order = list(range(len(self._conversations)))
        if options.validate is not None:
            random.Random(0).shuffle(self._order)  # the same sample in every run
            self._order = self._order[: options.validate]
            self._file = ResultFile(options.work / "replay", f"validation-{name}", {**settings, "turns": "sample"})

    def run(self, variants: Sequence[Variant], deadline: float, console: Console) -> list[ConversationResult]:
        """Measure what is missing until the deadline; returns the results of all measured conversations."""
        results = self._file.read()
        done = {(result.variant, result.conversation) for result in results}
        exact = {
            variant.name: replace(self._plan, options=replace(self._plan.options, exact=variant.base_graph))
            for variant in variants
        }
        runners = {}
        for name, plan in exact.items():
            missing = {each: self._conversations[each] for each in self._order if (name, each) not in done}
            runners[name] = measure_modes(self._engines[name], missing, self._modes, plan)
        with console.status(self._recording.name) as status:
            for place, number in enumerate(self._order):
                order = variants if place % 2 == 0 else variants[::-1]
                unmeasured = [variant for variant in order if (variant.name, number) not in done]
                if unmeasured and time.monotonic() > deadline:
                    break
                status.update(f"{self._recording.name}: {place} of {len(self._order)} conversations")
                for variant in unmeasured:
                    charged = self._charged.get(variant.name)
                    with nullcontext() if charged is None else charged.charging():
                        measured = next(runners[variant.name])
                    result = ConversationResult(variant.name, number, measured)
                    self._file.append(result)
                    results.append(result)
        return [result for result in results if result.variant in runners and result.conversation in self._order]

    def summarized(self, results: Sequence[ConversationResult], variant: str, meter: LoadMeter) -> BenchResult:
        """The figures of one variant."""
        engine, options, recording = self._engines[variant], self._options, self._recording
        measured = [result.measured for result in results if result.variant == variant]
        conditions = BenchConditions(
            model=engine.bundle.folder.parent.name,
            draft=None,
            device=str(engine.device),
            threads=options.threads,
            context=engine.context,
            source=recording.file,
            replay=True,
            max_tokens=options.max_tokens,
            turns=recording.turns,
            temperature=0.0,
            conversations=len(measured),
        )
        return BenchResult.of(list(chain.from_iterable(measured)), conditions, meter)

    @property
    def conversations(self) -> int:
        """Number of conversations to measure."""
        return len(self._order)

    def gains(self, results: Sequence[ConversationResult], variants: Sequence[Variant]) -> dict[str, ModeResult]:
        """Speed of each mode as it is compared with each other variant, and of the first mode with the others.

        Returns:
            Ratios by what is compared, such as `auto, base_graph=true`, or `auto over suffix`.
        """
        modes = [mode.name for mode in self._modes if mode.name != ORACLE]
        pairs = {
            f"{mode}, {variant.name}": gain(results, (BASE.name, mode), (variant.name, mode))
            for variant in variants
            if variant != BASE
            for mode in (PLAIN, *modes)
        }
        for mode in modes[1:]:
            pairs[f"{modes[0]} over {mode}"] = gain(results, (BASE.name, modes[0]), (BASE.name, mode))
        return {name: found for name, found in pairs.items() if found is not None}


def modes_of(options: argparse.Namespace) -> list[DecodingMode]:
    """The decoding modes that are compared with plain decoding."""
    modes = [DecodingMode(str(choice), choice) for choice in map(Speculation.parse, options.spec or ["auto"])]
    if options.wrong:
        modes.append(DecodingMode(_WRONG, Speculation.AUTO, oracle_mode=OracleMode.WRONG))
    if not options.no_oracle:
        modes.append(DecodingMode(ORACLE, Speculation.AUTO, oracle_mode=OracleMode.RIGHT))
    return modes
