"""Which graph of a model folder is meant: published models lie in many forms beside one another.

Layouts in the wild: `model.onnx` (Optimum, ONNX Runtime GenAI, edge-run); `onnx/model_q4.onnx` and its siblings
(transformers.js); `decoder_model_merged.onnx`, or `decoder_model.onnx` with `decoder_with_past_model.onnx` (Optimum
before 1.14); a folder for each device and precision with a `genai_config.json` in each (ONNX Runtime GenAI). A variant
is called by its precision (`q4`) or by its folder (`cpu-int4-rtn-block-32`, or a part of that).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from ..errors import BundleError
from .device_kind import DeviceKind

GENAI_CONFIG: Final = "genai_config.json"
_EDGE_MANIFEST: Final = "edge.json"
_PLAIN: Final = "fp32"
"""What a graph without a suffix is called, as transformers.js does."""
_FORMS: Final = ("q4f16", "q4", "bnb4", "int8", "uint8", "quantized", "fp16", _PLAIN)
_ALSO_CALLED: Final[Mapping[str, frozenset[str]]] = {
    "int4": frozenset({"q4", "q4f16"}),
    "int8": frozenset({"int8", "quantized"}),
    "float16": frozenset({"fp16"}),
    "float32": frozenset({_PLAIN}),
}
_ORDER: Final[Mapping[DeviceKind, Sequence[str]]] = {
    # A CPU reads few bits quickly and computes in float32: half precision is converted on the way, at every step.
    DeviceKind.CPU: ("q4", "int8", "quantized", "uint8", _PLAIN, "bnb4", "q4f16", "fp16"),
    DeviceKind.GPU: ("q4f16", "q4", "fp16", _PLAIN, "bnb4", "int8", "quantized", "uint8"),
    DeviceKind.NPU: ("q4", "int8", "quantized", "uint8", "q4f16", "fp16", _PLAIN, "bnb4"),
}
_DEVICE_WORDS: Final[Mapping[str, DeviceKind]] = {
    **dict.fromkeys(("cpu", "mobile"), DeviceKind.CPU),
    **dict.fromkeys(("gpu", "cuda", "directml", "dml", "webgpu", "tensorrt", "trtrtx"), DeviceKind.GPU),
    **dict.fromkeys(("npu", "qnn", "openvino", "vitis", "vitisai", "ryzenai"), DeviceKind.NPU),
}
_PRECISION_WORDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("int4", "q4", "awq", "4bit", "uint4"), "q4"),
    **dict.fromkeys(("int8", "q8", "8bit"), "int8"),
    **dict.fromkeys(("fp16", "float16", "bf16"), "fp16"),
    **dict.fromkeys(("fp32", "float32"), _PLAIN),
}
_NAMED: Final = re.compile(
    rf"(model|decoder_model_merged|decoder_with_past_model|decoder_model)(?:_({'|'.join(_FORMS)}))?$"
)
_WHOLE: Final = ("model", "decoder_model_merged")
"""Graphs that serve every pass, the better one first."""
_PARTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("encoder_model", "encoder"), "an encoder-decoder model"),
    **dict.fromkeys(
        ("vision_encoder", "vision", "visual", "vision_model", "image_encoder"), "a model of images and text"
    ),
    **dict.fromkeys(("audio_encoder", "audio", "speech", "audio_model"), "a model of sound and text"),
    **dict.fromkeys(("embed_tokens", "embedding", "embeddings"), "a model whose embedding is a graph of its own"),
    **dict.fromkeys(("context", "context_ctx", "iterator", "iterator_ctx", "lm_head"), "a model cut into stages"),
}
"""What a model is that has a graph of this name beside its decoder; what says most comes first."""


@dataclass(frozen=True)
class GraphFiles:
    """The graphs to run, as POSIX paths from the model folder."""

    graph: str
    prefill: str | None = None
    """Where the first pass, without a cache, is a graph of its own: that graph."""


@dataclass(frozen=True)
class _Candidate:
    files: GraphFiles
    precision: str
    """One of `_FORMS`, or another graph's own name."""
    device: DeviceKind | None
    """Which device its folder's name speaks of."""

    @property
    def folder(self) -> PurePosixPath:
        return PurePosixPath(self.files.graph).parent

    def rank(self, kind: DeviceKind) -> tuple[int, int, bool, int]:
        """Lower is better; equal ranks are equally good."""
        device = 1 if self.device is None else 0 if self.device is kind else 2
        order = _ORDER[kind]
        precision = order.index(self.precision) if self.precision in order else len(order)
        # 8-bit activations: on CPUs twice the speed of the same weights without.
        slow = kind is DeviceKind.CPU and "acc-level-4" not in str(self.folder)
        return device, precision, slow, len(self.folder.parts)


