"""`edge.json`, the manifest of a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Final, TypeVar

from ..errors import BundleError
from .draft_heads import HeadKind
from .graph_variant import VARIANT_CONTRACT, DeviceKind, Precision, VariantFile
from .json_file import is_finite, is_whole, parse_json_object, shown

MANIFEST_NAME: Final = "edge.json"
BUNDLE_FORMAT: Final = 1
"""Version of the folder layout and of this file."""
GRAPH_CONTRACT: Final = 1
"""Version of the graph's inputs and outputs (docs/graph-contract.md)."""
MIN_CONTEXT: Final = 2
"""Smallest context a model can have: one position of a prompt and one of its answer."""


class GraphLayout(StrEnum):
    """Convention that the inputs and outputs of an exported graph follow."""

    EDGE = "edge"
    """edge-run's own (docs/graph-contract.md): token trees, and logits of selected positions only."""
    GENAI = "genai"
    """ONNX Runtime GenAI's, with its genai_config.json."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer, as the exported graph has them."""

    family: str
    """Hugging Face `model_type`, such as llama, qwen2 or qwen3."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    """Number of positions that the graph's rotary table covers."""
    tied_head: bool
    """Whether the LM head shares the weights of the embedding."""


class Method(StrEnum):
    """Method by which the codes and scales of quantized weights are chosen."""

    RTN = "rtn"
    """Round to nearest: the scale follows from the largest weight of a block."""
    K_QUANT = "k-quant"
    """The scale is found by weighted least squares."""
    GPTQ = "gptq"
    """Codes are chosen column by column, each compensating the errors of the columns before it."""


_FORMER_METHODS: Final = ("hqq",)
"""Names of methods in the manifests of earlier versions."""


@dataclass(frozen=True)
class WeightFormat:
    """Storage format of a linear: float32, or 2, 4 or 8 bits in blocks along the input dimension."""

    bits: int
    block: int = 0
    offsets: bool = False
    """Whether each block has an offset beside its scale, as quantization formats with minima have."""
    zero_points: bool = False
    """Whether each block has a zero point; if not, the middle code stands for 0."""
    half_scales: bool = False
    """Whether scales are stored in float16. The graph converts them to float32 once, when it is loaded."""
    rank: int = 0
    """Rank of the 8-bit low-rank correction that is added to the weights; 0 for none."""
    method: Method | None = field(default=None, compare=False)
    """Method by which codes and scales were chosen; not part of the storage format. None for float weights and for
    codes that came with the model (in older bundles also for rounding to nearest)."""

    def __str__(self) -> str:
        if self.bits == 32:
            return "fp32"
        marks = {"+offsets": self.offsets, "+zero-points": self.zero_points, "+half-scales": self.half_scales}
        marks[f"+rank{self.rank}"] = self.rank > 0
        return f"int{self.bits}/{self.block}" + "".join(mark for mark, has in marks.items() if has)


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 (hexadecimal) of one file of the bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Calibration:
    """The text with which weights were quantized and their formats chosen."""

    origin: str
    """Origin of the text for a reader: the name of a file, or that it was sampled from the model."""
    tokens: int
    """Number of tokens that statistics and choices are based on."""
    held_out_tokens: int
    """Number of other tokens, on which `Manifest.quality` was measured."""
    awq: bool = False
    """Whether AWQ scaling was applied."""


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
    """File of a layer-skip draft: this model's graph without some sub-layers, over the same weights and the same cache;
    or of a draft head. `path` is then this folder. Empty if the draft is a model of its own."""
    skips: tuple[str, ...] = ()
    """The sub-layers that a layer-skip draft skips, such as `3.attention` and `5.feed-forward`."""
    head: HeadKind | None = None
    """Kind of a draft head, whose graph in this folder reads the hidden states of this model; None for other drafts."""


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
    format: int = BUNDLE_FORMAT
    contract: int = GRAPH_CONTRACT

    def to_json(self) -> str:
        """Return the text of `edge.json`."""
        data = asdict(self)
        for name in ("calibration", "quality", "bits_per_weight_read"):
            if not data[name]:
                del data[name]
        if self.draft is None:
            del data["draft"]
        else:
            data["draft"] = {name: value for name, value in data["draft"].items() if value}
        if self.variants:
            data["variants"] = [_variant_json(variant) for variant in self.variants]
        else:
            del data["variants"]
        for weight_format in data["weights"].values():
            for name in ("offsets", "zero_points", "half_scales", "rank", "method"):
                if not weight_format[name]:
                    del weight_format[name]
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = MANIFEST_NAME) -> Manifest:
        """Read the text of `edge.json`; unknown fields are ignored.

        Raises:
            BundleError: it is not JSON, a field is missing or has the wrong type, or the format is newer than this
                program.
        """
        try:
            data = _Fields(parse_json_object(text))
            data.require("format", "contract")
            version, contract = data.whole("format", 1), data.whole("contract", 1)
            if version > BUNDLE_FORMAT or contract > GRAPH_CONTRACT:
                raise BundleError(
                    f"{where} has format {shown(version)}, contract {shown(contract)}; this edge-run reads "
                    f"format {BUNDLE_FORMAT}, contract {GRAPH_CONTRACT}",
                    "upgrade edge-run",
                )
            data.require("architecture", "weights", "bits_per_weight", "files")
            weights = data.each("weights", _weight_format)
            if "head" not in weights:
                raise ValueError("lacks weights.head")
            files = data.each("files", _file_digest)
            variants = [_variant(each, files) for each in data.objects("variants")] if "variants" in data else []
            return cls(
                architecture=_architecture(data.fields("architecture")),
                weights=weights,
                bits_per_weight=data.number("bits_per_weight"),
                files=files,
                parity=data.numbers("parity") if "parity" in data else {},
                producer=data.text("producer") if "producer" in data else "",
                command=data.text("command") if "command" in data else "",
                calibration=_calibration(data.fields("calibration")) if "calibration" in data else None,
                quality=data.numbers("quality") if "quality" in data else {},
                bits_per_weight_read=data.number("bits_per_weight_read") if "bits_per_weight_read" in data else None,
                draft=_draft_pairing(data.fields("draft")) if "draft" in data else None,
                variants=tuple(variant for variant in variants if variant is not None),
                layout=data.choice("layout", GraphLayout) if "layout" in data else GraphLayout.EDGE,
                format=version,
                contract=contract,
            )
        except ValueError as error:
            raise BundleError(f"{where} cannot be read: it {error}", "export the model again") from error


