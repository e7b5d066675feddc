"""Graph of a layer-skip draft, on the weights of its target.

The graph refers to the weights in the target's data file, and lacks the cache inputs of layers whose attention is
skipped. The remaining layers use the target's own KV cache (Zhang et al. 2024, "Draft & Verify"; Xia et al. 2025,
SWIFT): the draft writes slots after the committed ones, and the verifying pass overwrites them.

One session of the target serves all choices of skipped sub-layers. The graph gets a gate at every sub-layer that may be
skipped: a factor of 0 leaves the residual stream unchanged, which is what skipping the sub-layer does. A draft is
measured as it is used: it predicts after slots that the target wrote, not the draft. The whole target reads each text
once, and its slots stay in the cache; then every measured position runs in a slot after all of them, and attends to the
slots before its position and to itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from ...errors import InputError
from ...models.atomic import temporary_folder, write_atomically
from ...models.bundle import DRAFT_GRAPH_NAME, GRAPH_NAME, WEIGHTS_NAME, digest_file
from ...models.manifest import MANIFEST_NAME, Architecture, DraftPairing, Manifest
from ...runtime.text.turn_markers import TokenArray
from ..bundle_content import change_manifest
from ..check.contract_session import ContractSession
from ..graph import inputs_outputs
from ..graph.head_parts import needed_nodes, replace_content

_JOIN: Final = "SkipSimplifiedLayerNormalization"
"""Operator that adds a sub-layer's output to the residual stream and normalizes the sum."""
_SUM_OUTPUT: Final = 3
"""Index of its output with the sum."""
_PLAIN_JOIN: Final = ".residual"
"""Suffix of the name of an `Add` that does so without a norm."""
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
_GATES: Final = "gates"
_MAX_WIDTH: Final = 32
"""Largest number of positions of a pass, whose logits are in memory at a time."""
_MAX_SLOTS: Final = 1024
"""Largest number of slots of the cache that all texts share, with the slots of a pass."""
_MASKED: Final = np.float32(-1e9)


class SubLayerKind(StrEnum):
    """Kind of a sub-layer."""

    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"


@dataclass(frozen=True, order=True)
class SubLayer:
    """The attention or the feed-forward of one layer."""

    layer: int
    kind: SubLayerKind

    def __str__(self) -> str:
        return f"{self.layer}.{self.kind.value}"

    @property
    def join(self) -> str:
        """Name of the node that adds the sub-layer's output to the residual stream."""
        return f"layers.{self.layer}.{'mlp_norm' if self.kind is SubLayerKind.ATTENTION else 'next_norm'}"


def inner_sub_layers(layers: int) -> list[SubLayer]:
    """The sub-layers that may be skipped: all but the sub-layers of the first and the last layer."""
    return [SubLayer(layer, kind) for layer in range(1, layers - 1) for kind in SubLayerKind]


def write_layer_skip_draft(folder: Path, skipped: Collection[SubLayer]) -> None:
    """Add to a bundle a draft that is its own graph without some sub-layers, and name it in the manifest.

    Args:
        folder: The bundle's folder; its manifest then names this draft alone.
        skipped: Sub-layers of the graph to skip.

    Raises:
        BundleError: The folder is not a bundle.
        ValueError: The graph does not have one of the sub-layers.
        OSError: The disk refused a write.
    """
    model = without(onnx.load(folder / GRAPH_NAME, load_external_data=False), skipped)
    write_atomically(folder / DRAFT_GRAPH_NAME, model.SerializeToString())
    named = DraftPairing(".", graph=DRAFT_GRAPH_NAME, skips=tuple(map(str, sorted(skipped))))
    change_manifest(folder, [DRAFT_GRAPH_NAME], draft=named)


