"""`edge-run verify MODEL`: checks whether speculation changes what a model writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from ...models.pairing import find_draft
from ...models.progress import ProgressDisplay
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.devices.processor import Power
from ...runtime.engine import Engine
from ...runtime.engine_loading import load as open_model
from ...runtime.kv.cache_scales import KVFormat
from ...runtime.measure.exactness import ComparisonCounts, Counterexample, ExactnessReport
from ...runtime.measure.logit_quality import LogitQuality, measure_quality
from ...runtime.prefill import PrefillMode
from ..terminal.output import SafeConsole, write_json
from .shared_options import AsJson, ModelArgument, OptionsOf, Prompts, takes_options

_LOAD: Final = OptionsOf(
    LoadOptions(power=Power.PERFORMANCE, prefill=PrefillMode.PLAIN),
    only=("device", "threads", "context", "kv", "tokenizer", "draft", "draft_device"),
)
_KINDS: Final = {
    "greedy": "greedy",
    "sampled": "sampled",
    "exact": "greedy with --exact",
    "together": "several at a time",
}


@takes_options(_LOAD)
def verify(
    model: ModelArgument = None,
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of prompts of each category.")] = 3,
    max_tokens: Annotated[
        int, typer.Option("-n", "--max-tokens", metavar="N", min=2, help="Maximum tokens of an answer.")
    ] = 64,
    as_json: AsJson = False,
    **given: Any,
) -> int:
    """Check that speculation does not change what a model writes on this machine.

    Compares the logits of passes over several tokens with those of passes over one token, and speculative texts, with
    drafts of every kind, with texts of plain decoding. Texts may differ only from a near tie on: a position whose two
    best logits are closer than the passes differ. With --exact they may not differ at all. Texts that share passes, as
    those of several clients do, are compared too. The report is stored for
    --exact, and edge-run inspect shows it. The exit code is 1 if a text differs anywhere else. Of weights that are
    packed for this machine in the cache, and of the int8 prompt graph, all bytes are compared with their checksums.
    Prompts are read by the model itself (--prefill plain).

    With --kv int8 or int4 all this is done with that cache, and its logits are compared with those of a float cache.

    Examples: edge-run verify my-model --prompts spec_bench.jsonl --limit 10; edge-run verify my-model --kv int8
    """
    load = _LOAD.record(given)
    from ...runtime.graph.packed_files import verify_prepacked
    from ...runtime.int8_prompts.int8_graph_files import verify_int8_graph
    from ..bench.prompt_sets import bundled_prompts, limit_per_category, read_prompts
    from ..bench.runner import compare_texts

    read = bundled_prompts(for_shell=model is None) if prompts is None else read_prompts(prompts)
    conversations = limit_per_category(read, limit)
    with open_model(model, load) as engine:
        pair = find_draft(engine.bundle, load.draft)
        bundles = [engine.bundle, *([] if pair is None or pair.head is not None else [pair.draft])]
        packed = sum(map(verify_prepacked, bundles)) + verify_int8_graph(engine.bundle) > 0
        quality = {}
        with ProgressDisplay() as progress:
            report, texts = compare_texts(engine, conversations, max_tokens, progress)
            if load.kv != KVFormat.FLOAT:
                quality[f"{load.kv} cache"] = measure_quality(
                    engine.new_sequence().bound,
                    engine.with_float_cache(),
                    texts,
                    partial(progress, f"comparing the {load.kv} cache with a float cache"),
                )
        if as_json:
            write_json(_facts(engine, report, quality, packed))
        else:
            _show(engine, report, quality, packed, [each.exchanges[0].prompt for each in conversations])
    return 0 if report.passed else 1


def _facts(
    engine: Engine, report: ExactnessReport, quality: Mapping[str, LogitQuality], packed: bool
) -> dict[str, Any]:
    """What was found, as plain values."""
    return {
        "model": str(engine.bundle.folder),
        "device": str(engine.device),
        "packed_weights": "intact" if packed else None,
        "summary": exactness_summary(report),
        **{name.replace(" ", "_"): asdict(each) for name, each in quality.items()},
        **report.to_json(),
    }


def exactness_summary(report: ExactnessReport) -> str:
    """What an exactness report found, in a few words."""
    counts = [count for kind in _KINDS if (count := getattr(report, kind)) is not None]
    texts, tied = sum(count.texts for count in counts), sum(count.near_ties for count in counts)
    failed = sum(count.failed for count in counts)
    if not report.noise.sound:
        return "FAILED: passes over several tokens compute something else than passes over one token"
    if failed:
        return f"FAILED: {failed} of {texts} texts differ where no tie is below {report.epsilon:.3g}"
    if report.noise.identical and not tied:
        return "bit-identical"
    ties = f"identical up to ties below {report.epsilon:.3g}"
    if not texts:
        return f"{ties}, measured on one text; edge-run verify compares more"
    return f"{ties} ({tied} of {texts} texts differ{', each at a tie' if tied else ''})"


def _show(
    engine: Engine, report: ExactnessReport, quality: Mapping[str, LogitQuality], packed: bool, prompts: Sequence[str]
) -> None:
    noise = report.noise
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    widths = ", ".join(f"{width}: {value:.2g}" for width, value in noise.chains.items())
    leak = "do not affect each other" if not noise.leak else f"change logits of other branches by {noise.leak:.2g}"
    if packed:
        table.add_row("packed weights", "all bytes in the cache are as they were written")
    table.add_row("wider passes", f"logits differ by at most {widths} (tokens of a pass: difference)")
    table.add_row("token trees", f"logits differ by at most {noise.trees:.2g}")
    if noise.long_context:
        table.add_row("long contexts", f"logits differ by at most {noise.long_context:.2g} in the graph that runs them")
    table.add_row("perturbed cache", f"logits differ by at most {noise.perturbed:.2g} when its last bits change")
    table.add_row("logits", f"standard deviation {noise.spread:.2g}")
    table.add_row("tree branches", leak)
    for kind, name in _KINDS.items():
        count = getattr(report, kind)
        if count is not None:
            table.add_row(name, _counted(count))
    for name, each in quality.items():
        table.add_row(
            name,
            f"mean KL {each.mean_kl:.2g} from a float cache (99 % of positions below {each.p99_kl:.2g}), the same "
            f"most likely token at {each.top1_agreement:.1%} of {each.positions} positions of texts of up to "
            f"{each.longest} tokens",
        )
    console = SafeConsole()
    console.print(table)
    if report.counterexample is not None:
        console.print(_described(engine, report.counterexample, prompts))
    console.print(exactness_summary(report), style="bold")


def _counted(count: ComparisonCounts) -> str:
    parts = [f"{count.identical} of {count.texts} texts identical"]
    if count.near_ties:
        parts.append(f"{count.near_ties} differ from a near tie on, the widest {count.widest_near_tie:.2g}")
    if count.failed:
        parts.append(f"{count.failed} differ elsewhere")
    parts.append(f"{count.drafts.accepted} of {count.drafts.drafted} draft tokens accepted")
    if count.recomputed:
        parts.append(f"{count.recomputed} positions recomputed")
    return ", ".join(parts)


def _described(engine: Engine, found: Counterexample, prompts: Sequence[str]) -> str:
    """A counterexample as a sentence."""
    expected, other = (
        json.dumps(engine.tokenizer.decode([token]), ensure_ascii=False) if token >= 0 else "nothing"
        for token in (found.expected, found.found)
    )
    how = f"sampled with seed {found.seed}" if found.kind == "sampled" else _KINDS[found.kind]
    return (
        f"{how}, drafts by {found.drafter}: token {found.position + 1} of the answer is {other} instead of {expected}, "
        f"{found.gap:.3g} apart, for the prompt {json.dumps(prompts[found.prompt], ensure_ascii=False)}"
    )
