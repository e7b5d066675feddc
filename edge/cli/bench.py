"""`edge-run bench MODEL`: compares plain and speculative decoding, or numbers of clients, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...errors import InputError
from ...models.pairing import find_draft
from ...models.progress import ProgressDisplay
from ...runtime.arguments.argument_types import option
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.devices.processor import Power
from ...runtime.engine import Engine
from ...runtime.engine_loading import load as open_model
from ...runtime.measure.system_load import LoadMeter
from ...runtime.options import GenerateOptions
from ...runtime.result import DraftCounts
from ...runtime.speculation.choice import Speculation
from ..bench.bench_result import BUSY_NOTE, BenchConditions, BenchResult
from ..bench.clients import COLUMNS, REQUESTS, TURNS, ClientsResult, measure_clients, request_lengths
from ..bench.prompt_sets import Conversation, bundled_prompts, limit_per_category, read_prompts, read_recording
from ..bench.ratios import Estimate, ModeResult, round_ms
from ..bench.runner import BenchSettings, DecodingMode, measure_modes, parse_turns
from ..terminal.output import SafeConsole, write_json
from .shared_options import OWN_PROMPTS, PROMPTS_HELP, AsJson, ModelArgument, OptionsOf, takes_options

_LOAD: Final = OptionsOf(
    # As fast as the machine can, also on battery. With what earlier answers taught, a measurement would not repeat.
    LoadOptions(power=Power.PERFORMANCE, learned=False),
    only=("device", "threads", "context", "kv", "prefill", "cache", "tokenizer", "draft", "draft_device"),
)
_ANSWER: Final = OptionsOf(GenerateOptions(temperature=0.0, seed=0), only=("raw", "temperature", "seed"))
_MAX_TOKENS: Final = 256
_MAX_DEPTH: Final = 8
_WHOLE_ANSWER: Final = 1 << 20
"""A recorded answer is replayed to its end, because the longer it is, the more it repeats."""


@dataclass(frozen=True)
class BenchOptions:
    """What to measure."""

    prompts: Path | None = option(None, PROMPTS_HELP, metavar="FILE", unset=OWN_PROMPTS)
    replay: Path | None = option(
        None, "Recorded conversations: every pass is run, but the tokens are the recorded ones.", metavar="FILE"
    )
    spec: list[str] | None = option(
        None, "Drafters to measure, as in edge-run --spec; may be repeated.", metavar="NAMES", unset="auto"
    )
    max_tokens: int | None = option(
        None,
        "Maximum tokens of an answer.",
        flags=("-n", "--max-tokens"),
        metavar="N",
        least=2,
        unset=f"{_MAX_TOKENS}; with --replay, the whole answer; with --clients, 128",
    )
    limit: int | None = option(
        None, "Maximum number of conversations of each category.", metavar="N", least=1, unset="all"
    )
    turns: str = option("all", "Turns of a conversation to measure: all, 2, 1-2 or 2-.", metavar="RANGE")
    clients: list[int] | None = option(
        None,
        "Measure instead what one engine gives this number of clients at a time, and several numbers one after the "
        "other (1 2 4 8): tokens a second together, time to the first token and time per token.",
        metavar="N...",
        least=1,
        most=256,
        unset="no such measurement",
    )
    prompt_tokens: int | None = option(
        None, "Tokens of every prompt, with --clients.", metavar="N", least=1, unset="512, or what the context allows"
    )


_BENCH: Final = OptionsOf(BenchOptions())


@takes_options(_BENCH, _ANSWER, _LOAD)
def bench(
    model: ModelArgument = None,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Compare the speed of speculative and plain decoding, prompt by prompt in one run.

    Prints the ratio of the speeds with its interval, or why the measurement gives none, then tables by category and by
    drafter; with --json, one JSON object. Speeds are decoding rates after the first token.

    Example: edge-run bench my-model --prompts spec_bench.jsonl --limit 5

    With --clients it measures instead how one engine serves several requests at a time. In each of three turns every
    client makes two requests, one after the other. Prompts have equal lengths and different texts, answers go on after
    end-of-sequence tokens, and the ratio is to one client.

    Example: edge-run bench my-model --clients 1 2 4 8
    """
    answer = _ANSWER.record(given)
    load = _LOAD.record(given)
    options = _BENCH.record(given)
    settings = BenchSettings(
        options.max_tokens or (_MAX_TOKENS if options.replay is None else _WHOLE_ANSWER),
        parse_turns(options.turns),
        options.replay is not None,
        answer,
    )
    if options.prompt_tokens is not None and not options.clients:
        raise InputError("--prompt-tokens is given without --clients", "add --clients 1 2 4 8")
    result = (_measure_clients if options.clients else _measure)(model, load, settings, options)
    if as_json:
        write_json(result.to_json())
    else:
        show(SafeConsole(), result)


