"""A draft model that runs while the target verifies, against one that takes turns with it.

The target is emulated: a device on which a pass takes a given time and no processor. It answers with the recorded
tokens of the bundled model. The bundled draft model really runs, so that what it drafts and what is accepted are real;
`--draft-ms` makes its passes take longer, which is the time of a larger draft model on a device. Plain decoding, taking
turns and overlap alternate, request by request, in both orders. `--device` then compares the two with a real target on
that device (the CPU, where both share the cores). Prints tokens per second after the first token and medians of ratios,
request by request, then one JSON line.

Example: python benchmarks/draft_overlap.py --pass-ms 20 --draft-ms 1 --draft-ms 2 --draft-ms 4 --device cpu
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import edgerun
from edgerun import Engine, GenerateOptions
from edgerun.models.bundle import open_bundle
from edgerun.models.find import find_model
from edgerun.models.pairing import find_draft
from edgerun.runtime.arguments.load_options import MEASURING_OPTIONS
from edgerun.runtime.decode import DecodeLimits, FinishReason, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_graph import BoundGraph, NewTokens
from edgerun.runtime.graph.graph_io import GraphIO
from edgerun.runtime.graph.open_graph import open_graph
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.kv.arena import InPlaceArena, KVArena
from edgerun.runtime.loaded_model import LoadedModel
from edgerun.runtime.measure.system_load import LoadMeter
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.scheduling.work_thread import WorkThread
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.draft_ahead import DraftAhead
from edgerun.runtime.speculation.draft_loading import DraftTarget, PlacedDraft, load_separate_draft, place_draft
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.pass_cost import PassCost
from edgerun.runtime.speculation.speculator import Speculator
from shell_requests import shell_requests

_PLAIN: Final = "plain"
_TURNS: Final = "taking turns"
_OVERLAP: Final = "overlap"
_CONTEXT: Final = 512
_MOST_TOKENS: Final = 96
_MODEL: Final = Speculation.parse("suffix,model")


@dataclass(frozen=True)
class Recorded:
    """A request and its greedy answer."""

    prompt_ids: list[int]
    answer_ids: list[int]


class EmulatedTarget(BoundGraph):
    """A graph that knows the answer; its passes take the time of a device, and no processor.

    Args:
        graph_io: inputs and outputs of the model that gave the answer.
        text: prompt and answer, token ids.
        seconds: seconds of a pass by width, from width 1.
    """

    def __init__(self, graph_io: GraphIO, text: Sequence[int], seconds: Sequence[float]) -> None:
        self.graph_io = graph_io
        self.arena = InPlaceArena(graph_io.tensor_types, _CONTEXT)
        self._text = np.array(text)
        self._seconds = seconds

    def run(self, new: NewTokens) -> npt.NDArray[np.float32]:
        """Give the recorded next token after every path that is recorded, and token 0 after others."""
        started = time.perf_counter()
        ids, wanted, positions, tree_mask = np.array(new.ids), new.wanted, new.positions, new.tree_mask
        base = self.arena.length
        self.arena.reserve(ids.size)
        at = base + np.arange(ids.size) if positions is None else np.asarray(positions)
        mask = np.tri(ids.size, dtype=np.bool_) if tree_mask is None else tree_mask
        known = ids == self._text[np.minimum(at, len(self._text) - 1)]
        logits = np.zeros((wanted.size, self.graph_io.vocab_size), np.float32)
        for row, node in enumerate(wanted.tolist()):
            right = bool(known[mask[node]].all()) and at[node] + 1 < len(self._text)
            logits[row, self._text[at[node] + 1] if right else 0] = 1
        width = min(ids.size, len(self._seconds))
        time.sleep(max(self._seconds[width - 1] - (time.perf_counter() - started), 0.0))
        return logits


class SlowedDraft(BoundGraph):
    """A graph whose passes take at least a given time: the logits of one graph, the speed of a device.

    Args:
        bound: the graph.
        seconds: least seconds of a pass.
    """

    def __init__(self, bound: BoundGraph, seconds: float) -> None:
        self._bound = bound
        self._seconds = seconds
        self.graph_io, self.arena = bound.graph_io, bound.arena

    def use(self, arena: KVArena) -> None:
        """Run over another arena from now on."""
        super().use(arena)
        self._bound.use(arena)

    def run(self, new: NewTokens) -> npt.NDArray[np.float32]:
        """Run a pass, and wait until it has taken long enough."""
        started = time.perf_counter()
        logits = self._bound.run(new)
        time.sleep(max(self._seconds - (time.perf_counter() - started), 0.0))
        return logits


@dataclass
class Measured:
    """Figures of one mode."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of every request after its first token, of all repetitions."""
    tokens: int = 0
    passes: int = 0
    ahead: int = 0
    kept: int = 0
    hidden_s: float = 0.0


