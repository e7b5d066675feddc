"""What the files beside a graph say about it, and graphs that cannot work here.

Graphs are rejected by their operators and input names. Each error names the input or operator by which the graph was
recognised and says what to do. The kinds are those met in published models (ONNX Runtime GenAI, Optimum,
transformers.js, OpenVINO, Ryzen AI).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ...errors import BundleError
from ...models.bundle import Bundle
from ...models.manifest import BlockDiffusion
from ...models.onnx_file.wire import Operators, operators_of
from .graph_io import GraphValue
from .probe import ProbeResult

_KNOWN_DOMAINS: Final = frozenset(
    {"", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc", "ai.onnx.preview.training"}
)
"""Operator domains that are part of ONNX Runtime."""


@dataclass(frozen=True)
class ModelMetadata:
    """Metadata used where the graph's own inputs and outputs leave something open."""

    first_pass_graph: Path | None = None
    """The graph for passes without cached tokens, if that is a separate one."""
    input_vocab: int | None = None
    """Number of token embeddings."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json; only its text section if there are several."""
    genai: Mapping[str, Any] = field(default_factory=dict)
    """The `model` section of genai_config.json."""
    operators: Operators | None = None
    """Operators of the graph; None for graphs that edge-run exported."""
    blocks: BlockDiffusion | None = None
    """How blocks of masked tokens are filled, where edge-run exported the graph of a model that does so."""
    draft_head: bool = False
    """Whether the graph is a draft head, which is of no use without its target."""
    probe_result: ProbeResult | None = None
    """Result of an earlier probe of the graph."""


def metadata_of(bundle: Bundle) -> ModelMetadata:
    """Collect the metadata of a model from its files.

    Raises:
        BundleError: one of them cannot be read.
    """
    if bundle.manifest is not None:
        return ModelMetadata(input_vocab=bundle.input_vocab, blocks=bundle.manifest.architecture.blocks)
    operators = operators_of(*filter(None, (bundle.graph, bundle.embedding)))
    return ModelMetadata(bundle.first, bundle.input_vocab, bundle.config, bundle.genai, operators)


_UNSUPPORTED_KINDS: Final = (
    (
        r"encoder_(hidden_states|attention_mask|outputs?)|decoder_(input_ids|attention_mask)|(.*[._])?(en|de)coder[._](key|value)"
        r"|past_(key|value)_(self|cross)_\d+",
        "is part of an encoder-decoder model (it takes {})",
        "edge-run runs decoder-only language models",
    ),
    (
        r"pixel_values.*|image_(features|grid_thw|sizes|attention_mask)|(audio|input)_features|audio_(embeds|attention_mask)",
        "is part of a model for images or audio (it takes {})",
        "choose a text-only model",
    ),
    (
        r"inputs_embeds",
        "takes embeddings ({}) instead of token ids: it is one part of a model that was split up",
        "choose an export whose decoder takes input_ids",
    ),
    (
        r"block_tables?|slot_mappings?|block_indices|cumulative_sequence_lengths?|cu_seqlens?.*|past_sequence_lengths",
        "keeps its cache in pages (it takes {}), as servers do",
        "export it again without paged attention",
    ),
    (
        r"beam_idx",
        "keeps its cache inside (it takes {}), where it cannot be rewound",
        "choose an export whose cache is inputs and outputs (past_key_values.N.key)",
    ),
    (
        r".*[._](key|value|k|v)_scales?",
        "keeps a scale for every cached token ({})",
        "choose a variant of the model whose cache is not quantized token by token",
    ),
    (
        r"hidden_states|draft_features",
        "continues from another model's hidden states (it takes {}): it is a draft head",
        "give the model it belongs to",
    ),
    (r"token_type_ids", "is an encoder (it takes {}), not a language model", "open it with edgerun.load_encoder"),
    (
        r"max_length|num_beams|num_return_sequences",
        "contains a whole generation loop (it takes {})",
        "choose the decoder alone, exported with its cache as inputs and outputs",
    ),
)
"""Kinds of graphs that the name of an input shows: its pattern, the reason ({} stands for the name), and a hint."""


def reject_operators(operators: Operators, where: str) -> None:
    """Reject an unsupported graph by its operators, before it is loaded.

    Raises:
        BundleError: it is compiled for one device, keeps its cache in pages, or needs a custom operator library.
    """
    for_cpu = "choose a variant of the model for the CPU"
    if "EPContext" in operators:
        raise BundleError(f"{where} was compiled for one kind of device (it has EPContext operators)", for_cpu)
    if "PagedAttention" in operators:
        what = f"{where} keeps its cache in pages (it has PagedAttention operators), as servers do"
        raise BundleError(what, "export it again without paged attention")
    custom = sorted(
        f"{domain}.{name}"
        for domain, name in operators.used
        if domain not in _KNOWN_DOMAINS and domain not in operators.own_domains
    )
    if custom:
        more = f" and {len(custom) - 1} more" if len(custom) > 1 else ""
        what = f"{where} needs a custom operator library that edge-run does not have ({custom[0]}{more})"
        raise BundleError(what, for_cpu)


def reject_inputs(inputs: Sequence[GraphValue], where: str) -> None:
    """Reject an unsupported graph by the names of its inputs.

    Raises:
        BundleError: it belongs to a kind of model that edge-run does not run.
    """
    for pattern, reason, hint in _UNSUPPORTED_KINDS:
        for value in inputs:
            if re.fullmatch(pattern, value.name, re.IGNORECASE):
                raise BundleError(f"{where} {reason.format(value.name)}", hint)
