"""`edge-run inspect MODEL`: describes a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from ...models.bundle import Bundle
from ...models.manifest import Manifest, VariantFile, WeightFormat
from ...models.onnx_file.model_messages import attribute_values, read_model
from ...models.onnx_file.wire import external_files
from ...models.pairing import find_draft
from ...models.user_text import format_bytes
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.devices.providers import choose_device
from ...runtime.graph.graph_io import CacheMode, GraphIO
from ...runtime.graph.open_graph import open_graph, prompt_graph_obstacle
from ...runtime.graph.session import SessionConfig
from ...runtime.images.image_processors import processor_of, suits_images
from ...runtime.int8_prompts.int8_graph_files import int8_graph_plan
from ...runtime.kv.state_buffers import StatePart
from ...runtime.measure.device_choice import chosen_threads
from ...runtime.measure.exactness import EXACTNESS_REPORTS
from ...runtime.measure.measurement_store import model_key
from ...runtime.measure.pass_timing import PASS_COSTS
from ...runtime.measure.prompt_choice import NOT_MADE, PROMPT_CHOICES
from ...runtime.prefill import PrefillMode
from ...runtime.text.chat_template import load_template
from ...runtime.text.tokenizer import TextTokenizer
from ...runtime.tools.answer_format import AnswerFormat
from ...runtime.tools.answer_parts import AUTO
from ..terminal.output import SafeConsole, write_json
from ..terminal.report_summary import plan_table
from .shared_options import AsJson, ModelArgument, OptionsOf, takes_options
from .tune import context_label, describe_cost, doubt_text, named_bundle, prompt_facts, prompt_text
from .verify import exactness_summary

_SIDE: Final = 448
"""Pixels of a side of the image whose tokens are counted."""
_FORMATS: Final[Mapping[int, str]] = {10: "fp16", 2: "int8", 3: "int8"}
"""Formats of weights by ONNX's number of an element type that no others have."""
_FLOAT_BITS: Final = 16
"""Weights of this many bits or more are not quantized."""
_FIGURE_NAMES: Final = {
    "max_abs_diff": "largest logit difference",
    "mean_kl": "mean KL",
    "p99_kl": "99th percentile KL",
    "top1_agreement": "top-1 agreement",
    "float_perplexity": "float perplexity",
}
_LOAD: Final = OptionsOf(LoadOptions(), only=("tokenizer",))