def record(engine: Engine, requests: Sequence[str]) -> list[Recorded]:
    """The greedy answers of a model."""
    found = []
    for request in requests:
        prompt_ids = engine.encode_chat([{"role": "user", "content": request}])
        bound: BoundGraph = engine.model.new_sequence().bound
        sampler = Sampler(SamplingParams(), engine.graph_io.vocab_size)
        steps = list(decode(bound, prompt_ids, sampler, DecodeLimits(_MOST_TOKENS, engine.tokenizer.eos)))
        answer = [token for step in steps for token in step.tokens]
        if len(answer) > 2 and steps[-1].finish is FinishReason.STOP:
            found.append(Recorded(prompt_ids, [*answer, min(engine.tokenizer.eos)]))
    return found


def emulated(
    graph_io: GraphIO,
    answers: Sequence[Recorded],
    new_draft: Callable[[], DraftModel],
    pass_s: float,
    further: float,
    repeat: int,
) -> dict[str, Measured]:
    """Measure the three modes with a target whose pass takes `pass_s` seconds and `further` as much a further token."""
    seconds = [pass_s * (1 + further * extra) for extra in range(16)]
    thread = WorkThread("edge-run draft")
    speculators: dict[str, Speculator | None] = {_PLAIN: None}
    for mode in (_TURNS, _OVERLAP):
        drafter = new_draft()
        cost = PassCost({0: {width: seconds[width - 1] for width in (1, 2, 4, 8, 16)}})
        ahead = DraftAhead(drafter, thread) if mode == _OVERLAP else None
        speculators[mode] = Speculator([SuffixDrafter()], cost, model=drafter, ahead=ahead)
    found = {mode: Measured() for mode in speculators}
    for round_ in range(repeat + 1):
        for number, answer in enumerate(answers):
            modes = list(speculators)
            shift = (number + round_) % len(modes)
            for mode in modes[shift:] + modes[:shift]:
                one = run(graph_io, answer, seconds, speculators[mode])
                if round_:  # in the first round the drafters learn how often they are right
                    add(found[mode], one)
    thread.close()
    return found


def run(graph_io: GraphIO, answer: Recorded, seconds: Sequence[float], speculator: Speculator | None) -> Measured:
    """Decode one recorded answer; fails if another text comes out."""
    bound = EmulatedTarget(graph_io, [*answer.prompt_ids, *answer.answer_ids], seconds)
    sampler = Sampler(SamplingParams(), graph_io.vocab_size)
    eos = frozenset(answer.answer_ids[-1:])
    steps = decode(bound, answer.prompt_ids, sampler, DecodeLimits(_MOST_TOKENS, eos), speculator)
    done = [next(steps)]
    started = time.perf_counter()
    done += list(steps)
    taken = time.perf_counter() - started
    if [token for step in done for token in step.tokens] != answer.answer_ids[:-1]:
        raise SystemExit("the text is not that of plain decoding")
    rounds = [step.round.ahead for step in done if step.round is not None]
    return Measured(
        [taken],
        len(answer.answer_ids) - 1,
        len(done) - 1,
        sum(each.passes for each in rounds),
        sum(each.kept for each in rounds),
        sum(each.hidden_s for each in rounds),
    )


def real(device: str, requests: Sequence[str], repeat: int) -> dict[str, Measured]:
    """Measure both modes with a real target, by `Engine.generate`."""
    chosen = choose_device(device)
    bundle = open_bundle(find_model(None, chosen.kind), kind=chosen.kind)
    pair = find_draft(bundle)
    if pair is None:
        raise SystemExit("the model has no draft model")
    config, placed = place_draft(pair, SessionConfig(chosen))
    found = {_TURNS: Measured(), _OVERLAP: Measured()}
    with ExitStack() as stack:
        engines = {}
        for mode in found:
            draft = PlacedDraft(placed.pair, placed.config, overlaps=mode == _OVERLAP)
            loaded = LoadedModel(bundle, config, MEASURING_OPTIONS, draft)
            engines[mode] = stack.enter_context(Engine(loaded))
        options = GenerateOptions(temperature=0.0, max_tokens=_MOST_TOKENS, speculation=_MODEL)
        for round_ in range(repeat + 1):
            for number, request in enumerate(requests):
                modes = list(engines)
                shift = (number + round_) % len(modes)
                for mode in modes[shift:] + modes[:shift]:
                    stats = engines[mode].generate(request, options).stats
                    if round_ and stats.decode_tokens:
                        one = Measured(
                            [stats.decode_s],
                            stats.decode_tokens,
                            stats.decode_passes,
                            stats.passes_ahead,
                            stats.passes_kept,
                            stats.hidden_s,
                        )
                        add(found[mode], one)
    return found


