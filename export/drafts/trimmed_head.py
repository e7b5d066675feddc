"""A draft model's head with few of its tokens (VocabTrim, Goel et al. 2025; FR-Spec, Zhao et al. 2025).

A draft's guesses are checked anyway, so its head need not know every token: one that it cannot say is only guessed
wrong, and the rows it does without need not be read at each of its steps. The rows that stay are those of the whole
head, bit for bit: codes, scales and zero points of a row are its own. A head that shared the embedding's matrix gets
rows of its own; the embedding stays whole, so a trimmed draft reads every token. Which tokens the rows stand for is
written beside the graph (`models.bundle.MAP_NAME`), in ascending order.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import ExportError, InputError
from ...models.atomic import write_atomically
from ...models.bundle import COMPANIONS, GRAPH_NAME, MAP_NAME, WEIGHTS_NAME, Bundle, digest_file
from ...models.manifest import MANIFEST_NAME, Architecture, Manifest
from ..check.contract_session import ContractSession
from ..graph import inputs_outputs
from ..graph.weight_file import WeightFile
from ..upgrade.describe import bits_per_weight, weight_matrices
from ..upgrade.edit.editable import EditableGraph, Node
from ..upgrade.edit.tensor_writers import InPlace, ToFile
from ..upgrade.selected_logits import find_lm_head

TokenIds = npt.NDArray[np.int64]

_BY_ROW: Final = (1, 2, 3, 5)
"""Inputs of MatMulNBits that have a row, or a part, for each output: codes, scales, zero points, bias."""
_TOLERANCE: Final = 1e-4
"""Largest difference of a kept logit, in units of the logits' spread where that exceeds 1."""
_COMPARED: Final = 8
"""Tokens whose logits are compared."""


def trim_head(graph: EditableGraph, kept: TokenIds) -> None:
    """Leave of the head the rows of some tokens, in the order of `kept`, int64 [n], which are all different.

    Raises:
        BundleError: the graph has no head.
        ExportError: the head is of a kind whose rows cannot be taken apart.
    """
    head = find_lm_head(graph, inputs_outputs.LOGITS)
    tokens = head_tokens(graph)
    if head.op == "MatMulNBits":
        for index in _BY_ROW:
            if head.input(index):
                _take(graph, head, index, kept, tokens, axis=0)
        graph.set_attribute(head, "N", kept.size)
    elif head.op in ("MatMul", "Gemm"):
        _take(graph, head, 1, kept, tokens, axis=0 if head.attribute("transB", 0) else 1)
        if head.input(2) and graph.tensors[head.input(2)].shape[-1:] == (tokens,):
            _take(graph, head, 2, kept, tokens, axis=-1)
    else:
        raise ExportError(f"a head of {head.op} cannot be trimmed", "leave --draft-vocab out")
    after = graph.consumers(head.output(0))
    while after:
        for index, name in enumerate(after[0].inputs):
            if name in graph.tensors and graph.tensors[name].shape[-1:] == (tokens,):
                _take(graph, after[0], index, kept, tokens, axis=-1)
        after = graph.consumers(after[0].output(0))
    info = graph.outputs[inputs_outputs.LOGITS]
    info.type.tensor_type.shape.dim[-1].dim_value = kept.size
    graph.forget_types()
    graph.sweep()


def head_tokens(graph: EditableGraph) -> int:
    """How many logits a graph gives.

    Raises:
        ExportError: it does not say.
    """
    shape = graph.shape(inputs_outputs.LOGITS)
    if not shape or not isinstance(shape[-1], int):
        raise ExportError("the draft's graph does not say how many tokens its head has", "export the draft again")
    return shape[-1]


def _take(graph: EditableGraph, node: Node, index: int, kept: TokenIds, tokens: int, axis: int) -> None:
    """Let a node read the part of a constant that belongs to the kept tokens."""
    name = node.input(index)
    array = graph.array(name)
    if array is None:
        raise ExportError(f"a head whose input {name} is computed cannot be trimmed", "leave --draft-vocab out")
    if array.shape[axis] != tokens:  # scales and zero points may be written without their dimensions
        array = array.reshape(tokens, -1)
    part = np.take(array, kept, axis)
    graph.set_input(node, index, graph.add_tensor(f"head.{name.rpartition('.')[2]}.kept", part))


