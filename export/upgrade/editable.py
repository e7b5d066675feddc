"""An ONNX graph that can be edited without loading its weights.

A graph pass is a function `(graph: EditableGraph, ...) -> ...`. It finds nodes (`graph.nodes`, `graph.producer(name)`,
`graph.consumers(name)`), reads constants (`graph.array(name)`), and changes the graph only through its methods, which
keep the look-up tables consistent:

    for node in graph.nodes_of("MatMul"):       # a new list, so editing in the loop is safe
        weight = graph.array(node.input(1))     # NumPy, mapped from the file; None if not a constant
        if weight is not None:
            codes = Tensor.computed(np.uint8, shape, make_pieces)
            new = graph.value("MatMulNBits", [node.input(0), codes, scales], domain=MICROSOFT, N=.., K=.., bits=4, ..)
            graph.replace_value(node.output(0), new)
    graph.sweep()                               # removes nodes and constants that nothing reads

Rules:

- Values are identified by name, as in ONNX; "" is an absent optional input. Nodes are compared by identity.
- `add` and `add_tensor` append a number to a name that is taken.
- `Constant` nodes of the file are tensors here and `Identity` nodes are removed, so a constant is always in
  `graph.tensors`. Constants inside the branches of If and Loop stay there. `Node.captured` lists what such a branch
  reads from the enclosing graph; these values count as read.
- Tensors are not loaded to be copied: the source's are ranges of its files (`graph_parts.FileRange`), large new
  ones are computed while the new file is written, in the order in which they were added (`graph_parts.Computed`).
- `replace_uses` does not change graph outputs; `rename` and `replace_value` do, and `set_output` declares one.

Patterns follow values with `source` and `sole_reader`, and find all that depends on a value with `readers`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto, helper

from ...errors import BundleError
from ..graph.nodes import MICROSOFT
from .graph_parts import Array, Node, Store, Tensor, constant_of, read_model, read_tensor

__all__ = ["MICROSOFT", "EditableGraph", "Node"]

Operand = str | int | Sequence[int] | Array | Tensor
"""An input of a new node: the name of a value, or a constant, of int64 unless it is an array."""


class EditableGraph:
    """An ONNX graph that can be edited; see the module docstring."""

    def __init__(self, model: ModelProto, folder: Path) -> None:
        """Take a model whose external data is in `folder` (`onnx.load(..., load_external_data=False)`).

        Raises:
            BundleError: a constant is damaged, or the graph has features that cannot be edited.
        """
        self.folder = folder
        self.opsets = {"" if each.domain == "ai.onnx" else each.domain: each.version for each in model.opset_import}
        graph = model.graph
        if graph.sparse_initializer:
            raise BundleError("the model has sparse constants", "such a model cannot be upgraded")
        self._ir_version = model.ir_version
        self._functions = list(model.functions)
        self.own_domains = {each.domain for each in self._functions}
        """Domains of operators that the model itself defines."""
        self.tensors: dict[str, Tensor] = {each.name: read_tensor(each, folder) for each in graph.initializer}
        self.inputs: dict[str, ValueInfoProto] = {
            each.name: each for each in graph.input if each.name not in self.tensors
        }
        self.outputs: dict[str, ValueInfoProto] = {each.name: each for each in graph.output}
        self._nodes: dict[Node, None] = {}
        self._producers: dict[str, Node] = {}
        self._consumers: defaultdict[str, dict[Node, None]] = defaultdict(dict)
        self._numbers: dict[str, int] = {}
        for proto in graph.node:
            if proto.op_type == "Constant" and proto.domain in ("", "ai.onnx"):
                self.tensors[proto.output[0]] = constant_of(proto, folder)
            else:
                self._attach(Node(proto))
        self._drop_identities()

    @classmethod
    def open(cls, path: Path) -> EditableGraph:
        """Read an .onnx file without its external weights; raises as `read_model` and the constructor."""
        return cls(read_model(path), path.parent)

    # Queries

    @property
    def nodes(self) -> list[Node]:
        """All nodes, in arbitrary order."""
        return list(self._nodes)

    def nodes_of(self, *ops: str) -> list[Node]:
        """All nodes of the given operators, of any domain."""
        return [node for node in self._nodes if node.op in ops]

    def producer(self, name: str) -> Node | None:
        """The node that computes a value; None for a graph input, a constant, or an unknown name."""
        return self._producers.get(name)

    def producer_of(self, name: str, *ops: str) -> Node | None:
        """The node that computes a value if it is one of these operators, else None."""
        node = self._producers.get(name)
        return node if node is not None and node.op in ops else None

    def consumers(self, name: str) -> list[Node]:
        """The nodes that read a value, each once."""
        return list(self._consumers.get(name, ()))

    def source(self, name: str, *ops: str) -> str:
        """The value from which another is computed by these operators alone, each applied to its first input."""
        while (node := self.producer_of(name, *ops)) is not None:
            name = node.input(0)
        return name

    def sole_reader(self, name: str, *ops: str, besides: Collection[str] = ()) -> Node | None:
        """The node that alone reads a value, if it is one of these operators; operators in `besides` do not count."""
        readers = [node for node in self.consumers(name) if node.op not in besides]
        return readers[0] if len(readers) == 1 and readers[0].op in ops else None

    def readers(self, name: str, through: Callable[[str, Node], bool]) -> Iterator[tuple[str, Node]]:
        """Yield what is read, and by which node: a value, and what nodes that `through` accepts compute from it."""
        values, seen = [name], {name}
        for value in values:  # the list grows while it is walked
            for node in self.consumers(value):
                yield value, node
                if through(value, node):
                    fresh = [each for each in node.outputs if each and each not in seen]
                    seen.update(fresh)
                    values += fresh

    def is_read(self, name: str) -> bool:
        """Whether a node reads the value, or it is a graph output."""
        return bool(self._consumers.get(name)) or name in self.outputs

    def array(self, name: str) -> Array | None:
        """The constant of that name as a NumPy array (see `Tensor.array`); None if the value is not a constant."""
        tensor = self.tensors.get(name)
        return None if tensor is None else tensor.array()

    def integers(self, name: str) -> list[int] | None:
        """A small integer constant as a flat list; None if the value is not a constant."""
        value = self.array(name)
        return None if value is None else [int(each) for each in value.reshape(-1)]

    def element_type(self, name: str) -> int:
        """The `TensorProto.DataType` of a value, as far as the file declares it; 0 if unknown."""
        if name in self.tensors:
            return self.tensors[name].element_type
        info = self._described(name)
        return 0 if info is None else info.type.tensor_type.elem_type

    def shape(self, name: str) -> tuple[int | str, ...] | None:
        """Declared shape of a value: numbers or names ("" for an unnamed dimension); None if it is not declared."""
        if name in self.tensors:
            return self.tensors[name].shape
        info = self._described(name)
        if info is None or not info.type.tensor_type.HasField("shape"):
            return None
        return tuple(
            each.dim_value if each.HasField("dim_value") else each.dim_param for each in info.type.tensor_type.shape.dim
        )

    def in_order(self) -> list[Node]:
        """All nodes in topological order.

        Raises:
            BundleError: the graph has a cycle.
        """
        producers = self._producers
        waiting = {node: {producers[name] for name in node.reads() if name in producers} for node in self._nodes}
        done = [node for node, needed in waiting.items() if not needed]
        for node in done:  # the list grows while it is walked
            for reader in {each: None for name in node.outputs for each in self._consumers.get(name, ())}:
                waiting[reader].discard(node)
                if not waiting[reader]:
                    done.append(reader)
        if len(done) != len(waiting):
            raise BundleError("the model's graph has a cycle", "it is damaged: copy it again")
        return done

    # Edits

    def add(
        self,
        op: str,
        inputs: Sequence[Operand],
        outputs: Sequence[str] = (),
        *,
        domain: str = "",
        name: str = "",
        **attributes: Any,
    ) -> Node:
        """Add a node.

        Args:
            op: the operator.
            inputs: names of the inputs, "" for an absent one; or constants.
            outputs: preferred names ("" for an absent one); one like `name` where they are left out.
            domain: `MICROSOFT` or "".
            name: the node's own name.
            attributes: the operator's attributes; None means absent.

        Returns:
            The node; its outputs have the names that were free.
        """
        names = [self.fresh(each) if each else "" for each in outputs or [name or op]]
        read = [
            each if isinstance(each, str) else self.add_tensor(f"{names[0]}.{index}", each)
            for index, each in enumerate(inputs)
        ]
        given = {key: value for key, value in attributes.items() if value is not None}
        node = Node(helper.make_node(op, read, names, name=name or names[0], domain=domain, **given))
        self.opsets.setdefault(domain, 1)
        self._attach(node)
        return node

    def value(self, op: str, inputs: Sequence[Operand], *, domain: str = "", name: str = "", **attributes: Any) -> str:
        """Add a node with one output and return that output's name; arguments as for `add`."""
        return self.add(op, inputs, domain=domain, name=name, **attributes).output(0)

    def add_tensor(self, name: str, value: int | Sequence[int] | Array | Tensor) -> str:
        """Add a constant, of int64 unless it is an array; returns its name."""
        name = self.fresh(name)
        self.tensors[name] = value if isinstance(value, Tensor) else Tensor.of(np.asarray(value))
        return name

    def set_output(self, info: ValueInfoProto, value: str) -> None:
        """Declare a graph output. `value` takes its name, and an existing output of that name is replaced."""
        self.outputs.pop(info.name, None)
        if value != info.name:
            self.set_aside(info.name)
            self.rename(value, info.name)
        self.outputs[info.name] = info

    def set_attribute(self, node: Node, name: str, value: Any) -> None:
        """Set an attribute; None removes it."""
        node.attributes.pop(name, None)
        if value is not None:
            node.attributes[name] = helper.make_attribute(name, value)

    def set_inputs(self, node: Node, inputs: Sequence[str]) -> None:
        """Replace the inputs of a node; absent ones at the end are dropped."""
        names = list(inputs)
        while names and not names[-1]:
            names.pop()
        for name in node.reads():
            self._consumers[name].pop(node, None)
        node.inputs = tuple(names)
        for name in node.reads():
            self._consumers[name][node] = None

    def set_input(self, node: Node, index: int, name: str) -> None:
        """Replace one input of a node, adding absent ones before it if needed."""
        names = [*node.inputs, *[""] * (index + 1 - len(node.inputs))]
        names[index] = name
        self.set_inputs(node, names)

    def replace_uses(self, old: str, new: str, readers: Sequence[Node] | None = None) -> None:
        """Make nodes that read `old`, all or the given ones, read `new`; graph outputs do not change."""
        for node in self.consumers(old) if readers is None else readers:
            if old in node.captured:
                raise BundleError(
                    f"a branch of the model's {node.op} node {node.name} reads {old}", "such a model cannot be upgraded"
                )
            self.set_inputs(node, [new if name == old else name for name in node.inputs])

    def replace_value(self, old: str, new: str) -> None:
        """Replace `old` by `new` everywhere, as a graph output too; the producer of `old` may then be removed."""
        self.replace_uses(old, new)
        if old in self.outputs:
            self.set_output(self.outputs[old], new)

    def rename(self, old: str, new: str) -> None:
        """Rename a value (graph input, constant or output of a node) everywhere.

        Raises:
            ValueError: the new name is taken.
        """
        if old == new:
            return
        if self._is_taken(new):
            raise ValueError(f"{new} is taken")
        producer = self._producers.pop(old, None)
        if producer is not None:
            producer.outputs = tuple(new if name == old else name for name in producer.outputs)
            self._producers[new] = producer
        if old in self.tensors:
            self.tensors[new] = self.tensors.pop(old)
        for declared in (self.inputs, self.outputs):
            if old in declared:
                declared[new] = ValueInfoProto(name=new, type=declared.pop(old).type)
        self.replace_uses(old, new)

    def set_aside(self, name: str) -> None:
        """Give the value of that name, if there is one, another name."""
        if self._is_taken(name):
            self.rename(name, self.fresh(f"{name}.before"))

    def remove(self, node: Node) -> None:
        """Remove a node. Readers of its outputs must be changed separately."""
        for name in node.reads():
            self._consumers[name].pop(node, None)
        for name in node.outputs:
            if self._producers.get(name) is node:
                del self._producers[name]
        self._nodes.pop(node, None)

    def sweep(self) -> None:
        """Remove nodes whose outputs nothing reads, then constants that nothing reads. Graph inputs stay."""
        checked = list(self._nodes)
        while checked:
            node = checked.pop()
            if node in self._nodes and not any(name and self.is_read(name) for name in node.outputs):
                self.remove(node)
                checked += [self._producers[name] for name in node.reads() if name in self._producers]
        for name in [name for name in self.tensors if not self.is_read(name)]:
            del self.tensors[name]

    def fresh(self, stem: str) -> str:
        """Return a name that is not taken: `stem`, or `stem` with a number."""
        name = stem
        while self._is_taken(name) or name in self.outputs:
            self._numbers[stem] = self._numbers.get(stem, 1) + 1
            name = f"{stem}.{self._numbers[stem]}"
        return name

    def _drop_identities(self) -> None:
        """Remove Identity nodes. If one computes a graph output, its input takes the name of the output."""
        for node in self.nodes_of("Identity"):
            old, new = node.input(0), node.output(0)
            if node.domain or self._is_captured(new):
                continue
            if new not in self.outputs:
                self.replace_uses(new, old)
                self.remove(node)
            elif old in self._producers and old not in self.outputs and not self._is_captured(old):
                self.remove(node)
                self.rename(old, new)

    # Output

    def model(self, store: Store) -> ModelProto:
        """Build an ONNX model of the graph; `store` stores the tensors."""
        stored = [store(name, tensor) for name, tensor in self.tensors.items()]
        nodes = [*(cast for _, cast in stored if cast), *(node.proto() for node in self.in_order())]
        tensors = [tensor for tensor, _ in stored]
        graph = helper.make_graph(nodes, "decoder", [*self.inputs.values()], [*self.outputs.values()], tensors)
        return ModelProto(
            graph=graph,
            opset_import=[helper.make_opsetid(domain, version) for domain, version in self.opsets.items()],
            functions=self._functions,
            ir_version=max(self._ir_version, 8),
            producer_name="edge-run",
        )

    def _attach(self, node: Node) -> None:
        self._nodes[node] = None
        for name in node.outputs:
            if name:
                self._producers[name] = node
        for name in node.reads():
            self._consumers[name][node] = None

    def _described(self, name: str) -> ValueInfoProto | None:
        return self.inputs.get(name) or self.outputs.get(name)

    def _is_taken(self, name: str) -> bool:
        return name in self._producers or name in self.inputs or name in self.tensors

    def _is_captured(self, name: str) -> bool:
        return any(name in reader.captured for reader in self._consumers.get(name, ()))
