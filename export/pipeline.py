"""Exporting a model: checkpoint folder, GGUF file or ONNX model in, bundle out."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..errors import CheckpointError, InputError
from ..models.bundle import SENTENCE_POOLING
from ..models.draft_heads import HeadKind
from ..models.hub.downloaded_model import looks_like_hub_id
from ..models.json_file import read_json_object
from ..models.progress import Progress, silent
from ..runtime.embedding import Pooling
from .architectures import supported_families
from .bundle_content import BundleContent, SourceModel
from .bundle_writer import write_bundle
from .calibration.prepare import prepare, settings_of
from .calibration.work_folder import work_folder
from .checkpoint.open import open_source
from .completion import complete_bundle
from .destination import ExportResult, bundle_written_whole, require_apart
from .drafts.draft_head import DraftHead, open_draft_head
from .drafts.make_draft import require_draft
from .gguf import is_gguf
from .graph.gpu_variants import write_gpu_variants
from .optimum_path import export_by_optimum, needs_optimum
from .recipe import ExportRecipe, ExportRequest, with_methods
from .upgrade import holds_graph, upgrade_model

_SOURCES_HINT: Final = (
    "give a checkpoint folder, a .gguf file, an .onnx file or its folder, or org/name on the Hugging Face Hub"
)
_LATER_PART: Final = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
"""Matches all parts of a split GGUF model but the first."""


def find_source(source: Path) -> Path:
    """Return what to export where `source` is named: itself, or the only GGUF file in that folder.

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
    files = [path for path in sorted(source.glob("*.gguf")) if _LATER_PART.search(path.name) is None]
    if len(files) > 1:
        raise InputError(
            f"{source} holds several GGUF files: {', '.join(path.name for path in files)}", "give one of them"
        )
    return files[0] if files else source


def may_be_quantized(source: Path) -> bool:
    """Whether a source may store quantized weights, which are kept unless the user requests another format."""
    return is_gguf(source) or holds_graph(source)


def export_model(request: ExportRequest, progress: Progress = silent) -> ExportResult:
    """Export a model of any kind.

    An ONNX language model goes to `upgrade_model`, a checkpoint folder or a GGUF file to `export_checkpoint`, a
    checkpoint of another family to `export_by_optimum`.

    Raises:
        InputError: calibration, mixed weights, a draft, a report, hidden states or NPU graphs are requested, and the
            source is not a checkpoint folder that is exported directly.
        EdgeError: whatever the function for the source raises.
    """
    source = request.source
    if not request.recipe.data_free and (holds_graph(source) or needs_optimum(source) or is_gguf(source)):
        raise InputError(
            "calibration, mixed weights, drafts and reports need a checkpoint of a family that edge-run exports itself",
            f"these are {', '.join(supported_families())}",
        )
    recipe = request.recipe
    asked = {"--hidden-states": recipe.hidden_states, "--device npu": recipe.npu, "a draft head": recipe.draft_head}
    option = next((name for name, has in asked.items() if has), None)
    if option is not None and (holds_graph(source) or needs_optimum(source)):
        raise InputError(
            f"{option} needs a checkpoint of a family that edge-run exports itself",
            f"these are {', '.join(supported_families())}",
        )
    if holds_graph(source):
        return upgrade_model(request, progress)
    if needs_optimum(source):
        return export_by_optimum(request, progress)
    return export_checkpoint(request, progress)


