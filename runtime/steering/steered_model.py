"""Rewrites a decoder graph to take LoRA adapters and control vectors as inputs.

Every linear of a layer adds x A B to its output x W, and every layer a vector to the residual stream. A and B are
inputs of rank 0, the vectors zeros, unless they are bound: inputs of a graph may have such defaults, and passes that
bind others run in the same session.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...models.bundle import Bundle
from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor, onnx_node
from ...models.onnx_file.model_messages import Message, attribute_values, tensor, value_info

Array = npt.NDArray[np.float32]
_LINEAR: Final = re.compile(r"(layers\.\d+\.\w+)(?:\.product)?")
"""Outputs of the operators that multiply by the weights of a linear, in graphs that edge-run has exported."""


def lora_a(linear: str) -> str:
    """Name of the input A of a linear: float32 `[columns, rank]`."""
    return f"{linear}.lora_a"


def lora_b(linear: str) -> str:
    """Name of the input B of a linear: float32 `[rank, outputs]`."""
    return f"{linear}.lora_b"


def control(layer: int) -> str:
    """Name of the vector that is added to the residual stream after a layer: float32 `[hidden]`."""
    return f"layers.{layer}.control"


def state(layer: int) -> str:
    """Name of the output with the residual stream after a layer at the last token: float32 `[1, 1, hidden]`."""
    return f"layers.{layer}.state"


class Linear(NamedTuple):
    """A linear that takes an adapter."""

    columns: int
    """Number of inputs."""
    widths: tuple[int, ...]
    """Number of outputs of each of its parts, such as queries, keys and values."""


class SteeredModel:
    """A decoder graph in a file that gets inputs for adapters and control vectors.

    Attributes:
        size: the sizes of the model.
        linears: its linears by name, such as `layers.0.qkv`.
        defaults: what the inputs are where nothing steers, once `serialized` has added them.
    """

    def __init__(self, bundle: Bundle, graph: Path) -> None:
        """Read the graph of a model, or a copy of it.

        Raises:
            InputError: edge-run has not exported it.
        """
        what = f"{bundle.folder} cannot have adapters and control vectors: edge-run has not exported it"
        refusal = InputError(what, "export it with edge-run export")
        if bundle.manifest is None:
            raise refusal
        try:
            self._editor: Final = GraphEditor(graph)
        except CannotRewriteError as error:
            raise refusal from error
        self.size: Final = bundle.manifest.architecture
        self.linears: Final[dict[str, Linear]] = {}
        self.defaults: Final[dict[str, Array]] = {}
        self._names: Final[dict[str, str]] = {}
        """Linears by the outputs of the operators that multiply by their weights."""
        readers = {name: each for each in self._editor.graph.node for name in each.input}
        for each in self._editor.graph.node:
            found = _LINEAR.fullmatch(each.output[0]) if each.op_type in ("MatMul", "MatMulNBits") else None
            if found is not None:
                attributes, shape = attribute_values(each), self._editor.constant_shape(each.input[1]) or ()
                columns, outputs = (attributes["K"], attributes["N"]) if "K" in attributes else shape
                reader = readers.get(found[1]) or readers[each.output[0]]
                self.linears[found[1]] = Linear(columns, self._widths(reader, outputs))
                self._names[each.output[0]] = found[1]
        self._after_layer: Final[dict[str, int]] = {}
        """Layers by the value that a vector is added to: what is added to the residual last, or the sum itself."""
        while (end := self._layer_end(len(self._after_layer))) is not None:
            self._after_layer[end.input[0]] = len(self._after_layer)
        if not self._after_layer:
            raise refusal

    def serialized(self, linears: Collection[str], *, vectors: bool, states: bool = False) -> bytes:
        """The graph with further inputs; it refers to the same weights, relative to the folder of its file.

        Args:
            linears: those that take adapters.
            vectors: whether layers take vectors.
            states: whether it has the outputs of `state` too.
        """
        controlled = self._after_layer if vectors else {}

        def replacement(each: Message) -> Iterator[Message]:
            each.input[:] = [f"{name}.controlled" if name in controlled else name for name in each.input]
            outputs, name = list(each.output), self._names.get(each.output[0], "")
            yield from self._with_adapter(each, name) if name in linears else [each]
            for output in outputs:
                if (layer := controlled.get(output)) is not None:
                    vector = self._input(control(layer), ["hidden"], (1,))  # one zero stands for a vector of zeros
                    yield onnx_node("Add", [output, vector], f"{output}.controlled")

        self._editor.rewrite(replacement)
        for value, layer in self._after_layer.items() if states else ():
            residual = f"layers.{layer}.next_norm.residual"
            source = residual if self._editor.producer(residual) is not None else f"{value}.controlled"
            last = self._editor.integers("last", -1)
            self._editor.graph.node.append(onnx_node("Gather", [source, last], state(layer), axis=1))
            self._editor.graph.output.append(value_info(state(layer), np.float32, [1, 1, "hidden"]))
        return self._editor.serialized()

    def _layer_end(self, layer: int) -> Message | None:
        """The node that reads a layer's output, and perhaps adds it to the residual; None if there is no such layer."""
        name = f"layers.{layer}.next_norm"
        return self._editor.producer(name) or self._editor.producer(f"{name}.residual")

    def _with_adapter(self, each: Message, name: str) -> list[Message]:
        """The nodes of a linear: its own, those of the adapter, and the sum."""
        output, (columns, widths), rank = each.output[0], self.linears[name], f"{name}.rank"
        first = self._input(lora_a(name), [columns, rank], (columns, 0))
        second = self._input(lora_b(name), [rank, sum(widths)], (0, sum(widths)))
        each.output[0] = f"{output}.base"
        return [
            each,
            onnx_node("MatMul", [each.input[0], first], f"{output}.low"),
            onnx_node("MatMul", [f"{output}.low", second], f"{output}.change"),
            onnx_node("Add", [f"{output}.base", f"{output}.change"], output),
        ]

    def _widths(self, reader: Message, outputs: int) -> tuple[int, ...]:
        """Number of outputs of each part of a linear, of which the node that reads them says the parts."""
        if reader.op_type == "Split":
            return tuple(np.asarray(self._editor.array(reader.input[1])).tolist())
        if reader.op_type == "GroupQueryAttention" and not reader.input[1]:
            attributes = attribute_values(reader)
            heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
            width = outputs // (heads + 2 * kv_heads)
            return heads * width, kv_heads * width, kv_heads * width
        return (outputs,)

    def _input(self, name: str, shape: list[int | str], default: tuple[int, ...]) -> str:
        """Add an input with a default, zeros of another shape."""
        self.defaults[name] = np.zeros(default, np.float32)
        self._editor.graph.input.append(value_info(name, np.float32, shape))
        self._editor.add(tensor(name, self.defaults[name]))
        return name
