"""`edge.json`: what a bundle says about itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Final, TypeVar

from ..errors import BundleError
from .json_file import is_finite, is_whole, parse_json_object, shown

MANIFEST_NAME: Final = "edge.json"
BUNDLE_FORMAT: Final = 1
"""Version of the folder's layout and of this file."""
GRAPH_CONTRACT: Final = 1
"""Version of the graph's inputs and outputs (docs/graph-contract.md)."""
SHORTEST_CONTEXT: Final = 2
"""Fewest positions a model can serve: one of a prompt and one of its answer."""


class GraphLayout(str, Enum):
    """Whose inputs and outputs an exported graph has."""

    EDGE = "edge"
    """edge-run's own (docs/graph-contract.md): trees, and logits of chosen rows only."""
    GENAI = "genai"
    """ONNX Runtime GenAI's, with the genai_config.json that it reads."""


@dataclass(frozen=True)
class Architecture:
    """The numbers of a decoder-only transformer, as the exported graph has them."""

    family: str
    """Hugging Face `model_type`: llama, qwen2, qwen3."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    """Positions the graph's rotary table covers."""
    tied_head: bool
    """Whether the LM head is the embedding."""


class Method(str, Enum):
    """How codes and scales of few bits are chosen."""

    RTN = "rtn"
    """Round to nearest: the scale is read off the largest weight of a block."""
    K_QUANT = "k-quant"
    """The scale is searched for by weighted least squares."""
    HQQ = "hqq"
    """The scale is found by half-quadratic minimization of a norm that forgives outliers."""
    GPTQ = "gptq"
    """Codes are chosen column by column, each making up for the errors of those before it."""


@dataclass(frozen=True)
class WeightFormat:
    """How one linear's weights are stored: 32 bits plain, or 2, 4 or 8 bits in blocks along the input dimension."""

    bits: int
    block: int = 0
    offsets: bool = False
    """Whether each block has an offset beside its scale, as formats with minima need."""
    zero_points: bool = False
    """Whether each block says which code stands for 0; else it is the middle one."""
    powers_of_two: bool = False
    """Whether scales are powers of two, perhaps negative, so that a shift does for the product with one."""
    rank: int = 0
    """Of the product of two thin matrices of 8 bits that is added to the weights; 0 for none."""
    method: Method | None = field(default=None, compare=False)
    """How codes and scales were chosen, which makes no other format; None where nothing was chosen: plain weights, and
    codes that came with a model (older bundles have it for rounding to nearest, too)."""

    def __str__(self) -> str:
        if self.bits == 32:
            return "fp32"
        marks = {"+offsets": self.offsets, "+zero-points": self.zero_points, "+powers-of-two": self.powers_of_two}
        marks[f"+rank{self.rank}"] = self.rank > 0
        return f"int{self.bits}/{self.block}" + "".join(mark for mark, has in marks.items() if has)


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 (hexadecimal) of one file of the bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Calibration:
    """The text by which weights were rounded and their formats chosen."""

    origin: str
    """Where it comes from, in words for a reader: a file's name, or that the model wrote it."""
    tokens: int
    """How many tokens statistics and choices were made with."""
    held_out_tokens: int
    """How many others `Manifest.quality` was measured on."""
    folded: bool = False
    """Whether scales of inputs were folded into norms and neighbouring matrices, as AWQ does."""


@dataclass(frozen=True)
class DraftPairing:
    """The draft model that was made for a model."""

    path: str
    """Its folder, from this bundle's folder, with forward slashes."""
    d2t: str = ""
    """File in that folder with the target's ids of its head's tokens; empty where they are the same."""
    d2t_offsets: bool = False
    """Whether the file holds what is to be added to a token's own id (as EAGLE-3 has it) and not the target's id."""
    graph: str = ""
    """File of a graph that is this model's own without some of its parts, over the same weights, to be run on the same
    cache; `path` is then this folder. Empty where the draft is a model of its own."""
    skips: tuple[str, ...] = ()
    """The parts that graph does without, such as `3.attention` and `5.feed-forward`."""


