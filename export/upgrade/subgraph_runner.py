"""Runs parts of a graph on made-up values to find out what they compute.

An exporter may write the same thing (a causal mask, a rotary embedding) in many ways, so graph passes do not compare
nodes with templates. They cut a subgraph out of the graph, feed it values of their own and look at the results. Two
measures keep subgraphs small:

- Weight matrices and embedding tables are replaced by zeros. Positions, masks and shapes do not depend on them.
- Shapes of values that depend on the tokens are learned once, from two runs of the whole graph without its weights. A
  `Shape` of such a value is then a constant, and everything before it can be left out.

A run reads one sequence: new tokens after a number of cached ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ...errors import BundleError, ExportError
from ..check.contract_session import evaluate
from .edit.editable import EditableGraph, Node
from .edit.tensors import Array

Dimension = int | Literal["new", "past", "total"]
"""A dimension of a value: a number, or the field of `PassShape` that it equals."""

_MASKED: Final = -1e4
"""Added to the score of a masked position; representable in half precision."""


@dataclass(frozen=True)
class PassShape:
    """Number of new and cached tokens of a forward pass."""

    new: int
    past: int

    @property
    def total(self) -> int:
        """Number of cached and new tokens."""
        return self.new + self.past

    def size(self, dimension: Dimension) -> int:
        """The number that a dimension is in this pass."""
        return dimension if isinstance(dimension, int) else int(getattr(self, dimension))


_FIRST: Final = PassShape(7, 13)
_SECOND: Final = PassShape(11, 19)
"""The two passes from which shapes are learned. Their numbers and sums are all different."""


class SubgraphRunner:
    """Runs subgraphs of a graph, which must not be changed meanwhile."""

    def __init__(self, graph: EditableGraph) -> None:
        """Learn the shapes of the graph's values.

        Raises:
            BundleError: the graph's inputs are not those of a decoder with a cache, or it cannot be run.
        """
        self.graph = graph
        self.order: dict[Node, int] = {node: index for index, node in enumerate(graph.in_order())}
        """Position of each node in topological order."""
        self._inputs = {name: _InputRole.of(info) for name, info in graph.inputs.items()}
        self.token_dependent: frozenset[str] = self._dependents(
            name for name, role in self._inputs.items() if role.role == "tokens"
        )
        """Values that depend on the token ids, and so on the weights."""
        self._shapes: dict[str, tuple[Dimension, ...]] = {}
        self._learn_shapes()

    def shape(self, name: str) -> tuple[Dimension, ...] | None:
        """Shape of a value; None if it is unknown or depends on anything but the lengths of the pass."""
        tensor = self.graph.tensors.get(name)
        return tensor.shape if tensor is not None else self._shapes.get(name)

    def run(
        self, wanted: Sequence[str], lengths: PassShape, given: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Compute values of the graph in one run.

        Args:
            wanted: names of the values to compute.
            lengths: number of new and cached tokens.
            given: values that are fed instead of being computed.

        Returns:
            The computed values by name.

        Raises:
            ExportError: the subgraph cannot be run.
        """
        return _Subgraph(self, lengths, given or {}).run(wanted)

    def input_value(self, name: str, lengths: PassShape) -> Array:
        """Value that a graph input is fed: token ids 0, a mask of ones, ascending positions, an empty cache."""
        return self._inputs[name].value(lengths)

    def _dependents(self, names: Iterable[str]) -> frozenset[str]:
        """Values that are computed from any of `names`, other than through their shape."""
        found = set(names)
        waiting = list(found)
        while waiting:
            for node in self.graph.consumers(waiting.pop()):
                if node.op not in ("Shape", "Size"):
                    fresh = [name for name in node.outputs if name and name not in found]
                    found.update(fresh)
                    waiting += fresh
        return frozenset(found)

    def _learn_shapes(self) -> None:
        names = [*self.graph.inputs, *(name for node in self.order for name in node.outputs if name)]
        try:
            first, second = (_Subgraph(self, each, {}).shapes(names) for each in (_FIRST, _SECOND))
        except ExportError as error:
            raise BundleError(
                f"the model's graph does not run on one sequence with a cache: {error.what}",
                "such a graph cannot be upgraded",
            ) from error
        for name in names:
            if len(first[name]) == len(second[name]):
                pairs = zip(first[name], second[name], strict=True)
                dimensions = [_dimension(int(one), int(other)) for one, other in pairs]
                known = tuple(each for each in dimensions if each is not None)
                if len(known) == len(dimensions):
                    self._shapes[name] = known


