"""Chooses among the graphs of a model folder.

Common layouts: `model.onnx` (Optimum, ONNX Runtime GenAI, edge-run); `onnx/model_q4.onnx` and its siblings
(transformers.js); `decoder_model_merged.onnx`, or `decoder_model.onnx` with `decoder_with_past_model.onnx` (Optimum
before 1.14); a folder for each device and precision with a `genai_config.json` in each (ONNX Runtime GenAI). A variant
is named by its precision (`q4`) or by its folder (`cpu-int4-rtn-block-32`, or a part of that).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Final

from ..errors import BundleError
from .manifest import DeviceKind

GENAI_CONFIG: Final = "genai_config.json"
_EDGE_MANIFEST: Final = "edge.json"
_NO_SUFFIX: Final = "fp32"
"""Precision of a graph whose name has no suffix, as in transformers.js."""
_PRECISIONS: Final = ("q4f16", "q4", "bnb4", "int8", "uint8", "quantized", "fp16", _NO_SUFFIX)
_SYNONYMS: Final[Mapping[str, frozenset[str]]] = {
    "int4": frozenset({"q4", "q4f16"}),
    "int8": frozenset({"int8", "quantized"}),
    "float16": frozenset({"fp16"}),
    "float32": frozenset({_NO_SUFFIX}),
}
_PREFERENCE: Final[Mapping[DeviceKind, Sequence[str]]] = {
    # A CPU computes in float32: half precision is converted in every pass.
    DeviceKind.CPU: ("q4", "int8", "quantized", "uint8", _NO_SUFFIX, "bnb4", "q4f16", "fp16"),
    DeviceKind.GPU: ("q4f16", "q4", "fp16", _NO_SUFFIX, "bnb4", "int8", "quantized", "uint8"),
    DeviceKind.NPU: ("q4", "int8", "quantized", "uint8", "q4f16", "fp16", _NO_SUFFIX, "bnb4"),
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
    **dict.fromkeys(("fp32", "float32"), _NO_SUFFIX),
}
_WITH_PAST, _WITHOUT_PAST = "decoder_with_past_model", "decoder_model"
_GRAPHS: Final = ("model", "decoder_model_merged", _WITH_PAST, _WITHOUT_PAST)
"""Names of graphs, the preferred one first."""
_GRAPH_NAME: Final = re.compile(rf"({'|'.join(_GRAPHS)})(?:_({'|'.join(_PRECISIONS)}))?$")
_DECODER_PART: Final = "decoder_model_merged"
_PARTS: Final[Mapping[str, tuple[str, str]]] = {
    "embedding": ("embed_tokens", "embedding"),
    "vision": ("vision_encoder", "vision"),
}
"""Graphs beside the decoder of a model that also takes images, as transformers.js and ONNX Runtime GenAI call them."""
_COMPONENTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("encoder_model", "encoder"), "an encoder-decoder model"),
    **dict.fromkeys(
        ("vision_encoder", "vision", "visual", "vision_model", "image_encoder"), "a model of images and text"
    ),
    **dict.fromkeys(("audio_encoder", "audio", "speech", "audio_model"), "a model of sound and text"),
    **dict.fromkeys(("embed_tokens", "embedding", "embeddings"), "a model whose embedding is a graph of its own"),
    **dict.fromkeys(("context", "context_ctx", "iterator", "iterator_ctx", "lm_head"), "a model cut into stages"),
}
"""Kind of a model that has a graph of this name beside its decoder; the most specific first."""
_WITH_TEXT: Final = frozenset(_COMPONENTS[name] for name in ("vision_encoder", "audio_encoder", "embed_tokens"))
"""Kinds of models that take text alone too, given the graph with their embedding."""


@dataclass(frozen=True)
class GraphFiles:
    """Graphs to run, as POSIX paths relative to the model folder."""

    graph: str
    prefill: str | None = None
    """The graph for passes without a cache, if that is another one."""
    embedding: str | None = None
    """The graph that turns token ids into the embeddings that `graph` takes, if that is another one."""
    vision: str | None = None
    """The graph that turns images into features, beside such an embedding."""
    precision: str = field(default=_NO_SUFFIX, compare=False)
    """One of `_PRECISIONS`."""
    device: DeviceKind | None = field(default=None, compare=False)
    """Kind of device that the folder's name mentions."""

    @property
    def folder(self) -> PurePosixPath:
        """The folder of the graph."""
        return PurePosixPath(self.graph).parent

    def rank(self, kind: DeviceKind) -> tuple[int, int, bool, int]:
        """Return the sort key for a kind of device; the lowest is the best."""
        device = 1 if self.device is None else 0 if self.device is kind else 2
        order = _PREFERENCE[kind]
        precision = order.index(self.precision) if self.precision in order else len(order)
        # Accuracy level 4 means 8-bit activations, which are twice as fast on CPUs.
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
    """Choose the graph of a model folder to run.

    Args:
        files: POSIX paths of all files, relative to the model folder.
        variant: a precision (`q4`, `int8`, `fp16`, `fp32`), or a folder's name or a part of it; None for the variant
            that suits the device best.
        kind: kind of device that the model will run on.
        named: file name of the decoder's graph, by the folder whose `genai_config.json` names it ("" or "." is the
            model folder itself).
        where: name of the folder in errors.

    Raises:
        BundleError: there is no graph, no such variant, several graphs suit equally well, or the model is not a text
            decoder.
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
    meant = candidates if variant is None else _matching(variant, labels) or _by_file_name(variant, paths)
    if not meant:
        raise BundleError(f"{where} has no variant {variant}", listed)
    ranks = {candidate: candidate.rank(kind) for candidate in meant}
    best = [candidate for candidate in meant if ranks[candidate] == min(ranks.values())]
    if len(best) > 1:
        among = ", ".join(sorted(labels.get(candidate, candidate.graph) for candidate in best))
        raise BundleError(f"{where} has several graphs that suit equally well", f"name one of {among}")
    chosen = best[0]
    beside = [path for path in paths if path.parent == chosen.folder and path.suffix == ".onnx"]
    graph, is_genai = PurePosixPath(chosen.graph).name, chosen.folder / GENAI_CONFIG in paths
    found = {part: part_beside(graph, part, [each.name for each in beside], is_genai=is_genai) for part in _PARTS}
    if found["embedding"] is not None:
        embedding, vision = (name and str(chosen.folder / name) for name in found.values())
        chosen = replace(chosen, embedding=embedding, vision=vision)
    part = _find_component(beside)
    takes_text = chosen.embedding is not None and part is not None and part[1] in _WITH_TEXT
    if part is not None and not takes_text and names.get(chosen.folder) != part[0].name:
        raise _not_a_text_decoder(part, where)
    return chosen


def part_beside(graph: str, part: str, names: Collection[str], *, is_genai: bool) -> str | None:
    """The name of the graph with a part of a model that also takes images, which is cut there; None for none.

    In transformers.js `decoder_model_merged_q4.onnx` takes embeddings, which `embed_tokens_q4.onnx` makes of text; the
    tower may have another precision. Beside `genai_config.json` the parts are called `embedding.onnx` and
    `vision.onnx`, or end with these names.

    Args:
        graph: name of the decoder's file.
        part: `embedding` or `vision`.
        names: names of the files beside it.
        is_genai: whether `genai_config.json` is among them.
    """
    name, in_genai = _PARTS[part]
    suffix = graph.removesuffix(".onnx").removeprefix(_DECODER_PART)
    if suffix == graph.removesuffix(".onnx"):
        found = [each for each in sorted(names) if re.fullmatch(rf"(.+-)?{in_genai}\.onnx", each)]
        return found[0] if is_genai and found else None
    others = ["", *(f"_{each}" for each in _PREFERENCE[DeviceKind.CPU])] if part == "vision" else []
    return next((file for each in (suffix, *others) if (file := f"{name}{each}.onnx") in names), None)


def variant_of(files: Iterable[str], graph: str, named: Mapping[str, str] | None = None) -> str:
    """Return the variant name of a graph that `choose_graph` chose among `files`; empty if it is the only one."""
    paths = [PurePosixPath(file) for file in sorted(set(files))]
    if graph == "model.onnx" and PurePosixPath(_EDGE_MANIFEST) in paths:
        return ""
    labels = _labels(_candidates(paths, {PurePosixPath(folder): name for folder, name in (named or {}).items()}))
    return next((label for one, label in labels.items() if one.graph == graph), "") if len(labels) > 1 else ""


def _candidates(paths: Sequence[PurePosixPath], named: Mapping[PurePosixPath, str]) -> list[GraphFiles]:
    folders = {path.parent for path in paths if path.suffix == ".onnx"}
    return [candidate for folder in sorted(folders) for candidate in _in_folder(folder, paths, named.get(folder))]


def _in_folder(folder: PurePosixPath, paths: Sequence[PurePosixPath], named: str | None) -> list[GraphFiles]:
    """List a folder's decoders: the one its configuration names, else those with known names, else all graphs."""
    graphs = [path for path in paths if path.parent == folder and path.suffix == ".onnx"]
    if named is not None:
        return [_candidate(path) for path in graphs if path.name == named]
    by_precision: dict[str, dict[str, PurePosixPath]] = {}
    for path in graphs:
        if match := _GRAPH_NAME.fullmatch(path.stem):
            by_precision.setdefault(match[2] or "", {})[match[1]] = path
    if by_precision:
        candidates = []
        for names in by_precision.values():
            best = next(name for name in _GRAPHS if name in names)
            candidates.append(_candidate(names[best], names.get(_WITHOUT_PAST) if best == _WITH_PAST else None))
        return candidates
    return [_candidate(path) for path in graphs if not _find_component([path])]