_DEVICES: Final = tuple(kind.value for kind in DeviceKind)
_Value = TypeVar("_Value")
_Choice = TypeVar("_Choice", GraphLayout, Method, HeadKind)


class _Fields:
    """A JSON object of the file; each method checks a type. The message of a ValueError continues "it ..."."""

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self._data = data
        self.path = path
        """What precedes a field's name in messages."""

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def require(self, *names: str) -> None:
        missing = [f"{self.path}{name}" for name in names if name not in self._data]
        if missing:
            raise ValueError(f"lacks {', '.join(missing)}")

    def whole(self, name: str, least: int) -> int:
        value = self._data[name]
        if not is_whole(value, least):
            raise self._wrong(name, f"a whole number of at least {least}")
        return int(value)

    def number(self, name: str) -> float:
        value = self._data[name]
        if not is_finite(value):
            raise self._wrong(name, "a finite number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._data[name]
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self._data[name]
        if not isinstance(value, str):
            raise self._wrong(name, "text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._data[name]
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(name, "a list of texts")
        return tuple(value)

    def choice(self, name: str, kind: type[_Choice]) -> _Choice:
        value = self.text(name)
        known = [each.value for each in kind]
        if value not in known:
            raise self._wrong(name, f"one of {', '.join(known)}")
        return kind(value)

    def fields(self, name: str) -> _Fields:
        value = self._data[name]
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return _Fields(value, f"{self.path}{name}.")

    def objects(self, name: str) -> list[_Fields]:
        value = self._data[name]
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise self._wrong(name, "a list of objects")
        return [_Fields(each, f"{self.path}{name}.{index}.") for index, each in enumerate(value)]

    def each(self, name: str, read: Callable[[_Fields], _Value]) -> dict[str, _Value]:
        inner = self.fields(name)
        return {key: read(inner.fields(key)) for key in inner._data}

    def numbers(self, name: str) -> dict[str, float]:
        inner = self.fields(name)
        return {key: inner.number(key) for key in inner._data}

    def _wrong(self, name: str, expected: str) -> ValueError:
        return ValueError(f"has {self.path}{name} {shown(self._data[name])}, which must be {expected}")


def _architecture(data: _Fields) -> Architecture:
    counts = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim")
    data.require("family", *counts, "context", "tied_head")
    return Architecture(
        family=data.text("family"),
        context=data.whole("context", MIN_CONTEXT),
        tied_head=data.flag("tied_head"),
        **{name: data.whole(name, 1) for name in counts},
    )


def _calibration(data: _Fields) -> Calibration:
    data.require("origin", "tokens", "held_out_tokens")
    return Calibration(
        origin=data.text("origin"),
        tokens=data.whole("tokens", 0),
        held_out_tokens=data.whole("held_out_tokens", 0),
        awq=next((data.flag(name) for name in ("awq", "folded") if name in data), False),  # formerly "folded"
    )


def _draft_pairing(data: _Fields) -> DraftPairing:
    data.require("path")
    path = data.text("path")
    if not path or PurePosixPath(path).is_absolute() or PureWindowsPath(path).drive or "\\" in path:
        raise ValueError(f"has draft.path {shown(path)}, which must be a path from the bundle's folder")
    d2t = data.text("d2t") if "d2t" in data else ""
    if d2t and _has_folder(d2t):
        raise ValueError(f"has draft.d2t {shown(d2t)}, which must be the name of a file")
    graph = data.text("graph") if "graph" in data else ""
    if graph and (_has_folder(graph) or path != "."):
        raise ValueError(f"has draft.graph {shown(graph)}, which must be the name of a file in the bundle's own folder")
    return DraftPairing(
        path,
        d2t,
        data.flag("d2t_offsets") if "d2t_offsets" in data else False,
        graph,
        data.texts("skips") if "skips" in data else (),
        data.choice("head", HeadKind) if "head" in data else None,
    )


def _variant(data: _Fields, files: Mapping[str, FileDigest]) -> VariantFile | None:
    """Read one variant; None if this program does not know its device, precision or contract."""
    data.require("device", "file", "precision")
    contract = data.whole("contract", 1) if "contract" in data else VARIANT_CONTRACT
    device, precision, file = data.text("device"), data.text("precision"), data.text("file")
    if contract > VARIANT_CONTRACT or device not in _DEVICES or precision not in list(Precision):
        return None
    if file not in files:
        raise ValueError(f"has {data.path}file {shown(file)}, which files lacks")
    return VariantFile(
        device=DeviceKind(device),
        file=file,
        precision=Precision(precision),
        width=data.whole("width", 1) if "width" in data else None,
        context=data.whole("context", 1) if "context" in data else None,
        providers=data.texts("providers") if "providers" in data else (),
        plain=data.flag("plain") if "plain" in data else False,
        contract=contract,
    )


def _variant_json(variant: VariantFile) -> dict[str, Any]:
    """A variant as JSON; what has its default is left out, except the contract."""
    data = {**asdict(variant), "device": variant.device.value}
    return {name: value for name, value in data.items() if value not in (None, (), False)}


def _has_folder(name: str) -> bool:
    return PurePosixPath(name).name != name or PureWindowsPath(name).name != name


def _weight_format(data: _Fields) -> WeightFormat:
    data.require("bits")
    return WeightFormat(
        bits=data.whole("bits", 1),
        block=data.whole("block", 0) if "block" in data else 0,
        offsets=data.flag("offsets") if "offsets" in data else False,
        zero_points=data.flag("zero_points") if "zero_points" in data else False,
        half_scales=data.flag("half_scales") if "half_scales" in data else False,
        rank=data.whole("rank", 0) if "rank" in data else 0,
        method=_method(data),
    )


def _method(data: _Fields) -> Method | None:
    if "method" not in data or data.text("method") in _FORMER_METHODS:
        return None
    return data.choice("method", Method)


def _file_digest(data: _Fields) -> FileDigest:
    data.require("bytes", "sha256")
    return FileDigest(data.whole("bytes", 0), data.text("sha256"))
