"""Writing a bundle: graph, weights, tokenizer and config files, manifest."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..models.bundle import (
    GRAPH_NAME,
    POOLING_NAME,
    SENTENCE_POOLING,
    TOKENIZER_AND_CONFIG_FILES,
    WEIGHTS_NAME,
    digest_file,
)
from ..models.manifest import MANIFEST_NAME, Architecture, FileDigest, GraphLayout, Manifest
from ..models.progress import Progress, counted, silent
from ..models.variants import GENAI_CONFIG
from .allocation.plan_costs import ByteCosts, plan_cost, weight_count
from .bundle_content import BundleContent
from .calibration.divergence import Divergence
from .check.parity import Parity, check_parity
from .check.sample_text import quality_on_sample_text
from .checkpoint.config import DecoderConfig
from .checkpoint.layout import fused_linears
from .genai.genai_layout import write_genai_layout
from .graph.decoder import build_graph
from .graph.initializers import Initializers, WeightFile
from .npu.static_graphs import NPU_WEIGHTS_NAME, write_static_graphs

PRODUCER: Final = "edge-run"


@dataclass(frozen=True)
class WrittenBundle:
    """Figures of a bundle that has just been written."""

    parity: Parity
    bits_per_weight: float
    """As in `Manifest`."""
    bits_per_weight_read: float
    """As in `Manifest`."""
    quality: Divergence | None = None
    """Quality on the sample text, if that was measured."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""


def write_bundle(
    folder: Path, content: BundleContent, progress: Progress = silent, *, sample_text: bool = False
) -> WrittenBundle:
    """Write every file of a bundle into an empty folder, and check the graph against the reference.

    Args:
        folder: an empty folder.
        content: the model.
        progress: receives the stages.
        sample_text: whether to measure the quality of quantized weights on the sample text, and record it.

    Raises:
        CheckpointError: a tensor cannot be read.
        ExportError: the graph does not compute what the checkpoint does, or this machine runs it slowly.
        OSError: the disk refused a write.
    """
    config, checkpoint = content.config, content.source
    total = sum(
        linear.weight_count for linear in fused_linears(config) if not (config.tied_head and linear.name == "head")
    )
    files: dict[str, FileDigest] = {}
    with WeightFile(folder / WEIGHTS_NAME) as data:
        weights = Initializers(checkpoint, data, counted(total, progress, "writing weights"))
        graph = build_graph(config, content.context, content.plan, weights, content.hidden_states, content.features)
        files[WEIGHTS_NAME] = data.digest()
    (folder / GRAPH_NAME).write_bytes(graph.SerializeToString())
    for name in TOKENIZER_AND_CONFIG_FILES:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, folder / name)
    if content.hidden_states and (checkpoint.folder / SENTENCE_POOLING).is_file():
        shutil.copyfile(checkpoint.folder / SENTENCE_POOLING, folder / POOLING_NAME)
    parity = check_parity(folder, content, lambda fraction: progress("checking", fraction))
    quality = None
    if sample_text and any(weight_format.bits != 32 for weight_format in content.plan.values()):
        quality = quality_on_sample_text(folder, content)
    static = None
    if content.npu is not None:
        static = write_static_graphs(folder, content, graph, content.npu, progress)
        files[NPU_WEIGHTS_NAME] = static.data
    if content.layout is GraphLayout.GENAI:
        write_genai_layout(folder, config, content.context)
    progress("checking", 1.0)
    variants = () if static is None else static.variants
    names = (
        GRAPH_NAME,
        GENAI_CONFIG,
        POOLING_NAME,
        *TOKENIZER_AND_CONFIG_FILES,
        *(variant.file for variant in variants),
    )
    files |= {name: digest_file(folder / name) for name in names if (folder / name).is_file()}
    bits = sum(weights.linear_bits.values()) / total
    bits_read = 8 * plan_cost(content.plan, ByteCosts(), config) / weight_count(config)
    manifest = Manifest(
        architecture=architecture_of(config, content.context),
        weights=content.plan,
        bits_per_weight=bits,
        files=files,
        parity=parity.as_mapping(),
        quality={} if quality is None else quality.as_mapping(),
        bits_per_weight_read=bits_read,
        producer=PRODUCER,
        command=content.command,
        layout=content.layout,
        variants=variants,
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return WrittenBundle(parity, bits, bits_read, quality, () if static is None else (static.note(),))


def architecture_of(config: DecoderConfig, context: int) -> Architecture:
    """The manifest's description of a model's architecture."""
    return Architecture(
        family=config.family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        context=context,
        tied_head=config.tied_head,
    )
