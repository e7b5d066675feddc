"""The int8 prompt graph of a model on disk: made from the model's own codes, checked at every load.

A folder in the cache holds `model.onnx`, the 8-bit weights (`int8.data`: as they are, and as packed for this machine's
kernels), and links to the model's own data files for everything else. Weights are decoded and packed one matrix at a
time. Everything can be made again: a model whose int8 graph is stale or damaged, or cannot be made, runs without it.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import EdgeError
from ...models.bundle import GRAPH_NAME, VISION_GRAPH_NAME, Bundle
from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor
from ...models.onnx_file.model_messages import read_model, tensor
from ...models.progress import Progress, silent
from ..devices.processor import processor
from ..graph.attention_edits import attend_from_last, serve_plain_passes
from ..graph.ort import RUNTIME_BUILD
from ..graph.packed_files import (
    RECORD_NAME,
    is_intact,
    packed_folder,
    prepacked_graph,
    verify_folder,
    written_folder,
)
from ..graph.session import SessionConfig, load_graph
from .int8_graph import SELECTED, Int8Products, find_products, use_integers
from .integer_weights import FULL_RANGE, NARROW_RANGE, IntegerRange, products_overflow, to_integers, write_packed
from .outlier_channels import InputSample, sample_inputs, too_coarse

STAGE: Final = "preparing the int8 prompt graph"
"""Stage of the progress that making an int8 graph reports."""
_log: Final = logging.getLogger(__name__)

_CHOOSING: Final = 0.1
"""Share of the progress until it is known which products the int8 graph has."""
_FORMAT: Final = 4
"""Version of the int8 graphs that are made here; other versions are not used."""
_WEIGHTS: Final = "int8.data"
_BYTES_PER_WEIGHT: Final = 2
"""On disk: the integers, and the same packed."""
_MOST_DIFFERENCE: Final = 0.1
"""Most that features of a tower with 8-bit products may differ, relative to their norm: up to 0.04 for tiny models."""
_SPARE_BYTES: Final = 64 << 20
"""What has to stay free on the disk beside an int8 graph."""


def int8_graph_path(
    bundle: Bundle, config: SessionConfig, progress: Progress = silent, *, make: bool = True
) -> Path | None:
    """The graph of a model with 8-bit products, for prompts: its copy in the cache, made now if necessary.

    Args:
        bundle: the model.
        config: how its graph is run.
        progress: receives the progress of making it; what it raises ends that, and nothing is left behind.
        make: whether to make it where the cache has none.

    Returns:
        The graph; None where the model can have none (`int8_graph_plan`), it could not be made, for example for
        lack of room on the disk (one warning says why), or it is not there and not to be made.
    """
    folder = _folder_of(bundle)
    if is_intact(folder):
        return folder / GRAPH_NAME
    if not make or not _made(bundle, "reads prompts", lambda: _write(folder, bundle, config, progress)):
        return None
    return folder / GRAPH_NAME


def _made(bundle: Bundle, what: str, write: Callable[[], None]) -> bool:
    """Write an int8 graph; whether there is one now."""
    try:
        write()
    except CannotRewriteError:
        return False
    except (OSError, EdgeError, MemoryError) as error:
        reason = "there is too little memory" if isinstance(error, MemoryError) else str(error)
        _log.warning("%s %s without 8-bit products: %s", bundle.folder.name, what, reason)
        return False
    return True


def int8_graph_plan(bundle: Bundle) -> int | str:
    """Bytes of the weights that a model's int8 prompt graph will have on disk, or why it can have none, in a few words.

    Raises:
        BundleError: the model's graph is not an ONNX model.
    """
    try:
        editor = GraphEditor(bundle.graph)
        serve_plain_passes(editor, keep_computed=True)
        return _BYTES_PER_WEIGHT * find_products(editor).weights
    except CannotRewriteError as error:
        return str(error)


def verify_int8_graph(bundle: Bundle) -> bool:
    """Compare all bytes of a model's int8 graph with what was written; a damaged one is not used again.

    Returns:
        Whether there is an int8 graph.

    Raises:
        BundleError: it is damaged.
    """
    return verify_folder(_folder_of(bundle))


def int8_graph_bytes(graph: Path) -> int:
    """Bytes on disk that an int8 graph takes beside the model's own files."""
    return sum((graph.parent / name).stat().st_size for name in (GRAPH_NAME, _WEIGHTS, RECORD_NAME))


def _folder_of(bundle: Bundle) -> Path:
    return packed_folder("prompt-int8", _FORMAT, bundle.fingerprint, RUNTIME_BUILD, processor())


def _write(folder: Path, bundle: Bundle, config: SessionConfig, progress: Progress) -> None:
    """Make an int8 graph.

    Raises:
        BundleError: the model's files are damaged.
        CannotRewriteError: the model can have none.
        OSError: the disk has no room.
    """
    progress(STAGE, 0.0)
    limits = NARROW_RANGE if products_overflow() else FULL_RANGE
    editor, source, found = _chosen_products(bundle, config, limits)
    progress(STAGE, _CHOOSING)
    with written_folder(folder, _needed_bytes(editor, found)) as staging:
        _add_integers(editor, found, limits, staging, progress)
        attend_from_last(editor, SELECTED)
        editor.drop_unused(keep_inputs=False)
        _share_weights(editor, source, staging)
        (staging / GRAPH_NAME).write_bytes(editor.serialized())
    progress(STAGE, 1.0)