def _precision_of(stem: str) -> str:
    """Return the precision that a graph's name ends with; empty if it has none."""
    return next((precision for precision in _PRECISIONS if stem.endswith(f"_{precision}")), "")


def _candidate(graph: PurePosixPath, prefill: PurePosixPath | None = None) -> GraphFiles:
    """Determine the precision, from the name's suffix or else the folders, and the device."""
    suffix = _precision_of(graph.stem)
    words = [word for part in reversed(graph.parent.parts) for word in re.split(r"[-_. ]", part.lower())]
    device = next((_DEVICE_WORDS[word] for word in words if word in _DEVICE_WORDS), None)
    precision = suffix or next((_PRECISION_WORDS[word] for word in words if word in _PRECISION_WORDS), _NO_SUFFIX)
    if not suffix and precision == "q4" and device is DeviceKind.GPU:
        precision = "q4f16"  # GPU builds compute in half precision
    return GraphFiles(str(graph), None if prefill is None else str(prefill), precision=precision, device=device)


def _labels(candidates: Sequence[GraphFiles]) -> dict[GraphFiles, str]:
    """Name each candidate as briefly as distinguishes it from the others."""
    namings: tuple[Callable[[GraphFiles], str], ...] = (
        lambda one: one.precision if str(one.folder) in (".", "onnx") else one.folder.name,
        lambda one: PurePosixPath(one.graph).stem if str(one.folder) in (".", "onnx") else str(one.folder),
        lambda one: one.graph.removesuffix(".onnx"),
    )
    labels: dict[GraphFiles, str] = {}
    for naming in namings:
        names = [naming(one) for one in candidates]
        labels |= {
            one: name
            for one, name in zip(candidates, names, strict=True)
            if names.count(name) == 1 and one not in labels
        }
    return labels