@contextmanager
def as_bundle(target: Path, manifest: Manifest, model: ModelProto) -> Iterator[Path]:
    """Yield a temporary bundle of another graph that shares the target's weights.

    It lies beside the target. After the block nothing should map the weights into memory, because Windows does not
    remove a file that is mapped under any of its names.
    """
    with temporary_folder(target.parent, "draft") as folder:
        (folder / GRAPH_NAME).write_bytes(model.SerializeToString())
        try:
            os.link(target / WEIGHTS_NAME, folder / WEIGHTS_NAME)
        except OSError:
            shutil.copyfile(target / WEIGHTS_NAME, folder / WEIGHTS_NAME)
        files = {GRAPH_NAME: digest_file(folder / GRAPH_NAME)}
        (folder / MANIFEST_NAME).write_text(replace(manifest, files=files, draft=None).to_json(), encoding="utf-8")
        yield folder


def without(model: ModelProto, skipped: Collection[SubLayer]) -> ModelProto:
    """Copy an exported graph without some of its sub-layers, whose input becomes their output.

    Args:
        model: A graph of `build_graph`; external weights stay in their file.
        skipped: Sub-layers of the graph to skip.

    Raises:
        ValueError: The graph does not have one of the sub-layers.
    """
    left = ModelProto()
    left.CopyFrom(model)
    graph = left.graph
    joins = {each.join for each in skipped}
    if missing := joins - {join_of(node) for node in graph.node}:
        raise ValueError(f"the graph has no {', '.join(sorted(missing))}")
    caches = {
        present: past
        for each in skipped
        if each.kind is SubLayerKind.ATTENTION
        for present, past in zip(
            inputs_outputs.present_cache(each.layer), inputs_outputs.past_cache(each.layer), strict=True
        )
    }
    dropped = {*caches, inputs_outputs.HIDDEN_STATES, inputs_outputs.DRAFT_FEATURES}
    outputs = [value for value in graph.output if value.name not in dropped]
    nodes = needed_nodes(list(_bypassed(graph.node, joins)), [value.name for value in outputs])
    # The other inputs are the same for every graph, used or not.
    replace_content(graph, nodes, [value for value in graph.input if value.name not in caches.values()], outputs)
    return left


def external_bytes(model: ModelProto) -> int:
    """Bytes of a model's external weights."""
    entries = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    return sum(int(entry.value) for entry in entries if entry.key == "length")


def _bypassed(nodes: Iterable[NodeProto], joins: Collection[str]) -> Iterator[NodeProto]:
    """Yield the nodes, without those in `joins`, whose outputs become the residual stream before the sub-layer."""
    replacements: dict[str, str] = {}
    for node in nodes:
        for index, name in enumerate(node.input):
            node.input[index] = replacements.get(name, name)
        if join_of(node) not in joins:
            yield node
        elif node.op_type == _JOIN:
            residual, weight = node.input[1:3]
            replacements[node.output[_SUM_OUTPUT]] = residual
            epsilon = next(each.f for each in node.attribute if each.name == "epsilon")
            yield helper.make_node(
                "SimplifiedLayerNormalization",
                [residual, weight],
                node.output[:1],
                name=node.name,
                axis=-1,
                epsilon=epsilon,
                stash_type=1,
            )
        else:
            replacements[node.output[0]] = node.input[1]


def join_of(node: NodeProto) -> str:
    """Name of a node that adds a sub-layer's output to the residual stream; empty for other nodes."""
    if node.op_type == _JOIN:
        return node.name
    return node.name.removesuffix(_PLAIN_JOIN) if node.op_type == "Add" and node.name.endswith(_PLAIN_JOIN) else ""