def _needed_bytes(editor: GraphEditor, found: Int8Products) -> int:
    """Bytes of the disk that an int8 graph needs."""
    return _BYTES_PER_WEIGHT * found.weights + int(editor.model.ByteSize()) + _SPARE_BYTES


def _add_integers(
    editor: GraphEditor, found: Int8Products, limits: IntegerRange, folder: Path, progress: Progress = silent
) -> None:
    """Let products be of integers, which are written into a folder."""
    with (folder / _WEIGHTS).open("xb") as file:
        done = 0
        for each in found.products:
            factors = {"column_factors": each.column_factors, "row_factors": each.row_factors}
            integers, scales = to_integers(each.matrix, limits.weight, rows=each.rows, **factors)
            editor.add(write_packed(file, f"{each.name}.int8", integers, limits.activation))
            editor.add(tensor(f"{each.name}.int8.scales", scales))
            done += integers.size
            progress(STAGE, _CHOOSING + (0.95 - _CHOOSING) * done / found.weights)
    use_integers(editor, found, limits)


def int8_tower_path(bundle: Bundle, inputs: Mapping[str, npt.NDArray[Any]], config: SessionConfig) -> Path | None:
    """The vision tower of a model with 8-bit products: its copy in the cache, made now if necessary.

    Args:
        bundle: the model.
        inputs: inputs of the tower for an image. Where its features differ by more than `_MOST_DIFFERENCE` from those
            of the model's own tower, the copy has no 8-bit products.
        config: how the tower is run.

    Returns:
        The graph; None where the tower can have none, or it could not be made (one warning says why).
    """
    folder = packed_folder("tower-int8", _FORMAT, bundle.fingerprint, RUNTIME_BUILD, processor())
    made = is_intact(folder) or _made(bundle, "sees", lambda: _write_tower(folder, bundle, inputs, config))
    return folder / VISION_GRAPH_NAME if made else None


def _write_tower(folder: Path, bundle: Bundle, inputs: Mapping[str, npt.NDArray[Any]], config: SessionConfig) -> None:
    """Make the tower; errors as for `_write`."""
    source = bundle.graph.with_name(VISION_GRAPH_NAME)
    limits = NARROW_RANGE if products_overflow() else FULL_RANGE
    editor, plain = GraphEditor(source), GraphEditor(source)
    found = find_products(editor)
    with written_folder(folder, _needed_bytes(editor, found)) as staging:
        _add_integers(editor, found, limits, staging)
        editor.drop_unused(keep_inputs=True)
        graph = staging / VISION_GRAPH_NAME
        _share_weights(editor, source, staging)
        graph.write_bytes(editor.serialized())
        rounded, own = (load_graph(each, config)[0].run(None, dict(inputs))[0] for each in (graph, source))
        if np.linalg.norm(rounded - own) > _MOST_DIFFERENCE * np.linalg.norm(own):
            _log.warning("%s sees without 8-bit products, which are too coarse for its tower", bundle.folder.name)
            _share_weights(plain, source, staging)
            graph.write_bytes(plain.serialized())


def _chosen_products(
    bundle: Bundle, config: SessionConfig, limits: IntegerRange
) -> tuple[GraphEditor, Path, Int8Products]:
    """The graph of a model without a bias, with its factors for outliers, a file beside its weights, and the products
    that 8 bits suffice for.

    Raises:
        EdgeError: the model cannot be run.
        CannotRewriteError: it can have no int8 graph.
    """
    samples: dict[str, InputSample] = {}
    coarse: frozenset[str] = frozenset()
    while True:
        editor, source = _packed(bundle)
        serve_plain_passes(editor, keep_computed=True)
        found = find_products(editor, coarse)
        if not samples:
            channels = {each.inputs: each.matrix.columns for each in found.products}
            samples = sample_inputs(*_packed(bundle), bundle, config, channels)
        more = too_coarse(editor, found, samples, limits)
        if not more:
            return editor, source, found
        coarse |= more


def _share_weights(editor: GraphEditor, source: Path, folder: Path) -> None:
    """Link the data files beside a graph into a folder, and refer to them; where there are no links, copy the weights.

    The files are those that the model is loaded from, so that their pages are in memory once.
    """
    names: dict[str, str] = {}
    for each in editor.graph.initializer:
        location = next((entry for entry in each.external_data if entry.key == "location"), None)
        if location is None or location.value == _WEIGHTS:
            continue
        if location.value not in names:
            names[location.value] = f"shared-{len(names)}.data"
            data, link = source.parent / location.value, folder / names[location.value]
            try:
                if not link.exists():
                    os.link(data, link)
            except OSError:  # this file system, or one of two, has no second names of files
                shutil.copyfile(data, link)
        location.value = names[location.value]


def _packed(bundle: Bundle) -> tuple[GraphEditor, Path]:
    """The graph of a model over its weights as packed for this machine, if there are such, and a file beside them."""
    source, model = prepacked_graph(bundle), read_model(bundle.graph)
    stored = {each.name: each for each in read_model(source).graph.initializer}
    external = [each for each in model.graph.initializer if each.external_data]
    if any(each.name not in stored for each in external):
        return GraphEditor(bundle.graph), bundle.graph
    for each in external:
        each.CopyFrom(stored[each.name])
    return GraphEditor(source, model.SerializeToString()), source
