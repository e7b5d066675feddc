"""`edge-run tune MODEL`: measures what a pass over several tokens costs on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from ...models.bundle import Bundle, open_bundle
from ...models.find import find_model, path_of_user
from ...models.manifest import DeviceKind
from ...models.progress import ProgressDisplay
from ...models.user_text import read_text
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.devices.processor import Power, default_threads
from ...runtime.devices.providers import Device, choose_device, cpu_device
from ...runtime.engine import Engine
from ...runtime.engine_loading import load as open_model
from ...runtime.engine_loading import usable_threads
from ...runtime.graph.session import SessionConfig
from ...runtime.measure.bundle_timing import choose_threads, measure_fastest_device
from ...runtime.measure.device_choice import FastestDevice, ThreadChoice, chosen_threads
from ...runtime.measure.measurement_store import model_key
from ...runtime.measure.pass_timing import PASS_COSTS, WIDTHS, measure_pass_cost
from ...runtime.measure.prompt_choice import TOKENS_TO_LOAD, PromptChoice
from ...runtime.prefill import PrefillMode
from ...runtime.speculation.drafters.ngram_counts import write_bundle_table
from ...runtime.speculation.pass_cost import BUCKET_ENDS, Doubt, PassCost
from ..terminal.output import SafeConsole, write_json, write_warning
from .shared_options import AsJson, ModelArgument, OptionsOf, takes_options

_LOAD: Final = OptionsOf(LoadOptions(power=Power.PERFORMANCE), only=("device", "threads", "prefill", "tokenizer"))
_CONTEXTS: Final = (384, 1536, 6144, 24576, 98304)
"""One context length in each bucket, near its end, where a conversation spends most of its time."""
_MAX_CACHE_BYTES: Final = 512 << 20
"""Largest KV cache to measure with unless --context is given."""
_DOUBTS: Final = {
    Doubt.BUSY: "other programs used the processor while these costs were measured",
    Doubt.OUTDATED: "passes have since taken something else",
}


@takes_options(_LOAD)
def tune(
    model: ModelArgument = None,
    context: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Longest context to measure.", show_default="what fits in 512 MB"),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Count this text into the n-gram table; may be repeated."),
    ] = None,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Measure what a pass over several tokens costs on this machine, and store it.

    Speculative decoding sizes its drafts by these costs. The first answer of a model measures them briefly. Costs that
    were measured while other programs used the processor are marked as doubtful; close those programs and measure
    again. This takes about two seconds for each context length, and longer for large models or on a busy machine.

    Without --threads it first finds the number of threads that is fastest, and every command uses that from then on.
    Without --device it then decodes on every GPU and NPU that computes the whole model, in turns with the CPU, and
    --device auto means the fastest one from then on.

    It also makes the int8 prompt graph of the model, checks its quality and measures whether it reads prompts faster
    here; every command with --prefill auto does as was found. --prefill plain leaves that out.

    --text counts the n-grams of text files into a table that drafts where the conversation does not repeat itself. The
    new table replaces the old one and serves all models with the same tokenizer.

    Example: edge-run tune my-model --context 8192 --text notes.md
    """
    load = _LOAD.record(given)
    texts = [read_text(path, "give a file with text") for path in text or ()]
    choice = _choose_threads(model, load) if load.threads is None else None
    fastest = _choose_device(model, load) if load.device.lower() == "auto" else None
    # A graph that is asked for by name would be used whatever is measured, but this is to find out.
    reader = PrefillMode.PLAIN if load.prefill == PrefillMode.PLAIN else PrefillMode.AUTO
    with open_model(model, replace(load, context=context, prefill=reader)) as engine:
        cost, prompts, file = _measure(engine, limited=context is None)
        sequences = (engine.tokenizer.encode(each, add_special_tokens=False) for each in texts)
        prior_bytes = write_bundle_table(engine.bundle, sequences, engine.graph_io.vocab_size) if texts else 0
        facts = {
            **_facts(engine, cost, file, choice, fastest),
            "prompts": prompts,
            "ngram_bytes": prior_bytes,
        }
    if as_json:
        write_json(facts)
        return
    lines = [] if reader is PrefillMode.PLAIN else [prompt_text(prompts)]
    lines += [] if cost.doubt is None else [doubt_text(cost.doubt.value)]
    lines += [f"n-gram table: {prior_bytes / 2**20:.1f} MiB"] if prior_bytes else []
    console = SafeConsole()
    for shown in (*_threads_lines(choice), *fastest_device_lines(fastest), _table(cost), *lines):
        console.print(shown, soft_wrap=isinstance(shown, str))
    if file is None:
        write_warning("the cache folder cannot be written, so the result is not stored")


