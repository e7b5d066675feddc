"""Graphs that cannot work here, told by what they are instead of by what they lack.

Each refusal names the port or operator it was recognised by and says what to do. The layouts are those met in published
models (ONNX Runtime GenAI, Optimum, transformers.js, OpenVINO, Ryzen AI).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...errors import BundleError
from ...models.onnx_file.operators import Operators
from .graph_io import GraphValue

_KNOWN_DOMAINS: Final = frozenset(
    {"", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc", "ai.onnx.preview.training"}
)
"""What ONNX Runtime brings along."""


@dataclass(frozen=True)
class _Kind:
    """Graphs that have an input of such a name."""

    pattern: re.Pattern[str]
    what: str
    """`{}` stands for the name."""
    hint: str


def _kind(pattern: str, what: str, hint: str) -> _Kind:
    return _Kind(re.compile(pattern, re.IGNORECASE), what, hint)


_KINDS: Final = (
    _kind(
        r"encoder_(hidden_states|attention_mask|outputs?)|decoder_(input_ids|attention_mask)|(.*[._])?(en|de)coder[._](key|value)"
        r"|past_(key|value)_(self|cross)_\d+",
        "is part of an encoder-decoder model (it takes {})",
        "edge-run runs decoder-only language models",
    ),
    _kind(
        r"pixel_values.*|image_(features|grid_thw|sizes|attention_mask)|(audio|input)_features|audio_(embeds|attention_mask)",
        "is part of a model of images or sound (it takes {})",
        "choose a text-only model",
    ),
    _kind(
        r"inputs_embeds",
        "takes embeddings ({}) instead of token ids: it is one part of a model that was cut up",
        "choose an export whose decoder takes input_ids",
    ),
    _kind(
        r"block_tables?|slot_mappings?|block_indices|cumulative_sequence_lengths?|cu_seqlens?.*|past_sequence_lengths",
        "keeps its cache in pages (it takes {}), as servers do",
        "export it again without paged attention",
    ),
    _kind(
        r".*(conv|ssm|recurrent|rwkv|mamba).*|cache_params\b.*|(.*[._])?state[._]?\d*",
        "keeps convolution or recurrent state ({}), which cannot be rewound",
        "choose a model whose layers are all attention",
    ),
    _kind(
        r"beam_idx",
        "keeps its cache inside (it takes {}), where it cannot be rewound",
        "choose an export whose cache is inputs and outputs (past_key_values.N.key)",
    ),
    _kind(
        r".*[._](key|value|k|v)_scales?",
        "keeps a scale for every cached row ({})",
        "choose a variant of the model whose cache is not quantized row by row",
    ),
    _kind(
        r"hidden_states",
        "goes on from another model's hidden states (it takes {}): it is a drafting head",
        "give the model it belongs to",
    ),
    _kind(r"token_type_ids", "is an encoder (it takes {}), not a language model", "choose a decoder"),
    _kind(
        r"max_length|num_beams|num_return_sequences",
        "holds a whole generation loop (it takes {})",
        "choose the plain decoder, exported with its cache as inputs and outputs",
    ),
)


def refuse_operators(operators: Operators, where: str) -> None:
    """Refuse a model by its operators, before it is loaded.

    Raises:
        BundleError: it is a program for one device, keeps its cache in pages, or needs a library of operators.
    """
    if "EPContext" in operators:
        raise BundleError(
            f"{where} was compiled for one kind of device (it has EPContext operators)",
            "choose a variant of the model for the CPU",
        )
    if "PagedAttention" in operators:
        raise BundleError(
            f"{where} keeps its cache in pages (it has PagedAttention operators), as servers do",
            "export it again without paged attention",
        )
    foreign = sorted(
        f"{domain}.{name}"
        for domain, name in operators.used
        if domain not in _KNOWN_DOMAINS and domain not in operators.own_domains
    )
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise BundleError(
            f"{where} needs a library of operators that edge-run does not have ({foreign[0]}{more})",
            "choose a variant of the model for the CPU",
        )


def refuse_ports(inputs: Sequence[GraphValue], where: str) -> None:
    """Refuse a model by the names of its inputs.

    Raises:
        BundleError: it belongs to a kind of model that edge-run does not run.
    """
    for kind in _KINDS:
        for port in inputs:
            if kind.pattern.fullmatch(port.name):
                raise BundleError(f"{where} {kind.what.format(port.name)}", kind.hint)
