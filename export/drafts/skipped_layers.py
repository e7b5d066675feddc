"""A draft made of the target itself: its graph without some attentions and feed-forwards, over the same weights.

The graph names the weights where they lie, in the target's data file, and lacks the cache inputs of the layers whose
attention is left out. What is left reads and writes the target's own cache rows (Zhang et al. 2024, "Draft & Verify";
Xia et al. 2025, SWIFT): a draft writes behind the committed rows, and the pass that verifies it writes over them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper

from ...models.atomic import write_atomically
from ...models.bundle import DRAFT_GRAPH_NAME, GRAPH_NAME, WEIGHTS_NAME, digest_file
from ...models.manifest import MANIFEST_NAME, DraftPairing, Manifest
from ..graph import inputs_outputs
from ..graph.needed_nodes import needed_nodes

_JOIN: Final = "SkipSimplifiedLayerNormalization"
_TOTAL: Final = 3
"""Its output of the sum."""
_PLAIN_JOIN: Final = ".residual"
"""What the name of a join without a norm ends with."""


class Part(str, Enum):
    """Half of a layer; the residual stream goes around it."""

    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"


@dataclass(frozen=True, order=True)
class SubLayer:
    """The attention or the feed-forward of one layer."""

    layer: int
    part: Part

    def __str__(self) -> str:
        return f"{self.layer}.{self.part.value}"

    @property
    def join(self) -> str:
        """Name of the node behind it, which adds what it gives to the residual stream."""
        return f"layers.{self.layer}.{'mlp_norm' if self.part is Part.ATTENTION else 'next_norm'}"


def inner_parts(layers: int) -> list[SubLayer]:
    """All that may be left out of a decoder: everything but its first and its last layer."""
    return [SubLayer(layer, part) for layer in range(1, layers - 1) for part in Part]


def write_own_draft(folder: Path, skipped: Collection[SubLayer]) -> None:
    """Add to a bundle a draft that is its own graph without some parts, and name it in the manifest.

    Args:
        folder: the bundle's; a draft that its manifest named before is forgotten.
        skipped: parts that the graph has.

    Raises:
        BundleError: the folder is no bundle.
        ValueError: the graph does not have one of the parts.
        OSError: the disk refused a write.
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
    """A bundle of another graph over a target's weights, for the length of a block."""
    with tempfile.TemporaryDirectory(prefix=".draft-", dir=target) as name:
        folder = Path(name)
        (folder / GRAPH_NAME).write_bytes(model.SerializeToString())
        try:
            os.link(target / WEIGHTS_NAME, folder / WEIGHTS_NAME)
        except OSError:
            shutil.copyfile(target / WEIGHTS_NAME, folder / WEIGHTS_NAME)
        files = {GRAPH_NAME: digest_file(folder / GRAPH_NAME)}
        (folder / MANIFEST_NAME).write_text(replace(manifest, files=files, draft=None).to_json(), encoding="utf-8")
        yield folder


def without(model: ModelProto, skipped: Collection[SubLayer]) -> ModelProto:
    """A graph of the contract without some of its parts, for which their inputs go on as they are.

    Args:
        model: as `build_graph` makes it; it stays as it is. Weights in another file stay there.
        skipped: parts that the graph has.

    Raises:
        ValueError: it does not have one of them.
    """
    left = ModelProto()
    left.CopyFrom(model)
    graph = left.graph
    joins = {part.join for part in skipped}
    if missing := joins - {join_of(node) for node in graph.node}:
        raise ValueError(f"the graph has no {', '.join(sorted(missing))}")
    caches = {
        name(part.layer): port(part.layer)
        for part in skipped
        if part.part is Part.ATTENTION
        for name, port in (
            (inputs_outputs.present_key, inputs_outputs.past_key),
            (inputs_outputs.present_value, inputs_outputs.past_value),
        )
    }
    outputs = [port for port in graph.output if port.name not in caches]
    nodes = needed_nodes(list(_going_past(graph.node, joins)), [port.name for port in outputs])
    used = {name for node in nodes for name in node.input}
    graph.CopyFrom(
        GraphProto(
            name=graph.name,
            node=nodes,
            initializer=[tensor for tensor in graph.initializer if tensor.name in used],
            # What a pass is told is the same for every graph, needed or not.
            input=[port for port in graph.input if port.name not in caches.values()],
            output=outputs,
        )
    )
    return left


def external_bytes(model: ModelProto) -> int:
    """Bytes of a model's weights in another file."""
    entries = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    return sum(int(entry.value) for entry in entries if entry.key == "length")


def _going_past(nodes: Iterable[NodeProto], joins: Collection[str]) -> Iterator[NodeProto]:
    """The nodes, of which those that join a part to the residual stream let the stream go past it."""
    instead: dict[str, str] = {}
    for node in nodes:
        for index, name in enumerate(node.input):
            node.input[index] = instead.get(name, name)
        if join_of(node) not in joins:
            yield node
        elif node.op_type == _JOIN:
            residual, weight = node.input[1:3]
            instead[node.output[_TOTAL]] = residual
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
            instead[node.output[0]] = node.input[1]


def join_of(node: NodeProto) -> str:
    """What a node is called that joins something to the residual stream; empty for others."""
    if node.op_type == _JOIN:
        return node.name
    return node.name.removesuffix(_PLAIN_JOIN) if node.op_type == "Add" and node.name.endswith(_PLAIN_JOIN) else ""
