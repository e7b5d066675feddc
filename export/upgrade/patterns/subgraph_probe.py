"""Experiments on parts of a graph: what a piece computes, found out by running it.

An exporter may write one and the same thing (a causal mask, a rotation of heads) in many ways, so the passes do not
compare nodes with patterns. They cut a piece out of the graph, feed it numbers of their own and look at what comes out.
Two things make the pieces small:

- Weight matrices and embedding tables are replaced by zeros. Positions, masks and shapes do not depend on them.
- Extents of values that depend on the tokens are learned once, in two runs of the whole graph so emptied. A `Shape` of
  such a value is then a constant, and cuts off everything that stands before it.

A run is one sequence of `rows` new positions after `past` cached ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ....errors import BundleError, ExportError
from ...check.contract_session import evaluate
from ..edit.editable import EditableGraph, Node
from ..edit.tensors import Array

Extent = int | Literal["rows", "past", "total"]
"""An extent of a value: a number, or what it follows."""

_FIRST: Final = (7, 13)
_SECOND: Final = (11, 19)
"""Rows and past of the two runs that extents are learned from; no sum or number equals another."""

_HIDDEN: Final = -1e4
"""Added to the score of what must not be seen; half precision holds it."""


@dataclass(frozen=True)
class Moment:
    """What a run is about."""

    rows: int
    past: int

    @property
    def total(self) -> int:
        """Positions in all."""
        return self.rows + self.past

    def extent(self, extent: Extent) -> int:
        """The number that an extent is in this run."""
        return extent if isinstance(extent, int) else int(getattr(self, extent))


class Probe:
    """Runs pieces of a graph; the graph must not change meanwhile."""

    def __init__(self, graph: EditableGraph) -> None:
        """Learn the extents of the graph's values.

        Raises:
            BundleError: the graph's inputs are not those of a decoder with a cache, or it cannot be run.
        """
        self.graph = graph
        self.order: dict[Node, int] = {node: index for index, node in enumerate(graph.in_order())}
        self._inputs = {name: _InputKind.of(info) for name, info in graph.inputs.items()}
        self.tokens_of: frozenset[str] = self._following(
            name for name, kind in self._inputs.items() if kind.role == "tokens"
        )
        """Values that depend on which tokens are read, and so on the weights."""
        self._learned: dict[str, tuple[Extent, ...]] = {}
        self._learn()

    def extents(self, name: str) -> tuple[Extent, ...] | None:
        """Extents of a value; None if they follow neither rows nor past, or are not known."""
        tensor = self.graph.tensors.get(name)
        return tensor.shape if tensor is not None else self._learned.get(name)

    def run(self, wanted: Sequence[str], moment: Moment, given: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Values of the graph in one run.

        Args:
            wanted: names of the values.
            moment: rows and past of the run.
            given: values to start from in place of what makes them.

        Raises:
            ExportError: the piece cannot be run.
        """
        piece = _Piece(self, moment, given or {})
        return piece.run(wanted)

    def input_value(self, name: str, moment: Moment) -> Array:
        """What a graph input is fed: tokens 0, a mask of ones, positions in order, an empty cache."""
        return self._inputs[name].value(moment)

    def _following(self, names: Iterable[str]) -> frozenset[str]:
        """The values that are computed from some, other than through their shape."""
        found = set(names)
        waiting = list(found)
        while waiting:
            for node in self.graph.consumers(waiting.pop()):
                if node.op not in ("Shape", "Size"):
                    fresh = [name for name in node.outputs if name and name not in found]
                    found.update(fresh)
                    waiting += fresh
        return frozenset(found)

    def _learn(self) -> None:
        names = [*self.graph.inputs, *(name for node in self.order for name in node.outputs if name)]
        try:
            shapes = [_Piece(self, Moment(*each), {}).shapes(names) for each in (_FIRST, _SECOND)]
        except ExportError as error:
            raise BundleError(
                f"the model's graph does not run on one sequence with a cache: {error.what}",
                "such a graph cannot be upgraded",
            ) from error
        for name in names:
            pairs = [list(each[name]) for each in shapes]
            if len(pairs[0]) == len(pairs[1]):
                extents = [_extent(int(first), int(second)) for first, second in zip(*pairs, strict=True)]
                known = tuple(each for each in extents if each is not None)
                if len(known) == len(extents):
                    self._learned[name] = known


def _extent(first: int, second: int) -> Extent | None:
    """What an extent follows that was `first` and `second` in the two runs."""
    seen: dict[tuple[int, int], Extent] = {
        (_FIRST[0], _SECOND[0]): "rows",
        (_FIRST[1], _SECOND[1]): "past",
        (sum(_FIRST), sum(_SECOND)): "total",
    }
    return first if first == second else seen.get((first, second))


