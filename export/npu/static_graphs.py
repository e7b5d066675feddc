"""Writing the static graphs of a bundle beside model.onnx, and checking them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onnx import ModelProto

from ...models.graph_variant import DeviceKind, Precision, VariantFile
from ...models.manifest import FileDigest
from ...models.progress import Progress
from ..bundle_content import BundleContent
from ..check.static_parity import check_static_graphs
from ..graph.initializers import WeightFile
from .npu_request import NpuRequest, StaticShape
from .npu_weights import NpuWeights
from .static_decoder import build_static_graph

NPU_WEIGHTS_NAME: Final = "model_npu.onnx.data"
_STAGE: Final = "writing NPU graphs"


@dataclass(frozen=True)
class StaticGraphFiles:
    """The static graphs of a bundle that have just been written."""

    variants: tuple[VariantFile, ...]
    """The graphs, for the manifest."""
    data: FileDigest
    """Digest of `NPU_WEIGHTS_NAME`, the data file that they share."""
    embedding_bytes: int
    """Bytes of the embedding in that file."""

    def note(self) -> str:
        """What was written, for the user."""
        widths, contexts = (
            ", ".join(map(str, sorted({getattr(each, name) for each in self.variants})))
            for name in ("width", "context")
        )
        return (
            f"{len(self.variants)} graphs for NPUs, of widths {widths} and contexts {contexts}: "
            f"{self.data.bytes / 1e6:.1f} MB beside the shared weights, "
            f"of which {self.embedding_bytes / 1e6:.1f} MB are the embedding in float16"
        )


def write_static_graphs(
    folder: Path, content: BundleContent, model: ModelProto, request: NpuRequest, progress: Progress
) -> StaticGraphFiles:
    """Write the static graphs of a bundle and their data file, and compare them with model.onnx.

    Args:
        folder: the bundle's folder, which has the data file of model.onnx.
        content: the model that was exported.
        model: model.onnx, whose accuracy levels are changed.
        request: widths and contexts.
        progress: receives the stages.

    Raises:
        CheckpointError: a tensor cannot be read.
        ExportError: a graph does not compute what model.onnx does.
        InputError: the model cannot be expressed, or a context is longer than it serves.
        OSError: the disk refused a read or a write.
    """
    request.require_expressible(content.config, content.context)
    shapes = request.shapes(content.context)
    positions = min(content.context, max(shape.capacity + shape.width for shape in shapes))
    with WeightFile(folder / NPU_WEIGHTS_NAME) as data:
        weights = NpuWeights(model.graph.initializer, folder, content.source, data)
        for number, shape in enumerate(shapes, 1):
            graph = build_static_graph(content.config, content.plan, weights, shape, positions, content.context)
            (folder / shape.file).write_bytes(graph.SerializeToString())
            progress(_STAGE, number / len(shapes))
        digest = data.digest()
    check_static_graphs(folder, content.config, model, _checked(shapes), progress)
    variants = [
        VariantFile(DeviceKind.NPU, shape.file, Precision.FLOAT16, shape.width, shape.capacity) for shape in shapes
    ]
    return StaticGraphFiles(tuple(variants), digest, weights.embedding_bytes)


def _checked(shapes: Sequence[StaticShape]) -> list[StaticShape]:
    """Every width at the shortest context, and the narrowest at the longest: other graphs differ in sizes alone."""
    shortest, longest = shapes[0].capacity, shapes[-1].capacity
    checked = [shape for shape in shapes if shape.capacity == shortest]
    return checked if longest == shortest else [*checked, StaticShape(shapes[0].width, longest)]