def _facts(
    engine: Engine, cost: PassCost, file: Path | None, choice: ThreadChoice | None, fastest: FastestDevice | None
) -> dict[str, Any]:
    """What was measured of devices, threads and passes, as JSON."""
    seconds = {} if choice is None else choice.seconds
    return {
        "model": str(engine.bundle.folder),
        "device": str(engine.device),
        "devices": None if fastest is None else asdict(fastest),
        "threads": {
            "used": engine.threads or default_threads(),
            "milliseconds": {str(count): round(value * 1e3, 4) for count, value in sorted(seconds.items())},
        },
        "file": None if file is None else str(file),
        "doubt": None if cost.doubt is None else cost.doubt.value,
        "contexts": describe_cost(cost),
    }


def _measure(engine: Engine, *, limited: bool) -> tuple[PassCost, dict[str, Any], Path | None]:
    """Measure what passes cost, and which graph reads prompts fastest; the costs are stored in a file."""
    with ProgressDisplay() as progress:
        cost = measure_pass_cost(
            engine.new_sequence().bound,
            contexts=_contexts(engine, limited=limited),
            threads=engine.threads,
            progress=lambda fraction: progress("timing passes", fraction),
        )
        choice = engine.prefill_choice.tune(progress)
    key = model_key(engine.bundle, SessionConfig(engine.device, engine.threads))
    return cost, prompt_facts(choice, engine.prefill_choice.refusal), PASS_COSTS.save(key, cost)


def _choose_threads(model: str | None, load: LoadOptions) -> ThreadChoice | None:
    """Measure which number of threads is fastest; None on other devices than the CPU."""
    chosen = choose_device(load.device)
    if chosen.kind is not DeviceKind.CPU:
        return None
    bundle = named_bundle(model, load, chosen)
    with ProgressDisplay() as progress:
        return choose_threads(bundle, SessionConfig(chosen), progress)


def named_bundle(model: str | None, load: LoadOptions, device: Device) -> Bundle:
    """The bundle of a model, with the tokenizer of the options.

    Raises:
        EdgeError: there is none, or it is damaged.
    """
    hint = "give a tokenizer.json, or a folder with one"
    tokenizer = None if load.tokenizer is None else path_of_user(load.tokenizer, hint)
    return open_bundle(find_model(model, device.kind), kind=device.kind, tokenizer=tokenizer)


def _choose_device(model: str | None, load: LoadOptions) -> FastestDevice:
    """Measure on which device the model decodes fastest."""
    cpu = cpu_device()
    bundle = named_bundle(model, load, cpu)
    config = SessionConfig(cpu, usable_threads(load.threads) or chosen_threads(bundle, SessionConfig(cpu)))
    with ProgressDisplay() as progress:
        return measure_fastest_device(bundle, config, progress)


def fastest_device_lines(choice: FastestDevice | None) -> list[str]:
    """What each device takes for a token, why others were not timed, and which one is used from now on."""
    if choice is None or not (choice.seconds or choice.refused):
        return []
    times = ", ".join(f"{name}: {value * 1e3:.3g} ms" for name, value in choice.seconds.items())
    lines = [f"{name} was not timed: {reason}" for name, reason in choice.refused.items()]
    if choice.busy:
        return [*lines, f"devices: {times} a token; not stored, because other programs used the processor"]
    lines += [f"devices: {times} a token"] if times else []
    return [*lines, f"--device auto means {choice.device} for this model"]