def export_checkpoint(request: ExportRequest, progress: Progress = silent) -> ExportResult:
    """Export a Hugging Face checkpoint folder or a GGUF file to a bundle and check it against the reference decoder.

    Args:
        request: what to export, where to and how; the source is a folder with config.json, safetensors weights and
            tokenizer.json, or a .gguf file.
        progress: reports the stages, such as "writing weights" and "checking".

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or not supported.
        InputError: the destination overlaps the source or holds something other than a bundle, the context is too
            long, a method is given for a GGUF file, the text, budget or plan does not fit (see `prepare`), or the draft
            has another vocabulary.
        DestinationError: the disk refused a write.
        ExportError: the graph does not compute what the checkpoint does. After any error the destination is as before.
    """
    started = time.perf_counter()
    source, recipe = request.source, request.recipe
    if is_gguf(source):
        if recipe.method is not None:
            raise InputError("--method is not supported for a GGUF file", "leave --method out")
        recipe.require_default_scales("GGUF file")
        if recipe.draft_head is not None and recipe.draft_head.kind is HeadKind.MTP:
            raise InputError(
                "the multi-token-prediction module of a GGUF file cannot be exported",
                "leave --draft mtp out, or export the original checkpoint",
            )
    require_apart(source, request.destination)
    with open_source(source) as (config, checkpoint):
        if recipe.hidden_states and (pooling := checkpoint.folder / SENTENCE_POOLING).is_file():
            Pooling.parse(read_json_object(pooling, CheckpointError, "download the checkpoint again"), str(pooling))
        recipe.require_expressible(config)
        model = SourceModel(checkpoint, config, recipe.context_for(config))
        if recipe.npu is not None:
            recipe.npu.require_expressible(config, model.context)
        if recipe.draft is not None:
            require_draft(checkpoint.folder, recipe.draft)
        head, notes = _open_head(recipe, model)
        if recipe.data_free:
            result = _export_data_free(request, model, head, progress, started)
        else:
            with work_folder(source, settings_of(recipe, model.context), recipe.work_folder) as folder:
                # The calibrated model maps files of the work folder, so it lives only in the called function.
                result = _export_calibrated(request, model, head, folder, progress, started)
        return replace(result, notes=(*result.notes, *notes))


def _open_head(recipe: ExportRecipe, model: SourceModel) -> tuple[DraftHead | None, list[str]]:
    """Open the draft head that a recipe requests; returns notes where an optional one cannot be used."""
    if recipe.draft_head is None:
        return None, []
    try:
        return open_draft_head(recipe.draft_head, recipe, model.source.folder, model.config), []
    except CheckpointError as error:
        if not recipe.draft_head.optional:
            raise
        return None, [f"exported without a draft head: {error.what}"]


def _export_calibrated(
    request: ExportRequest,
    model: SourceModel,
    head: DraftHead | None,
    folder: Path,
    progress: Progress,
    started: float,
) -> ExportResult:
    prepared = prepare(model, request, folder, progress)
    if head is not None:
        prepared = replace(prepared, content=replace(prepared.content, features=head.features))
    with bundle_written_whole(request.destination) as staging:
        written = write_bundle(staging, prepared.content, progress)
        note = "" if head is None else head.add_to(staging, prepared.content, progress, prepared.text)
        report = complete_bundle(staging, request, prepared, written, progress, started)
        notes = write_gpu_variants(staging, progress) if request.recipe.gpu else []
        sizes = _file_sizes(staging)
    return ExportResult(
        request.destination,
        sizes,
        written.bits_per_weight,
        time.perf_counter() - started,
        written.parity,
        written.bits_per_weight_read,
        notes=(*written.notes, *filter(None, [note]), *notes),
        report=report,
    )


def _export_data_free(
    request: ExportRequest, model: SourceModel, head: DraftHead | None, progress: Progress, started: float
) -> ExportResult:
    recipe, checkpoint = request.recipe, model.source
    plan = recipe.quant_plan(model.config, checkpoint.stored_format)
    if not is_gguf(request.source):
        plan = with_methods(plan, recipe.methods)
    content = BundleContent(
        checkpoint,
        checkpoint,
        model.config,
        plan,
        model.context,
        recipe.layout,
        request.command,
        recipe.hidden_states,
        recipe.npu,
        None if head is None else head.features,
    )
    with bundle_written_whole(request.destination) as staging:
        written = write_bundle(staging, content, progress, sample_text=True)
        note = "" if head is None else head.add_to(staging, content, progress)
        notes = write_gpu_variants(staging, progress) if recipe.gpu else []
        sizes = _file_sizes(staging)
    seconds = time.perf_counter() - started
    return ExportResult(
        request.destination,
        sizes,
        written.bits_per_weight,
        seconds,
        written.parity,
        written.bits_per_weight_read,
        quality=written.quality,
        notes=(*written.notes, *filter(None, [note]), *notes),
    )


def _file_sizes(folder: Path) -> dict[str, int]:
    """Bytes by file name relative to the folder, files in subfolders included."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
