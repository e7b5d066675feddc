"""Writing a bundle: graph, weights, tokenizer and config files, manifest."""

from __future__ import annotations

import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Final

from onnx import ModelProto

from ..models.bundle import GRAPH_NAME, POOLING_NAME, SENTENCE_POOLING, TOKENIZER_AND_CONFIG_FILES, WEIGHTS_NAME, Bundle
from ..models.manifest import Architecture, GraphLayout, Manifest, VariantFile
from ..models.progress import Progress, counted, silent
from ..models.variants import GENAI_CONFIG
from .allocation.plan_costs import BYTES_READ, plan_cost, weight_count
from .bundle_content import BundleContent, write_manifest
from .calibration.divergence import Divergence
from .check.parity import check_parity, quality_on_sample_text
from .checkpoint.config import DecoderConfig
from .checkpoint.layout import fused_linears
from .checkpoint.vision_config import read_vision
from .graph.decoder import build_graph
from .graph.genai_layout import write_genai_layout
from .graph.initializers import Initializers, WeightFile
from .graph.vision_graph import write_vision
from .npu.static_decoder import NPU_WEIGHTS_NAME, write_static_graphs

PRODUCER: Final = "edge-run"


def write_bundle(
    folder: Path, content: BundleContent, progress: Progress = silent, *, sample_text: bool = False
) -> tuple[Manifest, Divergence | None, list[str]]:
    """Write every file of a bundle into an empty folder, and check the graph against the reference.

    Args:
        folder: an empty folder.
        content: the model.
        progress: receives the stages.
        sample_text: whether to measure the quality of quantized weights on the sample text, and record it.

    Returns:
        The manifest, the quality on the sample text if that was measured, and messages for the user.

    Raises:
        CheckpointError: a tensor cannot be read.
        ExportError: the graph does not compute what the checkpoint does, or this machine runs it slowly.
        OSError: the disk refused a write.
    """
    graph, manifest = write_graph(folder, content, progress)
    source = content.source.folder
    Bundle(source, source / GRAPH_NAME, None).copy_config_files(folder)
    if content.hidden_states and (source / SENTENCE_POOLING).is_file():
        shutil.copyfile(source / SENTENCE_POOLING, folder / POOLING_NAME)
    parity = check_parity(folder, content, lambda fraction: progress("checking", fraction))
    quality = None
    if sample_text and any(weight_format.bits != 32 for weight_format in content.plan.values()):
        quality = quality_on_sample_text(folder, content)
    files = dict(manifest.files)
    if content.vision is not None and (vision := read_vision(content.original, content.config)) is not None:
        files |= write_vision(folder, vision, content.config, content.vision)
    variants: tuple[VariantFile, ...] = ()
    notes: list[str] = []
    if content.static_shapes:
        variants, files[NPU_WEIGHTS_NAME], note = write_static_graphs(folder, content, graph, progress)
        notes.append(note)
    if content.layout is GraphLayout.GENAI:
        write_genai_layout(folder, content.config, content.context)
    progress("checking", 1.0)
    names = (GRAPH_NAME, GENAI_CONFIG, POOLING_NAME, *TOKENIZER_AND_CONFIG_FILES, *(each.file for each in variants))
    measured = {} if quality is None else quality.as_mapping()
    manifest = replace(manifest, files=files, parity=asdict(parity), quality=measured, variants=variants)
    return write_manifest(folder, manifest, names), quality, notes


def write_graph(folder: Path, content: BundleContent, progress: Progress = silent) -> tuple[ModelProto, Manifest]:
    """Write graph and weights into a folder; returns the graph, and what a manifest says about both.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the disk refused a write.
    """
    config, plan, linears = content.config, content.plan, fused_linears(content.config)
    total = sum(each.weight_count for each in linears if not (config.tied_head and each.name == "head"))
    with WeightFile(folder / WEIGHTS_NAME) as data:
        weights = Initializers(content.source, data, counted(total, progress, "writing weights"))
        graph = build_graph(config, content.context, plan, weights, content.hidden_states, content.features)
        digest = data.digest()
    (folder / GRAPH_NAME).write_bytes(graph.SerializeToString())
    return graph, Manifest(
        architecture=architecture_of(config, content.context),
        weights=plan,
        bits_per_weight=sum(weights.linear_bits.values()) / total,
        files={WEIGHTS_NAME: digest},
        bits_per_weight_read=8 * plan_cost(plan, BYTES_READ, config) / weight_count(config),
        producer=PRODUCER,
        command=content.command,
        layout=content.layout,
    )


def architecture_of(config: DecoderConfig, context: int) -> Architecture:
    """The manifest's description of a model's architecture."""
    names = (field.name for field in fields(Architecture) if field.name != "context")
    return Architecture(**{name: getattr(config, name) for name in names}, context=context)