def add(total: Measured, one: Measured) -> None:
    """Add the figures of a request."""
    total.seconds += one.seconds
    for name in ("tokens", "passes", "ahead", "kept", "hidden_s"):
        setattr(total, name, getattr(total, name) + getattr(one, name))


def described(name: str, found: dict[str, Measured]) -> dict[str, Any]:
    """The figures of one target for the table and the JSON line."""
    turns = found[_TURNS].seconds
    modes = {
        mode: {
            "tokens_per_second": each.tokens / sum(each.seconds),
            "tokens_per_pass": each.tokens / each.passes,
            "of_taking_turns": statistics.median(
                mine_of / mine for mine_of, mine in zip(turns, each.seconds, strict=True)
            ),
            "passes_ahead": each.ahead,
            "passes_kept": each.kept,
            "hidden_s": each.hidden_s,
            "seconds": sum(each.seconds),
        }
        for mode, each in found.items()
    }
    return {"target": name, "modes": modes}


def show(console: Console, results: Sequence[dict[str, Any]]) -> None:
    """Print one table for all targets."""
    table = Table(title="tokens per second after the first token", title_justify="left")
    table.add_column("target")
    table.add_column("mode")
    for name in ("tokens/s", "tokens\nper pass", "speed of\ntaking turns", "passes ahead\nkept", "time\nhidden"):
        table.add_column(name, justify="right")
    for result in results:
        for mode, each in result["modes"].items():
            kept = f"{each['passes_kept']}/{each['passes_ahead']}" if each["passes_ahead"] else ""
            hidden = f"{each['hidden_s'] / each['seconds']:.0%}" if each["passes_ahead"] else ""
            table.add_row(
                result["target"],
                mode,
                f"{each['tokens_per_second']:.1f}",
                f"{each['tokens_per_pass']:.2f}",
                f"{each['of_taking_turns']:.2f}",
                kept,
                hidden,
            )
        table.add_section()
    console.print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pass-ms", type=float, action="append", help="of the emulated target; may be repeated (20)")
    parser.add_argument(
        "--draft-ms", type=float, action="append", help="of the draft; may be repeated (real: 0, 1, 2, 4)"
    )
    parser.add_argument("--further", type=float, default=0.05, help="cost of a further token, of a pass (0.05)")
    parser.add_argument("--device", action="append", default=[], help="also measure a real target there; repeatable")
    parser.add_argument("--requests", type=Path, metavar="FILE", help="JSON lines with `request`")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="requests (20)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="repetitions (3)")
    options = parser.parse_args()

    requests = shell_requests(options.requests, options.limit)
    meter = LoadMeter(1)
    bundle = open_bundle(find_model(None))
    pair = find_draft(bundle)
    if pair is None:
        raise SystemExit("the bundled model has no draft model")
    _, placed = place_draft(pair, SessionConfig(choose_device("cpu")))
    with edgerun.load(draft=None) as engine:
        graph_io, answers = engine.graph_io, record(engine, requests)
    new_draft = load_separate_draft(pair, placed.config, DraftTarget(bundle, graph_io, _CONTEXT))
    step_ms = 1e3 * new_draft().cost.seconds(1, 64)
    draft_graph = open_graph(pair.draft, placed.config, cache=True)

    def slowed(seconds: float) -> DraftModel:
        bound = SlowedDraft(draft_graph.bind(draft_graph.arena(_CONTEXT)), seconds)
        cost = PassCost({0: {1: seconds, 16: 1.5 * seconds}})
        return DraftModel(bound, cost, graph_io.vocab_size, pair.target_ids)

    results = []
    for pass_ms in options.pass_ms or [20.0]:
        for draft_ms in options.draft_ms or [0.0, 1.0, 2.0, 4.0]:
            draft = partial(slowed, draft_ms / 1e3) if draft_ms else new_draft
            found = emulated(graph_io, answers, draft, pass_ms / 1e3, options.further, options.repeat)
            results.append(described(f"emulated, {pass_ms:g} ms; draft {draft_ms or step_ms:.3g} ms", found))
    results += [described(f"{device}, real", real(device, requests, options.repeat)) for device in options.device]
    console = Console()
    if not console.is_terminal:
        console.width = 120
    show(console, results)
    others = meter.others()
    load = "unknown" if others is None else f"{others:.2f} processors"
    console.print(f"a draft step takes {step_ms:.2f} ms, a further token {options.further:.0%} of a pass")
    console.print(f"other programs used {load}")
    figures = {"draft_step_ms": step_ms, "further": options.further, "load_of_others": others, "results": results}
    print(json.dumps({"benchmark": "draft_overlap", "edgerun": edgerun.__version__, **figures}))


if __name__ == "__main__":
    main()