def prompt_facts(choice: PromptChoice | None, refusal: str | None) -> dict[str, Any]:
    """Which graph reads prompts, and what was measured of the int8 prompt graph, as plain values."""
    facts: dict[str, Any] = {"int8_used": refusal is None, "reason": refusal}
    if choice is not None and choice.obstacle is None:
        facts["speedup"] = round(choice.speedup, 3)
        facts["mean_kl"], facts["kl_limit"] = choice.mean_kl, choice.kl_limit
        for index, name in enumerate(("plain", "int8")):
            times = {str(width): round(pair[index] * 1e3, 3) for width, pair in choice.seconds.items()}
            facts[f"{name}_milliseconds"] = times
    return facts


def prompt_text(facts: Mapping[str, Any]) -> str:
    """Which graph reads prompts, in a sentence."""
    if not facts["int8_used"]:
        return f"int8 prompt graph: {facts['reason']}"
    if "speedup" not in facts:
        return "int8 prompt graph: reads prompts, without having been measured"
    return (
        f"int8 prompt graph: reads prompts at {facts['speedup']:.2f} times the speed, "
        f"mean KL {facts['mean_kl']:.2g} (limit {facts['kl_limit']:.2g}); "
        f"loaded for prompts of {TOKENS_TO_LOAD} tokens and more, or after shorter ones"
    )


def _threads_lines(choice: ThreadChoice | None) -> list[str]:
    """Which number of threads is used from now on; nothing where none was measured."""
    if choice is None or not choice.seconds:
        return []
    times = ", ".join(f"{count}: {value * 1e3:.3g} ms" for count, value in sorted(choice.seconds.items()))
    if choice.busy:
        return [f"threads: {times}; not stored, because other programs used the processor"]
    return [f"threads: {times}; {choice.threads} from now on, unless --threads says otherwise"]


def describe_cost(cost: PassCost) -> list[dict[str, Any]]:
    """The measured pass costs of each context bucket as plain values.

    `up_to_context` is null for the last bucket, which has no end. `break_even_acceptance` is the probability of
    acceptance from which a single draft token pays: there (1 + p) / t(2) tokens a second are as many as 1 / t(1).
    Above 1 it never pays.
    """
    described = []
    for end, times in cost.measured.items():
        widest, (one, two) = max(times), cost.curve(end, 2)
        described.append(
            {
                "up_to_context": end if end <= BUCKET_ENDS[-1] else None,
                "tokens": list(times),
                "milliseconds": [round(seconds * 1e3, 4) for seconds in times.values()],
                "ratio": [round(seconds / times[1], 4) for seconds in times.values()],
                "extra_token_milliseconds": round((times[widest] - times[1]) / max(widest - 1, 1) * 1e3, 4),
                "break_even_acceptance": round(float(two / one) - 1, 4),
            }
        )
    return described


def doubt_text(doubt: str) -> str:
    """What to know about doubtful pass costs, in a sentence or two."""
    return f"doubtful: {_DOUBTS[Doubt(doubt)]}. They are measured again when the model is loaded on an idle machine."


def context_label(up_to: int | None) -> str:
    """The name of a context bucket."""
    return f"context over {BUCKET_ENDS[-1]}" if up_to is None else f"context up to {up_to}"


def _contexts(engine: Engine, *, limited: bool) -> list[int]:
    """Context lengths to measure at, in tokens."""
    most = _MAX_CACHE_BYTES // engine.graph_io.cache_bytes_per_token if limited else engine.context
    longest = min(engine.context, most)
    fitting = [context for context in _CONTEXTS if context + WIDTHS[-1] <= longest]
    return fitting or [engine.context // 2]


def _table(cost: PassCost) -> Table:
    described = describe_cost(cost)
    table = Table("tokens", *(context_label(entry["up_to_context"]) for entry in described), box=None, pad_edge=False)
    for width in sorted({width for entry in described for width in entry["tokens"]}):
        cells = []
        for entry in described:
            times = zip(entry["milliseconds"], entry["ratio"], strict=True)
            found = dict(zip(entry["tokens"], times, strict=True))
            cells.append("{:.3g} ms  {:.2f}x".format(*found[width]) if width in found else "-")
        table.add_row(str(width), *cells)
    table.add_section()
    table.add_row("each further token", *(f"{entry['extra_token_milliseconds']:.3g} ms" for entry in described))
    shares = [entry["break_even_acceptance"] for entry in described]
    table.add_row("break-even acceptance", *("never" if share > 1 else f"{share:.0%}" for share in shares))
    return table