@dataclass(frozen=True)
class _InputKind:
    """What a graph input is for, told by its name and rank."""

    role: Literal["tokens", "mask", "positions", "cache", "flag", "count"]
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    """Extents as declared, -1 where open."""

    @classmethod
    def of(cls, info: ValueInfoProto) -> _InputKind:
        tensor = info.type.tensor_type
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        shape = tuple(each.dim_value if each.dim_value > 0 else -1 for each in tensor.shape.dim)
        name = info.name
        if name == "input_ids":
            return cls("tokens", dtype, shape)
        if name == "attention_mask":
            return cls("mask", dtype, shape)
        if name == "position_ids":
            return cls("positions", dtype, shape)
        if dtype == np.bool_:
            return cls("flag", dtype, shape)
        if dtype.kind == "f" and len(shape) >= 4:
            return cls("cache", dtype, shape)
        if name == "num_logits_to_keep":
            return cls("count", dtype, shape)
        raise BundleError(f"the model has an input {name} that is not known", "such a graph cannot be upgraded")

    def value(self, moment: Moment) -> Array:
        if self.role == "tokens":
            return np.zeros((1, moment.rows), self.dtype)
        if self.role == "mask":
            return mask_value(self.dtype, len(self.shape), moment)
        if self.role == "positions":
            positions = np.arange(moment.past, moment.total).astype(self.dtype)
            return np.broadcast_to(positions, (*([1] if len(self.shape) < 3 else [3, 1]), moment.rows))
        if self.role == "flag":
            return np.ones([max(each, 1) for each in self.shape], self.dtype)
        if self.role == "count":
            return np.full([max(each, 1) for each in self.shape], moment.rows, self.dtype)
        return np.zeros(self._cache_shape(moment), self.dtype)

    def _cache_shape(self, moment: Moment) -> tuple[int, ...]:
        """The open extent that stands last is the length, any other the batch."""
        opened = [index for index, extent in enumerate(self.shape) if extent < 0]
        shape = [1 if extent < 0 else extent for extent in self.shape]
        if opened:
            shape[opened[-1]] = moment.past
        return tuple(shape)


def mask_value(dtype: np.dtype[np.generic], rank: int, moment: Moment) -> Array:
    """What an attention mask says of a text without padding.

    Ones [1, total]; or [1, 1, rows, total]: what is added to the score of a row and a position, or whether it counts.
    """
    if rank != 4:
        return np.ones((1, moment.total), dtype)
    slots = np.arange(moment.total)
    seen = slots <= slots[moment.past :, None]
    cells = np.where(seen, 0, _HIDDEN) if dtype.kind == "f" else seen
    return cells.astype(dtype)[None, None]


