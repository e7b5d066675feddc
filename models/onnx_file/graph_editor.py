"""A decoder graph that is being rewritten or joined with its embedding: nodes, constants, where values come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import BundleError
from .model_messages import (
    ELEMENT_TYPES,
    EXTERNAL,
    Message,
    ModelProto,
    attribute_values,
    node,
    read_model,
    shape_of,
    tensor,
)
from .wire import check_external_data

MICROSOFT: Final = "com.microsoft"
_DTYPES: Final = {number: dtype for dtype, number in ELEMENT_TYPES.items()}
_COMPUTED: Final[Mapping[str, Callable[..., npt.NDArray[Any]]]] = {
    "Cast": lambda values, to: values.astype(_DTYPES[to]),
    "Reshape": lambda values, shape: values.reshape([size or values.shape[at] for at, size in enumerate(shape)]),
    "Slice": lambda values, start, stop, _: values[:, :, start[0] : stop[0]],
    "Gather": lambda values, at: values[at],
    "BitwiseOr": np.bitwise_or,
}
"""What makes constants of own graphs from stored ones: scales in float32, and codes of 4 and 8 bits from fewer."""
EMBEDDINGS: Final = "inputs_embeds"
"""What a decoder takes whose embedding is a graph of its own."""
_IMAGES: Final = "image_features"
_PREFIX: Final = "embed_tokens/"


class CannotRewriteError(Exception):
    """The graph has something that the rewriting does not know; it is then used as it is."""


class GraphEditor:
    """A graph whose nodes are replaced one by one; see `rewrite`.

    Attributes:
        model: the model message.
        graph: its graph.
        initializers: tensor messages by name.
    """

    def __init__(self, path: Path, serialized: bytes | None = None) -> None:
        """Read a model file, whose weights stay where they are.

        Args:
            path: the file.
            serialized: the model itself, if it is another one than in the file, beside which its weights are.

        Raises:
            BundleError: the file is not an ONNX model.
            CannotRewriteError: the graph has nodes with graphs inside.
        """
        check_external_data(path)
        self._folder = path.parent
        self.model: Message = read_model(path) if serialized is None else ModelProto.FromString(serialized)
        self.graph: Message = self.model.graph
        if any(each.HasField("g") or each.graphs for one in self.graph.node for each in one.attribute):
            raise CannotRewriteError("the graph has branches")
        self.initializers: dict[str, Message] = {each.name: each for each in self.graph.initializer}
        self._producers: dict[str, Message] = {}
        self._index()

    def _index(self) -> None:
        self._producers = {output: each for each in self.graph.node for output in each.output if output}

    @property
    def opset(self) -> int:
        """Version of ONNX's own operators; 0 if the model does not say it."""
        return next((int(each.version) for each in self.model.opset_import if each.domain in ("", "ai.onnx")), 0)

    @property
    def input_names(self) -> list[str]:
        """Names of the graph's inputs."""
        return [each.name for each in self.graph.input]

    def producer(self, name: str) -> Message | None:
        """The node that computes a value; None for inputs and initializers."""
        return self._producers.get(name)

    def rewrite(self, replace: Callable[[Message], Iterable[Message]]) -> None:
        """Replace each node by the nodes that `replace` returns for it, in order; a node may be among its own."""
        nodes = [each for old in list(self.graph.node) for each in replace(old)]
        del self.graph.node[:]
        self.graph.node.extend(nodes)
        self._index()

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        """Add a small constant, once per name; returns its name in the graph, which no exporter uses."""
        name = f"edited.{name}"
        if name not in self.initializers:
            self.graph.initializer.append(tensor(name, value))
            self.initializers[name] = self.graph.initializer[-1]
        return name

    def add(self, initializer: Message) -> None:
        """Add a tensor, whose name no other value has."""
        self.graph.initializer.append(initializer)
        self.initializers[initializer.name] = self.graph.initializer[-1]

    def declare_microsoft(self) -> None:
        """Declare the operators of com.microsoft, which the graph may not have used before."""
        if all(each.domain != MICROSOFT for each in self.model.opset_import):
            self.model.opset_import.add(domain=MICROSOFT, version=1)

    def integers(self, name: str, *values: int) -> str:
        """Add a constant vector of int64, once per name; returns its name in the graph."""
        return self.constant(name, np.array(values, np.int64))

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """The elements of a constant: an initializer, or what nodes compute from such by `_COMPUTED`.

        Returns:
            The elements, memory-mapped where they lie in another file in their own type; None if the value is neither.
        """
        proto = self.initializers.get(name)
        if proto is None:
            return self._computed(name)
        if proto.data_type not in _DTYPES:
            return None
        dtype, shape = _DTYPES[proto.data_type], tuple(proto.dims)
        if proto.data_location == EXTERNAL:
            entries = {each.key: each.value for each in proto.external_data}
            return np.memmap(
                self._folder / entries["location"],
                dtype.newbyteorder("<"),
                mode="r",
                offset=int(entries.get("offset", 0)),
                shape=shape,
            )
        if proto.raw_data:
            return np.frombuffer(proto.raw_data, dtype.newbyteorder("<")).reshape(shape)
        if dtype == np.float16:
            return np.array(list(proto.int32_data), np.uint16).view(np.float16).reshape(shape)
        values = {1: proto.float_data, 7: proto.int64_data, 11: proto.double_data}.get(
            proto.data_type, proto.int32_data
        )
        return np.array(list(values), dtype).reshape(shape)

    def _computed(self, name: str) -> npt.NDArray[Any] | None:
        """The elements of what a node computes from constants; None where it does not."""
        producer = self._producers.get(name)
        if producer is None or producer.op_type not in _COMPUTED:
            return None
        inputs, attributes = [self.array(each) for each in producer.input], attribute_values(producer)
        if any(each is None for each in inputs) or attributes.get("to") not in (None, *_DTYPES):
            return None
        return _COMPUTED[producer.op_type](*inputs, **attributes)

    def constant_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a constant, of any type where it is an initializer; None if the value is not one."""
        if (proto := self.initializers.get(name)) is not None:
            return tuple(proto.dims)
        found = self._computed(name)
        return None if found is None else found.shape

    def element_type(self, name: str) -> int | None:
        """ONNX's number of the element type of an input or initializer; None for other values."""
        if name in self.initializers:
            return int(self.initializers[name].data_type)
        return next((each.type.tensor_type.elem_type for each in self.graph.input if each.name == name), None)

    def shape(self, name: str) -> tuple[int | str | None, ...]:
        """Dimensions of an input or output of the graph; empty if there is no such one."""
        declared = (*self.graph.input, *self.graph.output)
        return next((shape_of(each) for each in declared if each.name == name), ())

    def drop_unused(self, keep_inputs: bool = True) -> None:
        """Remove nodes and initializers on which no output depends, and unless `keep_inputs` such inputs."""
        needed = {each.name for each in self.graph.output}
        kept = []
        for each in reversed(self.graph.node):
            if any(output and output in needed for output in each.output):
                kept.append(each)
                needed.update(each.input)
        kept.reverse()
        initializers = [each for each in self.graph.initializer if each.name in needed]
        inputs = [each for each in self.graph.input if keep_inputs or each.name in needed]
        for field, values in (("node", kept), ("initializer", initializers), ("input", inputs)):
            repeated = getattr(self.graph, field)
            del repeated[:]
            repeated.extend(values)
        self.initializers = {each.name: each for each in self.graph.initializer}
        self._index()

    def serialized(self) -> bytes:
        """The model as the bytes of a file, the same for the same graph."""
        # Types of values inside describe the graph that this one was made from.
        del self.graph.value_info[:]
        data: bytes = self.model.SerializeToString(deterministic=True)
        return data