def _measure(model: str | None, load: LoadOptions, settings: BenchSettings, options: BenchOptions) -> BenchResult:
    modes = _modes(options)
    conversations, source = _conversations(settings, options, for_shell=model is None)
    with open_model(model, load) as engine:
        meter = LoadMeter(engine.threads)
        with ProgressDisplay() as progress:
            found = measure_modes(engine, dict(enumerate(conversations)), modes, settings, progress)
            measured = list(chain.from_iterable(found))
        conditions = _conditions(engine, load, settings, options, source, len(conversations))
        return BenchResult.of(measured, conditions, meter)


def _measure_clients(
    model: str | None, load: LoadOptions, settings: BenchSettings, options: BenchOptions
) -> ClientsResult:
    """Measure the numbers of clients that were given, and one client.

    Raises:
        InputError: an option is given that does not go with --clients.
    """
    counts, modes = sorted({1, *(options.clients or ())}), _modes(options)
    for name in ("prompts", "replay", "limit", "turns"):
        if getattr(options, name) != getattr(_BENCH.base, name):
            raise InputError(f"--clients and --{name} exclude each other", "measure them one after the other")
    if len(modes) > 1:
        raise InputError("--clients takes one --spec", "measure them one after the other")
    with open_model(model, replace(load, parallel=counts[-1], prefix_cache=0)) as engine:
        prompt_tokens, max_tokens = request_lengths(engine.context, options.prompt_tokens, options.max_tokens)
        settings = replace(settings, max_tokens=max_tokens)
        request = replace(settings.options, max_tokens=max_tokens, speculation=modes[0].speculation, ignore_eos=True)
        meter = LoadMeter(engine.threads)
        with ProgressDisplay() as progress:
            rows = measure_clients(engine, counts, prompt_tokens, request, progress)
        requests = TURNS * REQUESTS * sum(counts)
        conditions = _conditions(engine, load, settings, options, "edge-run's own prompts", requests)
        return ClientsResult(conditions, prompt_tokens, modes[0].name, rows, meter.others(), meter.is_busy)


def _modes(options: BenchOptions) -> list[DecodingMode]:
    speculations = dict.fromkeys(map(Speculation.parse, options.spec or ["auto"]))
    return [DecodingMode(str(speculation), speculation) for speculation in speculations]


def _conditions(
    engine: Engine, load: LoadOptions, settings: BenchSettings, options: BenchOptions, source: str, conversations: int
) -> BenchConditions:
    pair = find_draft(engine.bundle, load.draft)
    return BenchConditions(
        model=engine.bundle.folder.name,
        draft=None if pair is None else pair.name,
        device=str(engine.device),
        threads=engine.compute_threads,
        context=engine.context,
        source=source,
        replay=settings.replay,
        max_tokens=settings.max_tokens,
        turns=options.turns,
        temperature=settings.options.temperature or 0.0,
        conversations=conversations,
    )


def _conversations(
    settings: BenchSettings, options: BenchOptions, *, for_shell: bool
) -> tuple[Sequence[Conversation], str]:
    """The conversations to measure, and the name of their source.

    Raises:
        InputError: the file cannot be used, two are given, or no turn would be measured.
    """
    if options.prompts is not None and options.replay is not None:
        raise InputError("--prompts and --replay exclude each other", "measure them one after the other")
    if options.replay is not None:
        read, source = read_recording(options.replay), options.replay.name
    elif options.prompts is not None:
        read, source = read_prompts(options.prompts), options.prompts.name
    else:
        read, source = bundled_prompts(for_shell=for_shell), "edge-run's own prompts"
    conversations = [each for each in limit_per_category(read, options.limit) if settings.measured_turns(each)]
    if not conversations:
        raise InputError(f"--turns {options.turns} selects no turn of {source}", "give another range")
    return conversations, source


