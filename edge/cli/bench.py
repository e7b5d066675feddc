"""`edge-run bench MODEL`: compares plain and speculative decoding on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import InputError, missing_extra
from ...models.pairing import find_draft
from ...models.progress import ProgressDisplay
from ...runtime.arguments.argument_types import option
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.devices.processor import Power
from ...runtime.engine_loading import load as open_model
from ...runtime.options import GenerateOptions
from ...runtime.speculation.choice import Speculation
from ..terminal.output import SafeConsole, write_json
from .shared_options import OWN_PROMPTS, PROMPTS_HELP, AsJson, Debug, ModelArgument, OptionsOf, takes_options

if TYPE_CHECKING:
    from ..bench.bench_result import BenchResult
    from ..bench.prompt_sets import Conversation
    from ..bench.runner import BenchSettings

_LOAD: Final = OptionsOf(
    # As fast as the machine can, also on battery. With what earlier answers taught, a measurement would not repeat.
    LoadOptions(power=Power.PERFORMANCE, learned=False),
    only=("device", "threads", "context", "kv", "prefill", "cache", "tokenizer", "draft", "draft_device"),
)
_ANSWER: Final = OptionsOf(GenerateOptions(temperature=0.0, seed=0), only=("raw", "temperature", "seed"))
_MAX_TOKENS: Final = 256
_WHOLE_ANSWER: Final = 1 << 20
"""A recorded answer is replayed to its end, because the longer it is, the more it repeats."""


@dataclass(frozen=True)
class BenchOptions:
    """What to measure."""

    prompts: Path | None = option(None, PROMPTS_HELP, metavar="FILE", unset=OWN_PROMPTS)
    replay: Path | None = option(
        None,
        "Recorded conversations: every pass is run at its full cost, but the tokens are the recorded ones.",
        metavar="FILE",
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
        unset=f"{_MAX_TOKENS}; with --replay, the whole answer",
    )
    limit: int | None = option(
        None, "Maximum number of conversations of each category.", metavar="N", least=1, unset="all"
    )
    turns: str = option("all", "Turns of a conversation to measure: all, 2, 1-2 or 2-.", metavar="RANGE")
    report: Path | None = option(
        None, "Write tables and plots to this .html file, or the plots to this .png file.", metavar="FILE"
    )


_BENCH: Final = OptionsOf(BenchOptions())


@takes_options(_BENCH, _ANSWER, _LOAD)
def bench(
    model: ModelArgument = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001  main reads it
    **given: Any,
) -> None:
    """Compare the speed of speculative and plain decoding, prompt by prompt in one run.

    Prints the ratio of the speeds with its interval, or why the measurement gives none, then tables by category and by
    drafter; with --json, one JSON object. Speeds are decoding rates after the first token.

    Example: edge-run bench my-model --prompts spec_bench.jsonl --limit 5 --report bench.html
    """
    answer = _ANSWER.record(given)
    load = _LOAD.record(given)
    options = _BENCH.record(given)
    from ..bench.runner import BenchSettings, parse_turns
    from ..bench.table import show

    write_report = _report_writer(options.report)
    settings = BenchSettings(
        options.max_tokens or (_MAX_TOKENS if options.replay is None else _WHOLE_ANSWER),
        parse_turns(options.turns),
        options.replay is not None,
        answer.raw,
        answer.temperature or 0.0,
        answer.seed or 0,
    )
    result = _measure(model, load, settings, options)
    if as_json:
        write_json(result.to_json())
    else:
        show(SafeConsole(), result)
    if write_report is not None:
        write_report(result)


def _measure(model: str | None, load: LoadOptions, settings: BenchSettings, options: BenchOptions) -> BenchResult:
    from ...runtime.measure.system_load import LoadMeter
    from ..bench.bench_result import BenchConditions, BenchResult
    from ..bench.runner import DecodingMode, measure_modes

    speculations = dict.fromkeys(map(Speculation.parse, options.spec or ["auto"]))
    modes = [DecodingMode(str(speculation), speculation) for speculation in speculations]
    conversations, source = _conversations(settings, options, for_shell=model is None)
    with open_model(model, load) as engine:
        pair = find_draft(engine.bundle, load.draft)
        meter = LoadMeter(engine.threads)
        with ProgressDisplay() as progress:
            measured = measure_modes(engine, conversations, modes, settings, progress)
        conditions = BenchConditions(
            model=engine.bundle.folder.name,
            draft=None if pair is None else pair.name,
            device=str(engine.device),
            threads=engine.compute_threads,
            context=engine.context,
            source=source,
            replay=settings.replay,
            max_tokens=settings.max_tokens,
            turns=options.turns,
            temperature=settings.temperature,
            conversations=len(conversations),
            draft_head=None if pair is None or pair.target_ids is None else pair.target_ids.size,
        )
        return BenchResult.of(measured, conditions, engine, meter)


def _conversations(
    settings: BenchSettings, options: BenchOptions, *, for_shell: bool
) -> tuple[Sequence[Conversation], str]:
    """The conversations to measure, and the name of their source.

    Raises:
        InputError: the file cannot be used, two are given, or no turn would be measured.
    """
    from ..bench.prompt_sets import bundled_prompts, limit_per_category, read_prompts, read_recording

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


def check_report_path(path: Path) -> None:
    """Check that a report can be written to this path.

    Raises:
        InputError: the name ends in neither .html nor .png, or the folder does not exist.
    """
    if path.suffix.lower() not in (".html", ".htm", ".png"):
        raise InputError(f"--report {path.name} is neither .html nor .png", "end the name in .html or .png")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"--report {path} cannot be written", "name a file in a folder that exists")


def _report_writer(path: Path | None) -> Callable[[BenchResult], None] | None:
    """A function that writes the report, checked before the measurement starts.

    Raises:
        InputError: the report could not be written.
    """
    if path is None:
        return None
    check_report_path(path)
    with missing_extra("a report", "bench"):
        from ..bench.plots import write_report
    return lambda result: write_report(path, result)
