"""Exporting a model: checkpoint folder, GGUF file or ONNX model in, bundle out."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..errors import CheckpointError, InputError
from ..models.bundle import SENTENCE_POOLING
from ..models.hub.downloaded_model import looks_like_hub_id
from ..models.json_file import read_json_object
from ..models.manifest import GraphLayout, HeadKind
from ..models.progress import Progress, silent
from ..runtime.embedding import pooling_mode
from .architectures import supported_families
from .architectures.state_layers import ConvolutionConfig
from .bundle_content import BundleContent
from .bundle_writer import write_bundle
from .calibration.prepare import prepare, settings_of
from .calibration.smooth_quant import smoothed_linears
from .calibration.work_folder import work_folder
from .check.parity import Parity
from .checkpoint.config import DecoderConfig
from .checkpoint.open import open_source
from .completion import complete_bundle, integer_graphs_note
from .destination import ExportResult, bundle_written_whole, require_apart
from .drafts.draft_head import Head, add_draft_head, open_draft_head, read_head_kind
from .drafts.feature_heads import has_mtp_module
from .drafts.make_draft import DraftRequest, require_draft
from .gguf.gguf_model import is_gguf
from .graph.gpu_variants import write_gpu_variants
from .npu.static_shapes import require_block_width
from .optimum_path import export_by_optimum, needs_optimum
from .quantization.methods import with_methods
from .quantization.option_values import DeviceChoice, WeightChoice
from .recipe import DEFAULT_BLOCK, NO_DRAFT, OWN_MODULE, ExportRecipe
from .upgrade.describe import holds_graph
from .upgrade.pipeline import upgrade_model

_SOURCES_HINT: Final = (
    "give a checkpoint folder, a .gguf file, an .onnx file or its folder, or org/name on the Hugging Face Hub"
)
_OTHER_FILE: Final = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$|(?i:mmproj)")
"""Matches all parts of a split GGUF model but the first, and vision towers beside models."""


def find_source(source: Path) -> Path:
    """Return what to export where `source` is named: itself, or the only GGUF model in that folder.

    Raises:
        InputError: the path does not exist, is not a model, or holds several GGUF files.
    """
    if not source.exists() and not holds_graph(source):
        hint = _SOURCES_HINT
        if looks_like_hub_id(f"org/{source.as_posix()}"):
            hint = f"a model on the Hugging Face Hub has an organization before its name, org/{source}; else {hint}"
        raise InputError(f"{source} does not exist", hint)
    if source.is_file() and not (is_gguf(source) or holds_graph(source)):
        raise InputError(f"{source} is not a model", _SOURCES_HINT)
    if not source.is_dir() or (source / "config.json").is_file() or holds_graph(source):
        return source
    files = [path for path in sorted(source.glob("*.gguf")) if _OTHER_FILE.search(path.name) is None]
    if len(files) > 1:
        raise InputError(
            f"{source} holds several GGUF files: {', '.join(path.name for path in files)}", "give one of them"
        )
    return files[0] if files else source


def may_be_quantized(source: Path) -> bool:
    """Whether a source may store quantized weights, which are kept unless the user requests another format."""
    return is_gguf(source) or holds_graph(source)


def requested_draft(recipe: ExportRecipe, target: Path) -> DraftRequest | None:
    """The draft that a recipe asks for, or the target's own module where it names none; None for no draft.

    Raises:
        InputError: there is no such checkpoint, or options have no effect on the draft.
        CheckpointError: the config.json of the draft's checkpoint is damaged.
    """
    is_native = recipe.layout is GraphLayout.EDGE and recipe.device is None
    if recipe.draft is None:
        if is_native and has_mtp_module(target):
            return DraftRequest(None, HeadKind.MTP, optional=recipe.draft_vocab is None)
        for option, value in (("--draft-vocab", recipe.draft_vocab), ("--draft-weights", recipe.draft_weights)):
            if value is not None:
                raise InputError(f"{option} has no effect without a draft", "add --draft SRC")
    if recipe.draft is None or recipe.draft == NO_DRAFT:
        return None
    source = Path(recipe.draft)
    kind = HeadKind.MTP if recipe.draft == OWN_MODULE else read_head_kind(source)
    if kind is None:
        return DraftRequest(find_source(source))
    if kind is not HeadKind.MTP and recipe.draft_vocab is not None:
        raise InputError(
            f"--draft-vocab has no effect on the draft head {source}, whose size is that of its checkpoint",
            "leave it out",
        )
    if not is_native:
        raise InputError(
            "a draft head needs edge-run's own layout, on the CPU", "leave --layout and --device out, or the head"
        )
    return DraftRequest(None if kind is HeadKind.MTP else source, kind)


def export_model(
    source: Path, destination: Path, recipe: ExportRecipe, progress: Progress = silent, *, command: str = ""
) -> ExportResult:
    """Export a model of any kind.

    An ONNX language model goes to `upgrade_model`, a checkpoint folder or a GGUF file to `export_checkpoint`, a
    checkpoint of another family to `export_by_optimum`.

    Args:
        source: a checkpoint folder, a .gguf file (the first part of a split model), an .onnx file or a folder that
            holds one.
        destination: the bundle's folder; an earlier bundle there is replaced at the end, all at once.
        recipe: the choices of the export.
        progress: reports the stages, such as "writing weights" and "checking".
        command: the command line, recorded in the manifest.

    Raises:
        InputError: calibration, mixed weights, a draft, a report, hidden states or NPU graphs are requested, and the
            source is not a checkpoint folder that is exported directly.
        EdgeError: whatever the function for the source raises.
    """
    draft, foreign = requested_draft(recipe, source), holds_graph(source) or needs_optimum(source)
    asked = {
        "calibration, mixed weights, drafts and reports": (foreign or is_gguf(source)) and _needs_text(recipe, draft),
        "--hidden-states": foreign and recipe.hidden_states,
        "--device npu": foreign and recipe.device == DeviceChoice.NPU,
        "a draft head": foreign and draft is not None,
    }
    for choice in (name for name, is_asked in asked.items() if is_asked):
        raise InputError(
            f"{choice} need{'' if ',' in choice else 's'} a checkpoint of a family that edge-run exports itself",
            f"these are {', '.join(supported_families())}",
        )
    if may_be_quantized(source) and recipe.weights is recipe.head is None and recipe.block not in (None, DEFAULT_BLOCK):
        raise InputError(
            f"--block {recipe.block} has no effect without --weights or --head", "add --weights int8, int4 or int2"
        )
    if recipe.work is not None and not _needs_text(recipe, draft):
        raise InputError("--work has no effect on an export that reads no text", "leave it out")
    if holds_graph(source):
        return upgrade_model(source, destination, recipe, progress, command=command)
    if foreign:
        return export_by_optimum(source, destination, recipe, progress, command)
    return export_checkpoint(source, destination, recipe, progress, command=command)


def export_checkpoint(
    source: Path, destination: Path, recipe: ExportRecipe, progress: Progress = silent, *, command: str = ""
) -> ExportResult:
    """Export a Hugging Face checkpoint folder or a GGUF file to a bundle and check it against the reference decoder.

    Args:
        source: a folder with config.json, safetensors weights and tokenizer.json, or a .gguf file.
        destination: as for `export_model`, like the other arguments.
        recipe: the choices of the export.
        progress: reports the stages.
        command: the command line.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or not supported.
        InputError: the destination overlaps the source or holds something other than a bundle, the context is too
            long, a method is given for a GGUF file, the text, budget or plan does not fit (see `prepare`), or the draft
            has another vocabulary.
        DestinationError: the disk refused a write.
        ExportError: the graph does not compute what the checkpoint does. After any error the destination is as before.
    """
    started = time.perf_counter()
    draft = requested_draft(recipe, source)
    if is_gguf(source):
        _check_gguf(recipe, draft)
    elif recipe.weights is None and not recipe.mixed:
        recipe = replace(recipe, weights=WeightChoice.INT4)
    require_apart(source, destination)
    with open_source(source) as (config, checkpoint):
        require_expressible(recipe, draft, config)
        if recipe.hidden_states:
            _check_pooling(checkpoint.folder / SENTENCE_POOLING)
        context, plan = recipe.context_for(config), recipe.quant_plan(config, checkpoint.stored_format)
        content = BundleContent(
            source=checkpoint,
            original=checkpoint,
            config=config,
            plan=plan if is_gguf(source) else with_methods(plan, recipe.methods),
            context=context,
            layout=recipe.layout,
            command=command,
            hidden_states=recipe.hidden_states,
            static_shapes=recipe.static_shapes(context),
            vision=recipe.vision_format,
        )
        head, notes = None, list[str]()
        separate = draft.source if draft is not None and draft.kind is None else None
        if separate is not None:
            require_draft(checkpoint.folder, separate)
        elif draft is not None:
            try:
                head = open_draft_head(draft, recipe, checkpoint.folder, config)
                content = replace(content, features=head.features)
            except CheckpointError as error:
                if not draft.optional:
                    raise
                notes.append(f"exported without a draft head: {error.what}")
        reads_text = _needs_text(recipe, draft)
        with work_folder(source, settings_of(recipe, context), recipe.work) if reads_text else nullcontext() as folder:
            # The calibrated model maps files of the work folder, so it lives only in the called function.
            result = _write(destination, recipe, content, separate, head, folder, progress, started)
        return replace(result, notes=(*result.notes, *notes))


def _check_pooling(settings: Path) -> None:
    """Refuse another pooling of hidden states than the two that are known."""
    if settings.is_file():
        pooling_mode(read_json_object(settings, CheckpointError, "download the checkpoint again"), str(settings))


def _check_gguf(recipe: ExportRecipe, draft: DraftRequest | None) -> None:
    if recipe.method is not None:
        raise InputError("--method is not supported for a GGUF file", "leave --method out")
    recipe.require_default_scales("GGUF file")
    if draft is not None and draft.kind is HeadKind.MTP:
        raise InputError(
            "the multi-token-prediction module of a GGUF file cannot be exported",
            "leave --draft mtp out, or export the original checkpoint",
        )


def _needs_text(recipe: ExportRecipe, draft: DraftRequest | None) -> bool:
    """Whether the export reads text: to calibrate, to report, or to rank the tokens of a draft."""
    drafts = draft is not None and (draft.kind is None or recipe.draft_tokens not in (None, "all"))
    return recipe.calibrated or recipe.report or recipe.eval is not None or drafts


def require_expressible(recipe: ExportRecipe, draft: DraftRequest | None, config: DecoderConfig) -> None:
    """Refuse choices that a model with experts, or with layers of different kinds, cannot have.

    Raises:
        InputError: the recipe has one of them, and the model such layers.
    """
    if config.experts is not None and recipe.device == DeviceChoice.NPU:
        raise InputError(
            f"--device npu does not support {config.family} models, which have mixtures of experts",
            "leave --device npu out",
        )
    of_blocks = False
    if keeps_states := config.state_layers is not None:
        has = "convolution" if isinstance(config.state_layers, ConvolutionConfig) else "linear attention"
        has += " layers"
    elif config.blocks is not None:
        has = "blocks of masked tokens"
        if of_blocks := recipe.device == DeviceChoice.NPU and not config.blocks.bidirectional:
            require_block_width(recipe.widths, config.blocks.size)
    elif not config.uniform:
        has = "layers that differ in their heads, caches or inputs"
    else:
        return
    asked = {
        "calibration (--calibration, --seed, --preset, --method gptq or awq, --weights mixed)": recipe.calibrated
        and not keeps_states,
        "--draft": draft is not None and draft.kind is None and not keeps_states,
        "--report": recipe.report and not keeps_states,
        "--eval": recipe.eval is not None and not keeps_states,
        "--layout genai": recipe.layout is not GraphLayout.EDGE,
        "--device npu": recipe.device == DeviceChoice.NPU and not of_blocks,
        "--device gpu": recipe.device == DeviceChoice.GPU and (keeps_states or config.blocks is not None),
    }
    for choice in (name for name, is_asked in asked.items() if is_asked):
        raise InputError(f"{choice}: not supported for {config.family} models, which have {has}", "leave it out")


def _write(
    destination: Path,
    recipe: ExportRecipe,
    content: BundleContent,
    draft: Path | None,
    head: Head | None,
    folder: Path | None,
    progress: Progress,
    started: float,
) -> ExportResult:
    """Write the bundle; `folder` keeps intermediate results of an export that reads text, and is None for others."""
    prepared = None if folder is None else prepare(content, recipe, folder, progress)
    if prepared is not None:
        integers = None
        if recipe.activations is not None:
            bits = int(recipe.activations.removeprefix("int"))
            integers = smoothed_linears(content, prepared.text, prepared.statistics.of, bits, progress)
        content = replace(content, source=prepared.source, plan=prepared.plan, integer_linears=integers)
    with bundle_written_whole(destination) as staging:
        manifest, quality, notes = write_bundle(
            staging, content, progress, sample_text=prepared is None and content.config.blocks is None
        )
        report = None
        if head is not None:
            text = None if prepared is None else prepared.text
            notes.append(add_draft_head(head, recipe, staging, content, progress, text))
        if prepared is not None:
            if content.integer_linears is not None:
                notes.append(integer_graphs_note(staging, content, prepared))
            report = complete_bundle(staging, recipe, content, prepared, draft, manifest, progress, started)
        if recipe.device == DeviceChoice.GPU:
            notes += write_gpu_variants(staging, progress)
        files = (file for file in sorted(staging.rglob("*")) if file.is_file())
        sizes = {file.relative_to(staging).as_posix(): file.stat().st_size for file in files}
    return ExportResult(
        destination,
        sizes,
        manifest.bits_per_weight,
        time.perf_counter() - started,
        Parity(**manifest.parity),
        manifest.bits_per_weight_read,
        quality=quality,
        notes=tuple(filter(None, notes)),
        report=report,
    )