def _dimension(first: int, second: int) -> Dimension | None:
    """The dimension that is `first` and `second` in the two passes from which shapes are learned."""
    seen: dict[tuple[int, int], Dimension] = {
        (_FIRST.new, _SECOND.new): "new",
        (_FIRST.past, _SECOND.past): "past",
        (_FIRST.total, _SECOND.total): "total",
    }
    return first if first == second else seen.get((first, second))


@dataclass(frozen=True)
class _InputRole:
    """What a graph input is for, determined by its name and rank."""

    role: Literal["tokens", "mask", "positions", "cache", "flag", "count"]
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    """Declared shape; -1 for a dimension without a number."""

    @classmethod
    def of(cls, info: ValueInfoProto) -> _InputRole:
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
        raise BundleError(f"the model has an unknown input {name}", "such a graph cannot be upgraded")

    def value(self, lengths: PassShape) -> Array:
        if self.role == "tokens":
            return np.zeros((1, lengths.new), self.dtype)
        if self.role == "mask":
            return mask_value(self.dtype, len(self.shape), lengths)
        if self.role == "positions":
            positions = np.arange(lengths.past, lengths.total).astype(self.dtype)
            return np.broadcast_to(positions, (*([1] if len(self.shape) < 3 else [3, 1]), lengths.new))
        if self.role == "flag":
            return np.ones([max(each, 1) for each in self.shape], self.dtype)
        if self.role == "count":
            return np.full([max(each, 1) for each in self.shape], lengths.new, self.dtype)
        return np.zeros(self._cache_shape(lengths), self.dtype)

    def _cache_shape(self, lengths: PassShape) -> tuple[int, ...]:
        """The last dimension without a number is the length, any other one the batch."""
        unknown = [axis for axis, size in enumerate(self.shape) if size < 0]
        shape = [1 if size < 0 else size for size in self.shape]
        if unknown:
            shape[unknown[-1]] = lengths.past
        return tuple(shape)


def mask_value(dtype: np.dtype[np.generic], rank: int, lengths: PassShape) -> Array:
    """Attention mask of a sequence without padding.

    Args:
        dtype: type of the mask.
        rank: 4 for a mask of cells; anything else for a mask of positions.
        lengths: number of new and cached tokens.

    Returns:
        Ones [1, total]; or, for rank 4, [1, 1, new, total] with what is added to the score of a token and a position
        (floats), or whether it counts (other types).
    """
    if rank != 4:
        return np.ones((1, lengths.total), dtype)
    slots = np.arange(lengths.total)
    seen = slots <= slots[lengths.past :, None]
    cells = np.where(seen, 0, _MASKED) if dtype.kind == "f" else seen
    return cells.astype(dtype)[None, None]