def show(console: Console, result: BenchResult | ClientsResult) -> None:
    """Print the headlines, tables and notes of a measurement."""
    if isinstance(result, ClientsResult):
        _show_clients(console, result)
        return
    console.print(_heading(result.conditions))
    for line in result.headlines:
        console.print(Text(f"  {line}.", "bold"), soft_wrap=True)
    tables = [*map(_categories, result.modes), _drafters(result), _rounds(result)]
    if any(mode.stats.by_depth for mode in result.modes):
        tables.append(_depths(result))
    for table in tables:
        if table.row_count:
            console.print(table)
    for note in result.notes:
        console.print(f"  {note}", soft_wrap=True)


def _show_clients(console: Console, result: ClientsResult) -> None:
    console.print(_heading(result.conditions))
    columns = ("clients", "tokens/s", "ratio", "first token, ms", "p95", "per token, ms", "p95")
    table = _table("tokens per second of all clients together, and the times of a request", *columns)
    for row in result.rows:
        table.add_row(str(row["clients"]), *(f"{row[name]:.{2 if name == 'ratio' else 1}f}" for name in COLUMNS))
    console.print(table)
    tokens = f"{result.prompt_tokens} tokens, answers of {result.conditions.max_tokens}"
    console.print(f"  Prompts of {tokens}; --spec {result.speculation}. Medians; ratios are to one client.")
    if result.busy:
        console.print(f"  {BUSY_NOTE}", soft_wrap=True)


def _heading(conditions: BenchConditions) -> Text:
    draft = f" with draft model {conditions.draft}" if conditions.draft else ""
    text = Text(conditions.model, "bold")
    return text.append(f"{draft} on {conditions.device}: {conditions.source}", "not bold")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def ratio_text(estimate: Estimate) -> str:
    """A ratio with its confidence interval."""
    if estimate.interval is None:
        return f"{estimate.value:.2f}"
    low, high = estimate.interval
    return f"{estimate.value:.2f} [{low:.2f}, {high:.2f}]"


def acceptance_text(counts: DraftCounts) -> str:
    """An acceptance rate in per cent."""
    return f"{counts.acceptance_rate:.0%}" if counts.drafted else "-"


def _categories(mode: ModeResult) -> Table:
    table = _table(
        f"{mode.name} compared with plain decoding, tokens per second",
        *("", "answers", "plain", mode.name, "ratio", "tokens per pass", "accepted"),
    )
    rows = [(each.name, each.plain, each.stats, each.ratio) for each in mode.categories]
    rows.append(("geometric mean", mode.plain, mode.stats, mode.mean))
    for number, (name, plain, stats, ratio) in enumerate(rows, 1):
        if number == len(rows):
            table.add_section()
        table.add_row(
            name,
            str(stats.answers),
            f"{plain.decode_tokens_per_second:.1f}",
            f"{stats.decode_tokens_per_second:.1f}",
            ratio_text(ratio),
            f"{stats.tokens_per_pass:.2f}",
            acceptance_text(stats.draft_counts),
            style="bold" if number == len(rows) else None,
        )
    return table


def _drafters(result: BenchResult) -> Table:
    table = _table("draft tokens by drafter", "", "drafter", "verified", "accepted", "")
    for mode in result.modes:
        for number, (name, counts) in enumerate(mode.stats.by_source.items()):
            shown = mode.name if number == 0 else ""
            table.add_row(shown, name, str(counts.drafted), str(counts.accepted), acceptance_text(counts))
        table.add_section()
    return table


def _rounds(result: BenchResult) -> Table:
    table = _table("milliseconds per round", "", "draft passes", "target pass", "host", "total", "rounds")
    for name, stats in result.stats.items():
        table.add_row(name, *(f"{part:.2f}" for part in round_ms(stats).values()), str(stats.decode_passes))
    return table


def _depths(result: BenchResult) -> Table:
    deepest = min(max(len(mode.stats.by_depth) for mode in result.modes), _MAX_DEPTH)
    table = _table("acceptance rate by depth in the draft", "", *map(str, range(1, deepest + 1)))
    for mode in result.modes:
        counts = [*mode.stats.by_depth, *[DraftCounts()] * deepest][:deepest]
        table.add_row(mode.name, *map(acceptance_text, counts))
    return table