class SkipAgreement:
    """Measures the agreement of choices of skipped sub-layers on texts.

    The texts lie one after the other in one cache, and none attends to another. Positions are slots, since rotary
    attention does not depend on where a text begins.

    Args:
        bundle: The target's bundle.
        architecture: Its numbers.
        texts: Token ids, int64 [n] each; what exceeds the context or `_MAX_SLOTS` is left out.
        starts: For each text, the index of the first token that a draft would predict.
        max_positions: Largest number of positions to measure, spread evenly.

    Raises:
        ExportError: The graph does not run.
        InputError: No position can be measured.
    """

    def __init__(
        self,
        bundle: Path,
        architecture: Architecture,
        texts: Sequence[TokenArray],
        starts: Sequence[int],
        max_positions: int,
    ) -> None:
        self.sub_layers: Final = inner_sub_layers(architecture.layers)
        """Sub-layers that may be skipped."""
        self._width = min(_MAX_WIDTH, max(1, architecture.context // 4))
        room = min(architecture.context, _MAX_SLOTS) - self._width
        bounds = np.cumsum([0, *map(len, texts)])
        self._tokens = np.concatenate(texts)[:room]
        self._begins = np.repeat(bounds[:-1], np.diff(bounds))[:room]
        """Slot at which the text of each token begins, int64 [n]."""
        answers = (
            np.arange(begin + max(start - 1, 1), min(end, room) - 1)
            for begin, end, start in zip(bounds, bounds[1:], starts, strict=False)
        )
        predicted = np.concatenate([*answers])
        if not predicted.size:
            raise InputError("the texts have no answer to measure a draft on", "give longer ones")
        spread = np.linspace(0, predicted.size - 1, min(max_positions, predicted.size))
        self._measured = predicted[np.unique(spread.round().astype(np.int64))]
        """Slots of the positions that are measured, int64 [m]."""
        model = gated(onnx.load(bundle / GRAPH_NAME, load_external_data=False), self.sub_layers)
        self._session = ContractSession(bundle, self._tokens.size + self._width, model)
        self.preferred: Final = self._read()
        """The target's likeliest next token at each measured position, int64 [m]."""

    def agreement(self, skipped: Collection[SubLayer]) -> float:
        """Share of positions at which target and draft prefer the same token."""
        found = np.concatenate([logits.argmax(axis=1) for logits in self.logits(skipped)])
        return float(np.mean(found == self.preferred))

    def logits(self, skipped: Collection[SubLayer]) -> Iterator[Float32Array]:
        """The draft's logits at the measured positions, float32 [m, vocabulary], some positions at a time."""
        gates = np.array([each not in skipped for each in self.sub_layers], np.float32)
        slots = np.arange(self._tokens.size)
        for first in range(0, self._measured.size, self._width):
            positions = self._measured[first : first + self._width]
            before = (slots >= self._begins[positions, None]) & (slots < positions[:, None])
            bias = _bias(np.concatenate([before, np.eye(positions.size, dtype=np.bool_)], axis=1))
            every = np.arange(positions.size)
            yield self._session.run(self._tokens[positions], positions, bias, every, {_GATES: gates})

    def _read(self) -> Int64Array:
        """Run the whole target on the texts; returns its preferred tokens at the measured positions."""
        gates = np.ones(len(self.sub_layers), np.float32)
        preferred = []
        for start in range(0, self._tokens.size, self._width):
            positions = np.arange(start, min(start + self._width, self._tokens.size))
            slots = np.arange(positions[-1] + 1)
            bias = _bias((slots >= self._begins[positions, None]) & (slots <= positions[:, None]))
            wanted = self._measured[np.isin(self._measured, positions)] - start
            logits = self._session.run(self._tokens[positions], positions, bias, wanted, {_GATES: gates})
            preferred.append(logits.argmax(axis=1))
        return np.concatenate(preferred)


def gated(model: ModelProto, sub_layers: Sequence[SubLayer]) -> ModelProto:
    """Copy a graph and add an input `gates`, float32 [sub-layers], with a factor for each sub-layer's output."""
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    gates = {each.join: f"{_GATES}.{number}" for number, each in enumerate(sub_layers)}
    nodes = [helper.make_node("Split", [_GATES], list(gates.values()), name=_GATES, num_outputs=len(sub_layers))]
    for node in graph.node:
        if (gate := gates.get(join_of(node))) is not None:
            nodes.append(helper.make_node("Mul", [node.input[0], gate], [f"{gate}.product"], name=f"{gate}.product"))
            node.input[0] = f"{gate}.product"
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info(_GATES, TensorProto.FLOAT, [len(sub_layers)]))
    return made


def _bias(attended: npt.NDArray[np.bool_]) -> Float32Array:
    """Attention bias for a mask of attended slots."""
    bias: Float32Array = np.where(attended, np.float32(0), _MASKED)
    return bias