def choose_graph(
    files: Iterable[str],
    variant: str | None = None,
    *,
    kind: DeviceKind = DeviceKind.CPU,
    named: Mapping[str, str] | None = None,
    where: str = "the folder",
) -> GraphFiles:
    """The graph to run of all those in a model folder.

    Args:
        files: POSIX paths of every file, from the model folder.
        variant: a precision (`q4`, `int8`, `fp16`, `fp32`), a folder's name or a part of it; None for what suits best.
        kind: what the model is to run on.
        named: file name of the decoder's graph by the folder whose `genai_config.json` names it ("" or "." is the
            model folder itself).
        where: what the folder is called in errors.

    Raises:
        BundleError: there is no graph, none of that variant, several that suit equally, or the model is of a kind that
            is no text decoder.
    """
    paths = [PurePosixPath(file) for file in sorted(set(files))]
    names = {PurePosixPath(folder): name for folder, name in (named or {}).items()}
    if variant is None and {_EDGE_MANIFEST, "model.onnx"} <= set(map(str, paths)):
        return GraphFiles("model.onnx")
    candidates = _candidates(paths, names)
    if not candidates:
        raise _no_graph(paths, variant, where)
    labels = _labels(candidates)
    listed = f"name one of {', '.join(sorted(labels.values()))}"
    meant = candidates if variant is None else _called(variant, labels) or _in_file(variant, paths)
    if not meant:
        raise BundleError(f"{where} has no variant {variant}", listed)
    ranks = {candidate: candidate.rank(kind) for candidate in meant}
    best = [candidate for candidate in meant if ranks[candidate] == min(ranks.values())]
    if len(best) > 1:
        among = ", ".join(sorted(labels.get(candidate, candidate.files.graph) for candidate in best))
        raise BundleError(f"{where} has several graphs that suit equally well", f"name one of {among}")
    _require_text_decoder(best[0], paths, names, where)
    return best[0].files


def variant_of(files: Iterable[str], graph: str, named: Mapping[str, str] | None = None) -> str:
    """What a graph that `choose_graph` found among `files` is called; empty if it is the only one."""
    paths = [PurePosixPath(file) for file in sorted(set(files))]
    if graph == "model.onnx" and PurePosixPath(_EDGE_MANIFEST) in paths:
        return ""
    labels = _labels(_candidates(paths, {PurePosixPath(folder): name for folder, name in (named or {}).items()}))
    return next((label for one, label in labels.items() if one.files.graph == graph), "") if len(labels) > 1 else ""


def _candidates(paths: Sequence[PurePosixPath], named: Mapping[PurePosixPath, str]) -> list[_Candidate]:
    folders = {path.parent for path in paths if path.suffix == ".onnx"}
    return [candidate for folder in sorted(folders) for candidate in _in_folder(folder, paths, named.get(folder))]


def _in_folder(folder: PurePosixPath, paths: Sequence[PurePosixPath], named: str | None) -> list[_Candidate]:
    """The decoders in one folder: the one its configuration names, else those with names that are known, else all."""
    graphs = [path for path in paths if path.parent == folder and path.suffix == ".onnx"]
    if named is not None:
        graphs = [path for path in graphs if path.name == named]
        return [_candidate(GraphFiles(str(path)), _form(path.stem)) for path in graphs]
    by_form: dict[str, dict[str, str]] = {}
    for path in graphs:
        if match := _NAMED.fullmatch(path.stem):
            by_form.setdefault(match[2] or "", {})[match[1]] = str(path)
    if by_form:
        return [_candidate(_of_one_form(names), form) for form, names in by_form.items()]
    return [_candidate(GraphFiles(str(path)), _form(path.stem)) for path in graphs if not _telling_part([path])]


def _of_one_form(names: Mapping[str, str]) -> GraphFiles:
    for whole in _WHOLE:
        if whole in names:
            return GraphFiles(names[whole])
    if "decoder_with_past_model" in names:
        return GraphFiles(names["decoder_with_past_model"], names.get("decoder_model"))
    return GraphFiles(names["decoder_model"])


def _form(stem: str) -> str:
    """The form that a graph's name ends with; empty if with none."""
    return next((form for form in _FORMS if stem.endswith(f"_{form}")), "")


def _candidate(files: GraphFiles, form: str) -> _Candidate:
    """With its precision and device, as its name says, else its folders."""
    folder = PurePosixPath(files.graph).parent
    words = [word for part in reversed(folder.parts) for word in re.split(r"[-_. ]", part.lower())]
    device = next((_DEVICE_WORDS[word] for word in words if word in _DEVICE_WORDS), None)
    precision = form or next((_PRECISION_WORDS[word] for word in words if word in _PRECISION_WORDS), _PLAIN)
    if not form and precision == "q4" and device is DeviceKind.GPU:
        precision = "q4f16"  # what is built for a GPU computes in half precision
    return _Candidate(files, precision, device)