@dataclass(frozen=True)
class Manifest:
    """The contents of `edge.json`."""

    architecture: Architecture
    weights: Mapping[str, WeightFormat]
    """Format by unit, a unit being one fused linear: `layers.0.qkv`, `layers.0.o`, `layers.0.gate_up`,
    `layers.0.down`, `embedding`, `head`."""
    bits_per_weight: float
    """Stored bits, scales included, over the number of weights in all units."""
    files: Mapping[str, FileDigest]
    """Digest by file name, for every file of the bundle but this one."""
    parity: Mapping[str, float] = field(default_factory=dict)
    """How near the graph came to the reference when it was exported: `max_abs_diff`, `mean_kl`, `top1_agreement`."""
    producer: str = ""
    command: str = ""
    calibration: Calibration | None = None
    quality: Mapping[str, float] = field(default_factory=dict)
    """How near the rounded model stays to the float32 one on held-out calibration text: `mean_kl`, `p99_kl`,
    `top1_agreement`, `perplexity`, `float_perplexity`; empty without calibration."""
    draft: DraftPairing | None = None
    layout: GraphLayout = GraphLayout.EDGE
    format: int = BUNDLE_FORMAT
    contract: int = GRAPH_CONTRACT

    def to_json(self) -> str:
        """The text of `edge.json`."""
        data = asdict(self)
        for name in ("calibration", "quality"):
            if not data[name]:
                del data[name]
        if self.draft is None:
            del data["draft"]
        else:
            data["draft"] = {name: value for name, value in data["draft"].items() if value}
        for form in data["weights"].values():
            for name in ("offsets", "zero_points", "powers_of_two", "rank", "method"):
                if not form[name]:
                    del form[name]
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = MANIFEST_NAME) -> Manifest:
        """Read the text of `edge.json`; fields this program does not know are left out.

        Raises:
            BundleError: it is not JSON, a field is missing or of the wrong type, or it is of a later format than this
                program knows.
        """
        try:
            data = _Fields(parse_json_object(text))
            data.require("format", "contract")
            version, contract = data.whole("format", 1), data.whole("contract", 1)
            if version > BUNDLE_FORMAT or contract > GRAPH_CONTRACT:
                raise BundleError(
                    f"{where} is of format {shown(version)}, contract {shown(contract)}; this edge-run reads "
                    f"format {BUNDLE_FORMAT}, contract {GRAPH_CONTRACT}",
                    "upgrade edge-run",
                )
            data.require("architecture", "weights", "bits_per_weight", "files")
            weights = data.each("weights", _weight_format)
            if "head" not in weights:
                raise ValueError("lacks weights.head")
            return cls(
                architecture=_architecture(data.fields("architecture")),
                weights=weights,
                bits_per_weight=data.number("bits_per_weight"),
                files=data.each("files", _file_digest),
                parity=data.numbers("parity") if "parity" in data else {},
                producer=data.text("producer") if "producer" in data else "",
                command=data.text("command") if "command" in data else "",
                calibration=_calibration(data.fields("calibration")) if "calibration" in data else None,
                quality=data.numbers("quality") if "quality" in data else {},
                draft=_draft_pairing(data.fields("draft")) if "draft" in data else None,
                layout=data.choice("layout", GraphLayout) if "layout" in data else GraphLayout.EDGE,
                format=version,
                contract=contract,
            )
        except ValueError as error:
            raise BundleError(f"{where} cannot be read: it {error}", "export the model again") from error


_Value = TypeVar("_Value")
_Choice = TypeVar("_Choice", GraphLayout, Method)


class _Fields:
    """One object of the file; every look-up checks a type. ValueError says what is wrong, as `it ...`."""

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self._data = data
        self._path = path

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def require(self, *names: str) -> None:
        missing = [f"{self._path}{name}" for name in names if name not in self._data]
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
        return _Fields(value, f"{self._path}{name}.")

    def each(self, name: str, read: Callable[[_Fields], _Value]) -> dict[str, _Value]:
        inner = self.fields(name)
        return {key: read(inner.fields(key)) for key in inner._data}

    def numbers(self, name: str) -> dict[str, float]:
        inner = self.fields(name)
        return {key: inner.number(key) for key in inner._data}

    def _wrong(self, name: str, expected: str) -> ValueError:
        return ValueError(f"has {self._path}{name} {shown(self._data[name])}, which must be {expected}")


def _architecture(data: _Fields) -> Architecture:
    counts = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim")
    data.require("family", *counts, "context", "tied_head")
    return Architecture(
        family=data.text("family"),
        context=data.whole("context", SHORTEST_CONTEXT),
        tied_head=data.flag("tied_head"),
        **{name: data.whole(name, 1) for name in counts},
    )


def _calibration(data: _Fields) -> Calibration:
    data.require("origin", "tokens", "held_out_tokens")
    return Calibration(
        origin=data.text("origin"),
        tokens=data.whole("tokens", 0),
        held_out_tokens=data.whole("held_out_tokens", 0),
        folded=data.flag("folded") if "folded" in data else False,
    )


def _draft_pairing(data: _Fields) -> DraftPairing:
    data.require("path")
    path = data.text("path")
    if not path or PurePosixPath(path).is_absolute() or PureWindowsPath(path).drive or "\\" in path:
        raise ValueError(f"has draft.path {shown(path)}, which must be a path from the bundle's folder")
    d2t = data.text("d2t") if "d2t" in data else ""
    if d2t and _is_no_file_name(d2t):
        raise ValueError(f"has draft.d2t {shown(d2t)}, which must be the name of a file")
    graph = data.text("graph") if "graph" in data else ""
    if graph and (_is_no_file_name(graph) or path != "."):
        raise ValueError(f"has draft.graph {shown(graph)}, which must be the name of a file in the bundle's own folder")
    return DraftPairing(
        path,
        d2t,
        data.flag("d2t_offsets") if "d2t_offsets" in data else False,
        graph,
        data.texts("skips") if "skips" in data else (),
    )


def _is_no_file_name(name: str) -> bool:
    return PurePosixPath(name).name != name or PureWindowsPath(name).name != name


def _weight_format(data: _Fields) -> WeightFormat:
    data.require("bits")
    return WeightFormat(
        bits=data.whole("bits", 1),
        block=data.whole("block", 0) if "block" in data else 0,
        offsets=data.flag("offsets") if "offsets" in data else False,
        zero_points=data.flag("zero_points") if "zero_points" in data else False,
        powers_of_two=data.flag("powers_of_two") if "powers_of_two" in data else False,
        rank=data.whole("rank", 0) if "rank" in data else 0,
        method=data.choice("method", Method) if "method" in data else None,
    )


def _file_digest(data: _Fields) -> FileDigest:
    data.require("bytes", "sha256")
    return FileDigest(data.whole("bytes", 0), data.text("sha256"))