def _matching(variant: str, labels: Mapping[GraphFiles, str]) -> list[GraphFiles]:
    """Return the candidates that match a variant's name, by the strictest comparison that matches any."""
    wanted = variant.strip("/").lower()
    precisions = _SYNONYMS.get(wanted, frozenset({wanted}))
    comparisons: tuple[Callable[[GraphFiles], bool], ...] = (
        lambda one: wanted in (labels[one].lower(), one.graph.lower(), one.graph.removesuffix(".onnx").lower()),
        lambda one: one.precision == wanted,
        lambda one: one.precision in precisions,
        lambda one: wanted in str(one.folder).lower().split("/"),
        lambda one: wanted in str(one.folder).lower(),
        lambda one: wanted in PurePosixPath(one.graph).stem.lower(),
    )
    for matches in comparisons:
        if found := [candidate for candidate in labels if matches(candidate)]:
            return found
    return []


def _by_file_name(variant: str, paths: Sequence[PurePosixPath]) -> list[GraphFiles]:
    """Return the graphs with this file name, whatever precision it mentions."""
    wanted = variant.strip("/").lower().removesuffix(".onnx")
    found = []
    for path in paths:
        if path.suffix == ".onnx" and wanted in (path.stem.lower(), str(path.with_suffix("")).lower()):
            first = path.with_name(path.name.replace(_WITH_PAST, _WITHOUT_PAST))
            found.append(_candidate(path, first if first != path and first in paths else None))
    return found


def _find_component(graphs: Sequence[PurePosixPath]) -> tuple[PurePosixPath, str] | None:
    """Return a graph that shows that the model is not a plain text decoder, and the kind of the model."""
    for name, what in _COMPONENTS.items():
        for path in graphs:
            stem = path.stem.lower().removesuffix(f"_{_precision_of(path.stem)}")
            if stem == name or stem.endswith(f"-{name}"):
                return path, what
    return None


def _not_a_text_decoder(part: tuple[PurePosixPath, str], where: str) -> BundleError:
    hint = "edge-run runs text decoders of one graph; look for a text-only export of this model"
    return BundleError(f"{where} is {part[1]} ({part[0].name} says so)", hint)


def _no_graph(paths: Sequence[PurePosixPath], variant: str | None, where: str) -> BundleError:
    """Describe a folder without a decoder, as far as its files show what it is."""
    what = f"{where} holds no .onnx file"
    graphs = [path for path in paths if path.suffix == ".onnx"]
    if (part := _find_component(graphs)) is not None:
        return _not_a_text_decoder(part, where)
    if any(path.suffix == ".safetensors" for path in paths):
        return BundleError(what, f"it looks like a checkpoint: run edge-run export {where} OUT first")
    if weights := [path for path in paths if path.suffix == ".gguf"]:
        meant = next((path for path in weights if variant and variant.lower() in path.name.lower()), weights[0])
        return BundleError(what, f"it holds GGUF weights: run edge-run export {where}/{meant} OUT first")
    if any(path.name.startswith("pytorch_model") for path in paths):
        return BundleError(
            what, "its weights are pickles, which can run code; look for safetensors or ONNX weights of it"
        )
    return BundleError(what, "give an .onnx file or a model folder")