def _labels(candidates: Sequence[_Candidate]) -> dict[_Candidate, str]:
    """What each candidate is called: as short as tells it from the others."""
    namings: tuple[Callable[[_Candidate], str], ...] = (
        lambda one: one.precision if str(one.folder) in (".", "onnx") else one.folder.name,
        lambda one: PurePosixPath(one.files.graph).stem if str(one.folder) in (".", "onnx") else str(one.folder),
        lambda one: one.files.graph.removesuffix(".onnx"),
    )
    labels: dict[_Candidate, str] = {}
    for naming in namings:
        names = [naming(one) for one in candidates]
        labels |= {
            one: name
            for one, name in zip(candidates, names, strict=True)
            if names.count(name) == 1 and one not in labels
        }
    return labels


def _called(variant: str, labels: Mapping[_Candidate, str]) -> list[_Candidate]:
    """The candidates that a variant's name may mean, by the nearest reading that means any."""
    wanted = variant.strip("/").lower()
    precisions = _ALSO_CALLED.get(wanted, frozenset({wanted}))
    readings: tuple[Callable[[_Candidate], bool], ...] = (
        lambda one: (
            wanted in (labels[one].lower(), one.files.graph.lower(), one.files.graph.removesuffix(".onnx").lower())
        ),
        lambda one: one.precision == wanted,
        lambda one: one.precision in precisions,
        lambda one: wanted in str(one.folder).lower().split("/"),
        lambda one: wanted in str(one.folder).lower(),
        lambda one: wanted in PurePosixPath(one.files.graph).stem.lower(),
    )
    for reading in readings:
        if meant := [candidate for candidate in labels if reading(candidate)]:
            return meant
    return []


def _in_file(variant: str, paths: Sequence[PurePosixPath]) -> list[_Candidate]:
    """The graphs in files of a name, also of one that says nothing of a precision."""
    wanted = variant.strip("/").lower().removesuffix(".onnx")
    found = []
    for path in paths:
        if path.suffix == ".onnx" and wanted in (path.stem.lower(), str(path.with_suffix("")).lower()):
            first = path.with_name(path.name.replace("decoder_with_past_model", "decoder_model"))
            files = GraphFiles(str(path), str(first) if first != path and first in paths else None)
            found.append(_candidate(files, _form(path.stem)))
    return found


def _require_text_decoder(
    chosen: _Candidate, paths: Sequence[PurePosixPath], named: Mapping[PurePosixPath, str], where: str
) -> None:
    """Refuse a decoder that is a part of something larger.

    Raises:
        BundleError: the graphs beside it say so.
    """
    beside = [path for path in paths if path.parent == chosen.folder and path.suffix == ".onnx"]
    if (part := _telling_part(beside)) is not None and named.get(chosen.folder) != part[0].name:
        raise _refused(part, where)


def _telling_part(graphs: Sequence[PurePosixPath]) -> tuple[PurePosixPath, str] | None:
    """The graph that says most of what kind a model is, if it is no plain text decoder, and the kind."""
    for name, what in _PARTS.items():
        for path in graphs:
            form = _form(path.stem)
            stem = path.stem.lower().removesuffix(f"_{form}")
            if stem == name or stem.endswith(f"-{name}"):
                return path, what
    return None


def _refused(part: tuple[PurePosixPath, str], where: str) -> BundleError:
    hint = "edge-run runs decoders of text that are one graph; look for a text-only export of this model"
    return BundleError(f"{where} is {part[1]} ({part[0].name} says so)", hint)


def _no_graph(paths: Sequence[PurePosixPath], variant: str | None, where: str) -> BundleError:
    """What a folder without a decoder is, as far as its files tell."""
    what = f"{where} holds no .onnx file"
    graphs = [path for path in paths if path.suffix == ".onnx"]
    if (part := _telling_part(graphs)) is not None:
        return _refused(part, where)
    if any(path.suffix == ".safetensors" for path in paths):
        return BundleError(what, f"it looks like a checkpoint: run edge-run export {where} OUT first")
    if weights := [path for path in paths if path.suffix == ".gguf"]:
        meant = next((path for path in weights if variant and variant.lower() in path.name.lower()), weights[0])
        return BundleError(what, f"it holds GGUF weights: run edge-run export {where}/{meant} OUT first")
    if any(path.name.startswith("pytorch_model") for path in paths):
        return BundleError(
            what, "its weights are pickles, which can run code: look for a safetensors or ONNX form of it"
        )
    return BundleError(what, "give an .onnx file or a model folder")
