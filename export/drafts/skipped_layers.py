"""Graph of a layer-skip draft, on the weights of its target.

The graph refers to the weights in the target's data file, and lacks the cache inputs of layers whose attention is
skipped. The remaining layers use the target's own KV cache (Zhang et al. 2024, "Draft & Verify"; Xia et al. 2025,
SWIFT): the draft writes slots after the committed ones, and the verifying pass overwrites them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper

from ...models.atomic import temporary_folder, write_atomically
from ...models.bundle import DRAFT_GRAPH_NAME, GRAPH_NAME, WEIGHTS_NAME, digest_file
from ...models.manifest import MANIFEST_NAME, DraftPairing, Manifest
from ..graph import inputs_outputs
from ..graph.head_parts import needed_nodes

_JOIN: Final = "SkipSimplifiedLayerNormalization"
"""Operator that adds a sub-layer's output to the residual stream and normalizes the sum."""
_SUM_OUTPUT: Final = 3
"""Index of its output with the sum."""
_PLAIN_JOIN: Final = ".residual"
"""Suffix of the name of an `Add` that does so without a norm."""


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
    """The sub-layers that may be skipped: those of all layers but the first and the last."""
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
    path = folder / MANIFEST_NAME
    manifest = Manifest.from_json(path.read_bytes(), str(path))
    model = without(onnx.load(folder / GRAPH_NAME, load_external_data=False), skipped)
    write_atomically(folder / DRAFT_GRAPH_NAME, model.SerializeToString())
    named = DraftPairing(".", graph=DRAFT_GRAPH_NAME, skips=tuple(map(str, sorted(skipped))))
    files = {**manifest.files, DRAFT_GRAPH_NAME: digest_file(folder / DRAFT_GRAPH_NAME)}
    write_atomically(path, replace(manifest, draft=named, files=files).to_json().encode())


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
        present(each.layer): past(each.layer)
        for each in skipped
        if each.kind is SubLayerKind.ATTENTION
        for present, past in (
            (inputs_outputs.present_key, inputs_outputs.past_key),
            (inputs_outputs.present_value, inputs_outputs.past_value),
        )
    }
    dropped = {*caches, inputs_outputs.HIDDEN_STATES, inputs_outputs.DRAFT_FEATURES}
    outputs = [value for value in graph.output if value.name not in dropped]
    nodes = needed_nodes(list(_bypassed(graph.node, joins)), [value.name for value in outputs])
    used = {name for node in nodes for name in node.input}
    graph.CopyFrom(
        GraphProto(
            name=graph.name,
            node=nodes,
            initializer=[tensor for tensor in graph.initializer if tensor.name in used],
            # The other inputs are the same for every graph, used or not.
            input=[value for value in graph.input if value.name not in caches.values()],
            output=outputs,
        )
    )
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