@takes_options(_LOAD)
def inspect(
    model: ModelArgument = None,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Show a model's architecture, weights, files, and how close it is to its checkpoint.

    Example: edge-run inspect my-model
    """
    load = _LOAD.record(given)
    device = choose_device("auto")
    bundle = named_bundle(model, load, device)
    facts = _described_model(bundle, SessionConfig(device, chosen_threads(bundle, SessionConfig(device))))
    if as_json:
        write_json(facts)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        # The plan is shown as a table of its own.
        hidden = name in _SHOWN_IF_ANY and value is None
        if name != "quantization_plan" and not hidden:
            table.add_row(name.replace("_", " "), _FORMATTERS.get(name, _formatted)(value) or "-")
    console = SafeConsole()
    console.print(table)
    if bundle.manifest is not None and (plan := plan_table(bundle.manifest.weights)).row_count:
        console.print(plan)


def _described_model(bundle: Bundle, config: SessionConfig) -> dict[str, Any]:
    """A model as plain values; it need not be able to answer.

    Raises:
        EdgeError: it cannot be loaded, or its tokenizer is damaged.
    """
    graph, manifest = open_graph(bundle, config, cache=True), bundle.manifest
    graph_io, shared = graph.graph_io, graph.share_passes(2, lambda _: None)
    tokenizer = template = answers = None
    if bundle.file("tokenizer.json") is not None:
        tokenizer = TextTokenizer(bundle, graph_io.vocab_size)
        if (template := load_template(bundle, tokenizer)) is not None:
            answers = AnswerFormat(template.written, AUTO, tokenizer)
    contexts = [each for each in (bundle.context, graph_io.capacity) if each is not None]
    facts: dict[str, Any] = {"model": str(bundle.folder), "graph": bundle.graph.name}
    if manifest is not None:
        architecture = manifest.architecture
        facts |= {
            "family": architecture.family,
            "hidden_size": architecture.hidden_size,
            "intermediate_size": architecture.intermediate_size,
            "attention_heads": architecture.heads,
            "tied_head": architecture.tied_head,
        }
    facts |= {
        "layers": graph_io.layers + len({tensor.layer for tensor in graph_io.states}),
        "cache": _cache(graph_io),
        "state_layers": _states(graph_io),
        "vocabulary": graph_io.vocab_size,
        "context": min(contexts, default=None),
        "cache_bytes_per_token": graph_io.cache_bytes_per_token,
        "token_trees": graph_io.supports_trees,
        "simultaneous_answers": f"take turns: {shared}" if isinstance(shared, str) else "share passes",
        "tokenizer": tokenizer is not None,
        "chat_template": template is not None,
        "tool_format": None if answers is None or answers.tool_format is None else answers.tool_format.name,
        "reasoning_tags": None if answers is None or answers.tags is None else answers.tags._asdict(),
        "end_tokens": [] if tokenizer is None else sorted(tokenizer.eos),
    }
    if manifest is not None:
        facts |= _manifest_facts(manifest)
    if bundle.vision is not None and suits_images(bundle, graph_io):
        facts["images"] = _images(bundle.vision, bundle)
    facts["draft"] = _draft(bundle)
    return facts | _measured(bundle, config, graph_io)


def _measured(bundle: Bundle, config: SessionConfig, graph_io: GraphIO) -> dict[str, Any]:
    """What was measured of a model on this machine, as plain values."""
    key = model_key(bundle, config)
    cost, report, choice = PASS_COSTS.load(key), EXACTNESS_REPORTS.load(key), PROMPT_CHOICES.load(key)
    refusal = prompt_graph_obstacle(bundle, config, graph_io, PrefillMode.AUTO, cache=True)
    if refusal is None:
        plan = int8_graph_plan(bundle) if choice is None else choice.refusal
        refusal = NOT_MADE if isinstance(plan, int) else plan
    return {
        "pass_costs": None if cost is None else describe_cost(cost),
        "prompts": prompt_facts(choice, refusal),
        "pass_costs_doubt": None if cost is None or cost.doubt is None else cost.doubt.value,
        "exactness": None if report is None else {"summary": exactness_summary(report), **report.to_json()},
    }


def _manifest_facts(manifest: Manifest) -> dict[str, Any]:
    """What the manifest of an export says, as plain values."""
    read = manifest.bits_per_weight_read
    calibration = manifest.calibration
    text = "a short sample text"
    if calibration is not None:
        text = f"{calibration.held_out_tokens} held-out tokens of {calibration.origin}"
    quantized = [each for each in manifest.weights.values() if each.bits < _FLOAT_BITS]
    return {
        "weights": dict(Counter(map(str, manifest.weights.values()))),
        # Weights that came quantized, or from an older edge-run, have no method.
        "methods": dict(Counter("not recorded" if each.method is None else each.method.value for each in quantized)),
        "embedding_weights": str(manifest.weights.get("embedding", manifest.weights["head"])),
        "head_weights": str(manifest.weights["head"]),
        "bits_per_weight_read": None if read is None else round(read, 3),
        "bits_per_weight_in_file": round(manifest.bits_per_weight, 3),
        "quantization_plan": {name: {"format": str(each), **_given(each)} for name, each in manifest.weights.items()},
        "calibration": None if calibration is None else asdict(calibration),
        "quality": dict(manifest.quality),
        "quality_measured_on": text if manifest.quality else None,
        "parity": dict(manifest.parity),
        "variants": list(map(_given, manifest.variants)),
        "files": {name: digest.bytes for name, digest in manifest.files.items()},
        "made_by": manifest.command or manifest.producer,
    }


def _given(record: VariantFile | WeightFormat) -> dict[str, Any]:
    """The fields of a record that have a value, as plain values."""
    given = {name: value for name, value in asdict(record).items() if value}
    return {name: value.value if isinstance(value, Enum) else value for name, value in given.items()}


def _images(vision: Path, bundle: Bundle) -> dict[str, Any]:
    """The family of a model that sees, the tokens of an image, and the format and the bytes of its vision tower."""
    graph, tokens = read_model(vision).graph, None
    if find_spec("PIL") is not None:
        from PIL.Image import new

        tokens = sum(processor_of(bundle).process(new("RGB", (_SIDE, _SIDE))).tokens)
    bits = [attribute_values(each).get("bits", 4) for each in graph.node if each.op_type == "MatMulNBits"]
    types = {each.data_type for each in graph.initializer}
    kind = next((name for number, name in _FORMATS.items() if number in types), "fp32")
    files = [vision, *(vision.parent / name for name in external_files(vision))]
    return {
        "family": bundle.family,
        f"tokens_of_{_SIDE}_x_{_SIDE}": tokens,
        "tower": f"int{bits[0]}" if bits else kind,
        "bytes": sum(each.stat().st_size for each in files),
    }


def _draft(bundle: Bundle) -> dict[str, Any] | None:
    """The draft that the model was exported with, as plain values."""
    pair = find_draft(bundle)
    if pair is None:
        return None
    facts: dict[str, Any] = {"name": pair.name}
    if pair.head is not None:
        facts["head"] = str(pair.head)
    else:
        facts["bytes"] = pair.draft.weight_bytes
    if pair.draft.manifest is not None:
        facts["weights"] = dict(Counter(map(str, pair.draft.manifest.weights.values())))
    if pair.target_ids is not None:
        facts["head_tokens"] = pair.target_ids.size
    return facts


def _cache(graph_io: GraphIO) -> str:
    """Type and shape of the cache tensors, and whether the graph updates them in place."""
    tensors = []
    for tensor_type in dict.fromkeys(graph_io.tensor_types):
        sizes = ["slots" if axis == tensor_type.axis else str(size) for axis, size in enumerate(tensor_type.shape)]
        tensors.append(f"{tensor_type.dtype} [{', '.join(sizes)}]")
    return f"{', '.join(tensors)}, {'in place' if graph_io.cache_mode is CacheMode.IN_PLACE else 'growing'}"


def _states(graph_io: GraphIO) -> str | None:
    """The layers that keep states beside the cache, by number, and the type and shape of these; None without them."""
    described, first = [], 0
    for state_type in graph_io.state_types:
        members = graph_io.states[first : first + state_type.layers]
        first += len(members)
        if state_type.part is StatePart.UPDATES:
            continue
        layers = ", ".join(str(tensor.layer) for tensor in members)
        sizes = ", ".join(map(str, state_type.shape))
        described.append(f"{layers}: {members[0].kind}, {state_type.dtype} [{sizes}] each")
    return "; ".join(described) or None


def _pass_costs(described: list[dict[str, Any]] | None) -> str:
    """Milliseconds of a pass by its number of tokens, a line for each context bucket."""
    if described is None:
        return "not measured yet; edge-run tune measures them"
    lines = []
    for entry in described:
        times = zip(entry["tokens"], entry["milliseconds"], strict=True)
        shown = ", ".join(f"{tokens}: {milliseconds:.3g}" for tokens, milliseconds in times)
        lines.append(f"{context_label(entry['up_to_context'])}: milliseconds by tokens {shown}")
    return "\n".join(lines)


def _calibration(described: Mapping[str, Any] | None) -> str:
    """Where the calibration text came from, and how many tokens it had."""
    if described is None:
        return "none"
    awq = ", AWQ scaling" if described["awq"] else ""
    return f"{described['origin']}: {described['tokens']} tokens, {described['held_out_tokens']} held out{awq}"


def _figures_text(figures: Mapping[str, float]) -> str:
    """The figures of a model's quality in words, such as `mean KL 0.0012`."""
    return ", ".join(
        # Perplexities are compared with each other, so they get digits enough to differ.
        f"{_FIGURE_NAMES.get(name, name)} {value:{'.6g' if name.endswith('perplexity') else '.4g'}}"
        for name, value in figures.items()
    )


def _parity_text(figures: Mapping[str, float]) -> str:
    """The check at export; its other figures are of random tokens, and say less than figures of a text."""
    difference = figures.get("max_abs_diff")
    return "" if difference is None else f"logits differed from the reference by at most {difference:.2g} at export"


def _formatted(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value in (None, "") else str(value)


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def _variants_text(variants: list[dict[str, Any]]) -> str:
    """A line for each variant of the graph: file, device, precision, and what is fixed about it."""
    lines = []
    for variant in variants:
        parts = [variant["device"].upper(), variant["precision"]]
        parts += [name.removesuffix("ExecutionProvider") for name in variant.get("providers", [])]
        parts += [f"{name} {variant[name]}" for name in ("width", "context") if name in variant]
        parts += ["passes of consecutive tokens only"] if variant.get("plain") else []
        lines.append(f"{variant['file']}: {', '.join(parts)}")
    return "\n".join(lines) or "none"


def _draft_text(draft: Mapping[str, Any] | None) -> str:
    if draft is None:
        return "none"
    parts = [str(draft["name"])]
    if "bytes" in draft:
        parts.append(format_bytes(draft["bytes"]))
    if "weights" in draft:
        parts.append(f"weights {_counts_text(draft['weights'])}")
    if "head_tokens" in draft:
        parts.append(f"a head of {draft['head_tokens']} tokens")
    return ", ".join(parts)


def _images_text(images: Mapping[str, Any]) -> str:
    family, tokens, tower, size = images.values()
    return f"{family}, {tokens or '?'} tokens for {_SIDE} x {_SIDE} pixels, {tower} tower of {format_bytes(size)}"


_SHOWN_IF_ANY: Final = frozenset(("state_layers", "bits_per_weight_read", "pass_costs_doubt"))
"""Facts that are shown only where they apply."""
_FORMATTERS: Final[Mapping[str, Callable[[Any], str]]] = {
    "weights": _counts_text,
    "methods": _counts_text,
    "quality": _figures_text,
    "parity": _parity_text,
    "variants": _variants_text,
    "files": lambda files: ", ".join(f"{name} {format_bytes(size)}" for name, size in files.items()),
    "images": _images_text,
    "draft": _draft_text,
    "calibration": _calibration,
    "pass_costs": _pass_costs,
    "prompts": prompt_text,
    "pass_costs_doubt": doubt_text,
    "exactness": lambda found: found["summary"] if found else "not checked yet; edge-run verify checks it",
    "reasoning_tags": lambda tags: f"{tags['opening'].strip()} ... {tags['closing']}" if tags else "",
}
"""Functions for the facts that are not printed as they are."""
