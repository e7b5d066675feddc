"""`edge.json`, the manifest of a bundle."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Final

from ..errors import BundleError
from .json_file import Bound, Count, WholeNumber, is_whole, parse_json_object, shown, typed_record

MANIFEST_NAME: Final = "edge.json"
BUNDLE_FORMAT: Final = 1
"""Version of the folder layout and of this file."""
GRAPH_CONTRACT: Final = 1
"""Version of the graph's inputs and outputs (docs/graph-contract.md)."""
MIN_CONTEXT: Final = 2
"""Smallest context a model can have: one position of a prompt and one of its answer."""
VARIANT_CONTRACT: Final = 1
"""Version of the inputs and outputs of variants, and of what is known about them here (docs/graph-contract.md)."""
_FILE_NAME: Final = re.compile(r"model_(gpu|npu)[a-z0-9_]*\.onnx(\.data)?")


class GraphLayout(StrEnum):
    """Convention that the inputs and outputs of an exported graph follow."""

    EDGE = "edge"
    """edge-run's own (docs/graph-contract.md): token trees, and logits of selected positions only."""
    GENAI = "genai"
    """ONNX Runtime GenAI's, with its genai_config.json."""


@dataclass(frozen=True)
class BlockDiffusion:
    """How a model that fills blocks of masked tokens is decoded."""

    size: Count
    """Number of tokens of a block. Within a block all tokens attend to each other."""
    mask: WholeNumber
    """Token id that stands for a token that is not known yet."""
    shifted: bool = False
    """Whether the logits of a token are computed at the place before it, as in models for one token at a time."""
    bidirectional: bool = False
    """Whether all tokens of a text attend to each other, those behind a block too. Then a block may have any size, and
    `size` is the usual one."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer, as the exported graph has them."""

    family: str
    """Hugging Face `model_type`, such as llama, qwen2 or qwen3."""
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    context: Annotated[int, Bound(least=MIN_CONTEXT)]
    """Number of positions that the graph's rotary table covers."""
    tied_head: bool
    """Whether the LM head shares the weights of the embedding."""
    blocks: BlockDiffusion | None = None
    """None for a model that generates token by token."""


class Method(StrEnum):
    """Method by which the codes and scales of quantized weights are chosen."""

    RTN = "rtn"
    """Round to nearest: the scale follows from the largest weight of a block."""
    K_QUANT = "k-quant"
    """The scale is found by weighted least squares."""
    GPTQ = "gptq"
    """Codes are chosen column by column, each compensating the errors of the columns before it."""


@dataclass(frozen=True)
class WeightFormat:
    """Storage format of a linear: float32, or 2, 4 or 8 bits in blocks along the input dimension."""

    bits: Count
    block: WholeNumber = 0
    offsets: bool = False
    """Whether each block has an offset beside its scale, as quantization formats with minima have."""
    zero_points: bool = False
    """Whether each block has a zero point; if not, the middle code stands for 0."""
    half_scales: bool = False
    """Whether scales are stored in float16. The graph converts them to float32 once, when it is loaded."""
    method: Method | None = field(default=None, compare=False)
    """Method by which codes and scales were chosen; not part of the storage format. None for float weights and for
    codes that came with the model (in older bundles also for rounding to nearest)."""

    def __str__(self) -> str:
        if self.bits == 32:
            return "fp32"
        marks = {"+offsets": self.offsets, "+zero-points": self.zero_points, "+half-scales": self.half_scales}
        return f"int{self.bits}/{self.block}" + "".join(mark for mark, has in marks.items() if has)


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 (hexadecimal) of one file of the bundle."""

    bytes: WholeNumber
    sha256: str


@dataclass(frozen=True)
class Calibration:
    """The text with which weights were quantized and their formats chosen."""

    origin: str
    """Origin of the text for a reader: the name of a file, or that it was sampled from the model."""
    tokens: WholeNumber
    """Number of tokens that statistics and choices are based on."""
    held_out_tokens: WholeNumber
    """Number of other tokens, on which `Manifest.quality` was measured."""
    awq: bool = False
    """Whether AWQ scaling was applied."""


class HeadKind(StrEnum):
    """Kind of a draft head."""

    EAGLE = "eagle"
    """EAGLE-3: one layer that continues from its own output."""
    MEDUSA = "medusa"
    """One block for each of the next tokens."""
    MTP = "mtp"
    """The multi-token-prediction module of the target's own checkpoint: one layer that continues from its own output,
    with the target's embedding and LM head."""


@dataclass(frozen=True)
class DraftPairing:
    """The draft of a model."""

    path: str
    """Path of the draft's folder relative to this bundle's folder, with forward slashes."""
    d2t: str = ""
    """File in that folder with the target's token ids of the draft's logits; empty if the ids are the same."""
    d2t_offsets: bool = False
    """Whether that file holds differences to the draft's own ids, as in EAGLE-3, instead of the target's ids."""
    graph: str = ""
    """File of a draft head; `path` is then this folder. Empty if the draft is a model of its own."""
    head: HeadKind | None = None
    """Kind of a draft head, whose graph in this folder reads the hidden states of this model; None for other drafts."""


class DeviceKind(Enum):
    """The device that an execution provider computes on."""

    CPU = "cpu"
    GPU = "gpu"
    NPU = "npu"