class _Piece:
    """A model made of what some values need."""

    def __init__(self, probe: Probe, moment: Moment, given: Mapping[str, Array]) -> None:
        self._probe = probe
        self._graph = probe.graph
        self._moment = moment
        self._given = given
        self._nodes: list[NodeProto] = []
        self._tensors: list[TensorProto] = []
        self._feeds: dict[str, Array] = {}
        self._made: set[str] = set()

    def run(self, wanted: Sequence[str]) -> dict[str, Array]:
        self._collect(wanted)
        # A graph output cannot be a graph input or a constant, so every value is handed out under another name.
        handed = [f"wanted.{index}" for index in range(len(wanted))]
        nodes = [helper.make_node("Identity", [name], [out]) for name, out in zip(wanted, handed, strict=True)]
        return dict(zip(wanted, self._evaluate(nodes, handed), strict=True))

    def shapes(self, wanted: Sequence[str]) -> dict[str, Array]:
        self._collect(wanted)
        handed = [f"wanted.{index}" for index in range(len(wanted))]
        nodes = [helper.make_node("Shape", [name], [out]) for name, out in zip(wanted, handed, strict=True)]
        return dict(zip(wanted, self._evaluate(nodes, handed), strict=True))

    def _evaluate(self, nodes: Sequence[NodeProto], outputs: Sequence[str]) -> list[Array]:
        graph = GraphProto(
            name="piece",
            node=[*self._nodes, *nodes],
            initializer=self._tensors,
            input=[
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
                for name, value in self._feeds.items()
            ],
            output=[ValueInfoProto(name=name) for name in outputs],
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(domain, number) for domain, number in self._graph.opsets.items()],
            ir_version=10,
        )
        return evaluate(model, {name: np.ascontiguousarray(value) for name, value in self._feeds.items()})

    def _collect(self, wanted: Sequence[str]) -> None:
        """Take in the nodes that `wanted` needs, in order."""
        needed: set[Node] = set()
        waiting = list(wanted)
        while waiting:
            name = waiting.pop()
            if name in self._made:
                continue
            self._made.add(name)
            node = self._graph.producer(name)
            if name in self._given:
                self._feeds[name] = self._given[name]
            elif node is not None:
                if node not in needed and not self._stands_in(node):
                    needed.add(node)
                    waiting += self._inputs_of(node)
            elif name in self._graph.tensors:
                self._tensors.append(numpy_helper.from_array(np.asarray(self._graph.array(name)), name))
            elif name in self._graph.inputs:
                self._feeds[name] = self._probe.input_value(name, self._moment)
            else:
                raise ExportError(f"nothing makes the value {name}")
        order = self._probe.order
        self._nodes += [each for node in sorted(needed, key=lambda node: order[node]) for each in self._emptied(node)]

    def _inputs_of(self, node: Node) -> list[str]:
        matrix = matrix_read(self._graph, node)
        if matrix is None or node.output(0) not in self._probe.tokens_of:
            return [each for each in (*node.inputs, *node.captured) if each]
        return [matrix.source]

    def _stands_in(self, node: Node) -> bool:
        """Put something small in the place of a node whose value follows from extents alone: a shape, and a value whose
        weights would have to be read."""
        if node.op == "Shape":
            extents = self._probe.extents(node.input(0))
            if extents is None or node.input(0) in self._given:
                return False
            whole = [self._moment.extent(each) for each in extents]
            shape = np.array(whole[node.attribute("start", 0) : node.attribute("end")], np.int64)
            self._tensors.append(numpy_helper.from_array(shape, node.output(0)))
            return True
        matrix = matrix_read(self._graph, node)
        if matrix is None or node.output(0) not in self._probe.tokens_of:
            return False
        extents = self._probe.extents(node.output(0))
        if extents is None:
            return False
        zeros = np.zeros([self._moment.extent(each) for each in extents], matrix.dtype)
        self._tensors.append(numpy_helper.from_array(zeros, node.output(0)))
        return True

    def _emptied(self, node: Node) -> list[NodeProto]:
        """The node, or nodes that make zeros of the same extents without its matrix."""
        matrix = matrix_read(self._graph, node)
        if matrix is None or node.output(0) not in self._probe.tokens_of:
            return [node.proto()]
        stem, out = f"emptied.{node.output(0)}", node.output(0)
        self._tensors.append(numpy_helper.from_array(np.zeros((1, matrix.width), matrix.dtype), f"{stem}.row"))
        if node.op == "Gather":
            self._tensors.append(numpy_helper.from_array(np.zeros((), np.int64), f"{stem}.zero"))
            return [
                helper.make_node("Cast", [matrix.source], [f"{stem}.ids"], to=TensorProto.INT64),
                helper.make_node("Mul", [f"{stem}.ids", f"{stem}.zero"], [f"{stem}.first"]),
                helper.make_node("Gather", [f"{stem}.row", f"{stem}.first"], [out]),
            ]
        for name, value in (("start", 0), ("stop", 1), ("axis", -1)):
            self._tensors.append(numpy_helper.from_array(np.array([value], np.int64), f"{stem}.{name}"))
        return [
            helper.make_node(
                "Slice", [matrix.source, *(f"{stem}.{each}" for each in ("start", "stop", "axis"))], [f"{stem}.x"]
            ),
            helper.make_node("MatMul", [f"{stem}.x", f"{stem}.row"], [out]),
        ]


@dataclass(frozen=True)
class MatrixRead:
    """A constant matrix that a node multiplies its input with, or looks up rows of."""

    source: str
    """The node's other input."""
    width: int
    """Extent of the last axis of what comes out."""
    dtype: np.dtype[np.generic]
    """Of what comes out."""


def matrix_read(graph: EditableGraph, node: Node) -> MatrixRead | None:
    """The matrix a node reads; None if it reads none."""
    if node.op == "MatMulNBits":
        scales = graph.tensors.get(node.input(2))
        if scales is None:
            return None
        return MatrixRead(node.input(0), node.attribute("N"), helper.tensor_dtype_to_np_dtype(scales.element_type))
    position = {"MatMul": 1, "Gemm": 1, "Gather": 0}.get(node.op)
    if position is None:
        return None
    name = node.input(position)
    transposed = graph.producer_of(name, "Transpose")
    tensor = graph.tensors.get(name if transposed is None else transposed.input(0))
    if tensor is None or len(tensor.shape) != 2:
        return None
    turned = node.op == "Gather" or bool(node.attribute("transB", 0)) != (transposed is not None)
    width = tensor.shape[1] if node.op == "Gather" else tensor.shape[0 if turned else 1]
    return MatrixRead(node.input(1 - position), width, helper.tensor_dtype_to_np_dtype(tensor.element_type))