class _Subgraph:
    """A model of the nodes that some values need."""

    def __init__(self, runner: SubgraphRunner, lengths: PassShape, given: Mapping[str, Array]) -> None:
        self._runner = runner
        self._graph = runner.graph
        self._lengths = lengths
        self._given = given
        self._nodes: list[NodeProto] = []
        self._tensors: list[TensorProto] = []
        self._feeds: dict[str, Array] = {}
        self._visited: set[str] = set()

    def run(self, wanted: Sequence[str]) -> dict[str, Array]:
        """Values by name."""
        return self._evaluate("Identity", wanted)

    def shapes(self, wanted: Sequence[str]) -> dict[str, Array]:
        """Shapes of values by name, int64 [rank]."""
        return self._evaluate("Shape", wanted)

    def _evaluate(self, op: str, wanted: Sequence[str]) -> dict[str, Array]:
        """Apply an operator to each wanted value and return the results.

        A graph output cannot be a graph input or a constant, so even values that are returned as they are need one.
        """
        self._collect(wanted)
        outputs = [f"wanted.{index}" for index in range(len(wanted))]
        graph = GraphProto(
            name="piece",
            node=[
                *self._nodes,
                *(helper.make_node(op, [name], [output]) for name, output in zip(wanted, outputs, strict=True)),
            ],
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
        values = evaluate(model, {name: np.ascontiguousarray(value) for name, value in self._feeds.items()})
        return dict(zip(wanted, values, strict=True))

    def _collect(self, wanted: Sequence[str]) -> None:
        """Add the nodes that `wanted` needs, in topological order."""
        needed: set[Node] = set()
        waiting = list(wanted)
        while waiting:
            name = waiting.pop()
            if name in self._visited:
                continue
            self._visited.add(name)
            node = self._graph.producer(name)
            if name in self._given:
                self._feeds[name] = self._given[name]
            elif node is not None:
                if node not in needed and not self._replaced_by_constant(node):
                    needed.add(node)
                    waiting += self._needed_inputs(node)
            elif name in self._graph.tensors:
                self._tensors.append(numpy_helper.from_array(np.asarray(self._graph.array(name)), name))
            elif name in self._graph.inputs:
                self._feeds[name] = self._runner.input_value(name, self._lengths)
            else:
                raise ExportError(f"no node computes the value {name}")
        order = self._runner.order
        for node in sorted(needed, key=lambda node: order[node]):
            self._nodes += self._without_weights(node)

    def _weights(self, node: Node) -> ConstantOperand | None:
        """The weight matrix of a node, if its value depends on token ids."""
        return constant_operand(self._graph, node) if node.output(0) in self._runner.token_dependent else None

    def _needed_inputs(self, node: Node) -> list[str]:
        weights = self._weights(node)
        return [each for each in (*node.inputs, *node.captured) if each] if weights is None else [weights.source]

    def _replaced_by_constant(self, node: Node) -> bool:
        """Replace a node by a constant if its value follows from shapes alone.

        That is the case for a `Shape`, and for a product with weights, whose value is taken to be zeros.
        """
        if node.op == "Shape":
            dimensions = self._runner.shape(node.input(0))
            if dimensions is None or node.input(0) in self._given:
                return False
            sizes = [self._lengths.size(each) for each in dimensions]
            shape = np.array(sizes[node.attribute("start", 0) : node.attribute("end")], np.int64)
            self._tensors.append(numpy_helper.from_array(shape, node.output(0)))
            return True
        weights = self._weights(node)
        dimensions = None if weights is None else self._runner.shape(node.output(0))
        if weights is None or dimensions is None:
            return False
        zeros = np.zeros([self._lengths.size(each) for each in dimensions], weights.dtype)
        self._tensors.append(numpy_helper.from_array(zeros, node.output(0)))
        return True

    def _without_weights(self, node: Node) -> list[NodeProto]:
        """The node, or nodes that compute zeros of the same shape without its weights."""
        weights = self._weights(node)
        if weights is None:
            return [node.proto()]
        stem, output = f"emptied.{node.output(0)}", node.output(0)
        self._tensors.append(numpy_helper.from_array(np.zeros((1, weights.width), weights.dtype), f"{stem}.row"))
        if node.op == "Gather":
            self._tensors.append(numpy_helper.from_array(np.zeros((), np.int64), f"{stem}.zero"))
            return [
                helper.make_node("Cast", [weights.source], [f"{stem}.ids"], to=TensorProto.INT64),
                helper.make_node("Mul", [f"{stem}.ids", f"{stem}.zero"], [f"{stem}.first"]),
                helper.make_node("Gather", [f"{stem}.row", f"{stem}.first"], [output]),
            ]
        bounds = {f"{stem}.start": 0, f"{stem}.stop": 1, f"{stem}.axis": -1}
        self._tensors += [numpy_helper.from_array(np.array([value], np.int64), name) for name, value in bounds.items()]
        return [
            helper.make_node("Slice", [weights.source, *bounds], [f"{stem}.x"]),
            helper.make_node("MatMul", [f"{stem}.x", f"{stem}.row"], [output]),
        ]


@dataclass(frozen=True)
class ConstantOperand:
    """A constant matrix that a node multiplies its input with, or gathers rows from."""

    source: str
    """The other input of the node."""
    width: int
    """Size of the last axis of the node's output."""
    dtype: np.dtype[np.generic]
    """Type of the node's output."""


def constant_operand(graph: EditableGraph, node: Node) -> ConstantOperand | None:
    """The constant matrix that a node reads; None if there is none."""
    if node.op == "MatMulNBits":
        scales = graph.tensors.get(node.input(2))
        if scales is None:
            return None
        return ConstantOperand(node.input(0), node.attribute("N"), helper.tensor_dtype_to_np_dtype(scales.element_type))
    index = {"MatMul": 1, "Gemm": 1, "Gather": 0}.get(node.op)
    if index is None:
        return None
    name = node.input(index)
    transpose = graph.producer_of(name, "Transpose")
    tensor = graph.tensors.get(name if transpose is None else transpose.input(0))
    if tensor is None or len(tensor.shape) != 2:
        return None
    transposed = node.op == "Gather" or bool(node.attribute("transB", 0)) != (transpose is not None)
    width = tensor.shape[1] if node.op == "Gather" else tensor.shape[0 if transposed else 1]
    return ConstantOperand(node.input(1 - index), width, helper.tensor_dtype_to_np_dtype(tensor.element_type))