def onnx_node(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> Message:
    """A node of one of ONNX's own operators with one output, after which the node is named."""
    return node(operator, inputs, [output], name=f"edited.{output}", **attributes)


def with_embedding(decoder: Path, embedding: Path, image_token: int = -1) -> bytes | None:
    """Join a decoder with its embedding; weights in other files stay there.

    Args:
        decoder: a graph with an input `inputs_embeds`.
        embedding: a graph in the same folder that takes token ids, and perhaps `image_features` `[N, hidden]` in place
            of the embeddings of image tokens, and whose only output are embeddings.
        image_token: id of these tokens, in whose places a graph with such features sees token 0, and no features.

    Returns:
        The serialized model, which takes token ids; None if the decoder takes these itself.

    Raises:
        BundleError: one of them is not an ONNX model, or not such a graph.
    """
    model, part = read_model(decoder), read_model(embedding)
    taken = [value for value in model.graph.input if value.name == EMBEDDINGS]
    if not taken:
        return None
    given = {each.name for each in part.graph.initializer}
    features = [value for value in part.graph.input if value.name == _IMAGES]
    inputs = [value for value in part.graph.input if value.name not in given and value not in features]
    branches = any(each.HasField("g") or each.graphs for one in part.graph.node for each in one.attribute)
    if len(inputs) != 1 or len(part.graph.output) != 1 or branches:
        takes, gives = (", ".join(value.name for value in each) for each in (inputs, part.graph.output))
        raise BundleError(
            f"{embedding} does not turn token ids into embeddings: it takes {takes or 'nothing'} and gives {gives}",
            "choose an export whose decoder takes input_ids",
        )
    ids = inputs[0].name
    _rename(part.graph, {ids: _PREFIX + ids if features else ids, part.graph.output[0].name: EMBEDDINGS, "": ""})
    for value in features:
        _leave_out(part.graph, value, ids, np.array(image_token, _DTYPES[inputs[0].type.tensor_type.elem_type]))
    model.graph.input.remove(taken[0])
    model.graph.value_info.append(taken[0])
    if all(value.name != ids for value in model.graph.input):
        model.graph.input.append(inputs[0])
    nodes = [*part.graph.node, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(part.graph.initializer)
    model.functions.extend(part.functions)
    domains = {each.domain for each in model.opset_import}
    # The few operators of an embedding mean the same in all versions of ONNX's.
    model.opset_import.extend(each for each in part.opset_import if each.domain not in domains)
    serialized: bytes = model.SerializeToString()
    return serialized


def _leave_out(graph: Message, features: Message, ids: str, image_token: npt.NDArray[Any]) -> None:
    """Let an embedding see token 0 in place of image tokens, and no features."""
    shape = [size if isinstance(size, int) else 0 for size in shape_of(features)]
    none = np.zeros(shape, _DTYPES[features.type.tensor_type.elem_type])
    image, zero, is_image = (f"{_PREFIX}images.{name}" for name in ("token", "zero", "found"))
    constants = {_PREFIX + features.name: none, image: image_token, zero: np.zeros_like(image_token)}
    graph.initializer.extend(tensor(name, value) for name, value in constants.items())
    nodes = [onnx_node("Equal", [ids, image], is_image), onnx_node("Where", [is_image, zero, ids], _PREFIX + ids)]
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)


def _rename(graph: Message, names: dict[str, str]) -> None:
    """Rename the values and nodes of a graph: as `names` says, and others so that they are in no decoder."""
    for initializer in graph.initializer:
        initializer.name = names.get(initializer.name, _PREFIX + initializer.name)
    for each in graph.node:
        each.name = each.name and _PREFIX + each.name
        for values in (each.input, each.output):
            values[:] = [names.get(name, _PREFIX + name) for name in values]