def write_trimmed(whole: Bundle, folder: Path, kept: TokenIds) -> None:
    """Write a draft's bundle with a trimmed head into a folder, new or empty.

    Args:
        whole: the draft with all of its head; it has a manifest.
        folder: where the new one goes.
        kept: int64 [n], ascending, ids of its own and the target's tokens.

    Raises:
        ExportError: the head cannot be trimmed, or the result does not give the whole one's logits.
        InputError: the ids are not ascending ones of the head.
        OSError: the disk refused a write.
    """
    if whole.manifest is None:
        raise InputError(f"{whole.folder} has no {MANIFEST_NAME}", "export the draft again")
    graph = EditableGraph.open(whole.graph)
    _require_ascending(kept, head_tokens(graph))
    trim_head(graph, kept)
    linears = weight_matrices(graph, inputs_outputs.LOGITS)
    folder.mkdir(parents=True, exist_ok=True)
    with WeightFile(folder / WEIGHTS_NAME) as data:
        model = graph.model(ToFile(data, lambda _: None))
        files = {WEIGHTS_NAME: data.digest()}
    (folder / GRAPH_NAME).write_bytes(model.SerializeToString())
    np.save(folder / MAP_NAME, kept)
    for name in COMPANIONS:
        if (source := whole.file(name)) is not None:
            shutil.copyfile(source, folder / name)
    architecture = whole.manifest.architecture
    _require_same(whole.folder, folder, architecture, kept)
    names = (GRAPH_NAME, MAP_NAME, *COMPANIONS)
    files |= {name: digest_file(folder / name) for name in names if (folder / name).is_file()}
    manifest = replace(
        whole.manifest,
        architecture=replace(architecture, tied_head=False),
        bits_per_weight=bits_per_weight(linears),
        files=files,
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")


def trim_own_draft(folder: Path, kept: TokenIds) -> None:
    """Trim the head of the draft that a bundle's manifest names, if that is its own graph without some parts.

    The kept rows go into the draft's graph itself: all else stays in the weights that it shares with the target.

    Args:
        folder: the bundle's.
        kept: int64 [n], ascending, ids of the target's tokens.

    Raises:
        ExportError: the head cannot be trimmed.
        InputError: the bundle has no such draft with a whole head, or the ids are not ascending ones of it.
        OSError: the disk refused a write.
    """
    path = folder / MANIFEST_NAME
    manifest = Manifest.from_json(path.read_bytes(), str(path))
    if manifest.draft is None or not manifest.draft.graph or manifest.draft.d2t:
        raise InputError(f"{folder} has no draft of its own layers with a whole head", "make one first")
    place = folder / manifest.draft.graph
    graph = EditableGraph.open(place)
    _require_ascending(kept, head_tokens(graph))
    trim_head(graph, kept)
    write_atomically(place, graph.model(InPlace()).SerializeToString())
    np.save(folder / MAP_NAME, kept)
    named = replace(manifest.draft, d2t=MAP_NAME)
    files = {**manifest.files, **{name: digest_file(folder / name) for name in (manifest.draft.graph, MAP_NAME)}}
    write_atomically(path, replace(manifest, draft=named, files=files).to_json().encode())


def _require_ascending(kept: TokenIds, tokens: int) -> None:
    if kept.size == 0 or kept.min() < 0 or kept.max() >= tokens or (np.diff(kept) <= 0).any():
        raise InputError(f"the kept tokens are not ascending ids of a head of {tokens}", "keep at least one token")


def _require_same(whole: Path, trimmed: Path, architecture: Architecture, kept: TokenIds) -> None:
    """Check that a trimmed model gives the whole one's logits of the tokens that it kept."""
    count = min(_COMPARED, architecture.context)
    tokens = np.random.default_rng(0).integers(0, architecture.vocab_size, count)
    expected, found = (
        ContractSession(folder, architecture, count).forward(tokens, np.arange(count)) for folder in (whole, trimmed)
    )
    expected = expected[:, kept]
    difference = float(np.abs(expected - found).max())
    if not difference <= _TOLERANCE * max(1.0, float(expected.std())):
        raise ExportError(
            f"the trimmed draft's logits differ from the whole one's by {difference:.2g}",
            "this is a defect of the exporter: please report the draft",
        )