class Precision(StrEnum):
    """Element type of a graph's activations and cache."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"


@dataclass(frozen=True)
class VariantFile:
    """A variant of the model's graph that lies beside it in the bundle."""

    device: DeviceKind
    file: str
    """Name of the .onnx file in the bundle's folder; its weights are in model.onnx.data as far as they agree."""
    precision: Precision
    width: Count | None = None
    """Number of new tokens of a pass, where shapes are static."""
    context: Count | None = None
    """Number of cache slots before the new tokens, where shapes are static."""
    providers: tuple[str, ...] = ()
    """Execution providers that it was written for; empty for all of the device's kind."""
    plain: bool = False
    """Whether it has no attention bias, and so serves passes of consecutive tokens only."""
    contract: Count = VARIANT_CONTRACT


@dataclass(frozen=True)
class Manifest:
    """The contents of `edge.json`."""

    architecture: Architecture
    weights: Mapping[str, WeightFormat]
    """Format by name of the fused linear: `layers.0.qkv`, `layers.0.o`, `layers.0.gate_up`, `layers.0.down`,
    `embedding`, `head`."""
    bits_per_weight: float
    """Bits in the file, scales included, divided by the number of weights of all linears."""
    files: Mapping[str, FileDigest]
    """Digest by file name, for every file of the bundle except this one."""
    parity: Mapping[str, float] = field(default_factory=dict)
    """Comparison of the graph with the reference decoder at export, on random tokens: `max_abs_diff`, `mean_kl`,
    `top1_agreement`."""
    producer: str = ""
    command: str = ""
    calibration: Calibration | None = None
    quality: Mapping[str, float] = field(default_factory=dict)
    """Comparison of the quantized model with the float32 model on held-out calibration text, or on a short sample text
    where nothing was calibrated: `mean_kl`, `p99_kl`, `top1_agreement`, `perplexity`, `float_perplexity`; empty where
    nothing was quantized, and for upgraded ONNX models."""
    bits_per_weight_read: float | None = None
    """Bits that a pass over one token reads, divided by the same number; budgets count these. None in older bundles and
    for upgraded ONNX models."""
    draft: DraftPairing | None = None
    variants: tuple[VariantFile, ...] = ()
    """Variants of the graph for other devices. Those of devices, precisions or contracts that this program does not
    know are left out: the others run without them."""
    layout: GraphLayout = GraphLayout.EDGE
    format: Count = BUNDLE_FORMAT
    contract: Count = GRAPH_CONTRACT

    def to_json(self) -> str:
        """Return the text of `edge.json`."""
        data = asdict(self)
        if self.draft is not None:
            data["draft"] = {name: value for name, value in data["draft"].items() if value}
        for variant in data["variants"]:
            variant["device"] = variant["device"].value
        # What has its default is left out.
        data["variants"] = [
            {name: value for name, value in variant.items() if value not in (None, (), False)}
            for variant in data["variants"]
        ]
        optional = ("calibration", "quality", "bits_per_weight_read", "draft", "variants")
        of_format = ("offsets", "zero_points", "half_scales", "method")
        for section, names in ((data, optional), *((each, of_format) for each in data["weights"].values())):
            for name in names:
                if not section[name]:
                    del section[name]
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = MANIFEST_NAME) -> Manifest:
        """Read the text of `edge.json`; unknown fields are ignored.

        Raises:
            BundleError: it is not JSON, a field is missing or has the wrong type, or the format is newer than this
                program.
        """
        try:
            data = parse_json_object(text)
            known = {"format": BUNDLE_FORMAT, "contract": GRAPH_CONTRACT}
            if newer := [name for name, version in known.items() if is_whole(data.get(name), version + 1)]:
                what = f"{where} has {newer[0]} {shown(data[newer[0]])}; this edge-run reads {known[newer[0]]}"
                raise BundleError(what, "upgrade edge-run")
            if isinstance(variants := data.get("variants"), list):
                data["variants"] = [each for each in variants if not isinstance(each, dict) or _is_known(each)]
            manifest = typed_record(cls, data)
            _check(manifest)
        except ValueError as error:
            raise BundleError(f"{where} cannot be read: it {error}", "export the model again") from error
        return manifest


def is_variant_file(name: str) -> bool:
    """Whether a file in a bundle is named like a variant's graph or its data."""
    return _FILE_NAME.fullmatch(name) is not None


def _is_known(variant: dict[str, Any]) -> bool:
    """Whether this program knows a variant's device, precision and contract, or these are wrong."""
    known: Mapping[str, list[str]] = {
        "device": [each.value for each in DeviceKind],
        "precision": list(Precision),
    }
    return not is_whole(variant.get("contract"), VARIANT_CONTRACT + 1) and all(
        not isinstance(variant.get(name), str) or variant[name] in values for name, values in known.items()
    )


def _check(manifest: Manifest) -> None:
    """Check what the types of the fields do not tell; the message of a ValueError continues "it ..."."""
    if "head" not in manifest.weights:
        raise ValueError("lacks weights.head")
    for index, variant in enumerate(manifest.variants):
        if variant.file not in manifest.files:
            raise ValueError(f"has variants.{index}.file {shown(variant.file)}, which files lacks")
    if (draft := manifest.draft) is None:
        return
    path, d2t, graph = draft.path, draft.d2t, draft.graph
    if not path or PurePosixPath(path).is_absolute() or PureWindowsPath(path).drive or "\\" in path:
        raise ValueError(f"has draft.path {shown(path)}, which must be a path from the bundle's folder")
    if d2t and PureWindowsPath(d2t).name != d2t:
        raise ValueError(f"has draft.d2t {shown(d2t)}, which must be the name of a file")
    if graph and (PureWindowsPath(graph).name != graph or path != "."):
        raise ValueError(f"has draft.graph {shown(graph)}, which must be the name of a file in the bundle's own folder")
