"""Rewrites a decoder graph to run the new tokens of several texts in one pass.

Weights are read once for the rows of all texts. What depends on the inputs of one text (cache, positions, mask,
lengths) runs once for each text, as in the model's own graph, so every kind of attention and of state works, no text is
padded, and each keeps a cache of its own. In front of such nodes the rows of a text are gathered, and behind them the
rows of all texts are joined again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor, onnx_node
from ...models.onnx_file.model_messages import Message, value_info
from .graph_io import GraphIO, InputRole
from .shared_passes import ORDER, ROWS, SHARED_SCALE_OPERATORS, of_text

_WEIGHTED: Final = {"MatMulNBits", "MatMul", "MatMulInteger", "MoE", "QMoE"}
"""Operators that read weights for each of their rows."""


def packed_graph(graph: Path, graph_io: GraphIO, texts: int, serialized: bytes | None = None) -> bytes:
    """The decoder graph in a file, for passes over the tokens of several texts.

    Args:
        graph: the model file; the result refers to the same weights, relative to its folder.
        graph_io: its inputs and outputs.
        texts: number of texts.
        serialized: the model itself, if it is another one than in the file.

    Returns:
        The serialized model. It takes the tokens and the logit positions of all texts together, `ORDER`, and by the
        names of `of_text` what else the graph takes of a text, and `ROWS`.

    Raises:
        BundleError: the file is not an ONNX model.
        CannotRewriteError: the graph has branches, no input says which logits it returns, or tokens share scales.
    """
    if InputRole.LOGIT_POSITIONS not in graph_io.inputs:
        raise CannotRewriteError("no input says which logits it returns")
    editor = GraphEditor(graph, serialized)
    if any(each.op_type in SHARED_SCALE_OPERATORS for each in editor.graph.node):
        raise CannotRewriteError("the texts of a pass would share the scales of their activations")
    _Packing(editor, graph_io, texts).run()
    return editor.serialized()


class _Packing:
    """The rewriting of one graph.

    Args:
        editor: the graph.
        graph_io: its inputs and outputs.
        texts: number of texts.
    """

    def __init__(self, editor: GraphEditor, graph_io: GraphIO, texts: int) -> None:
        self._editor: Final = editor
        self._texts: Final = range(texts)
        self._selection: Final = graph_io.inputs[InputRole.LOGIT_POSITIONS].name
        together = {graph_io.inputs[InputRole.TOKENS].name, self._selection, *editor.initializers}
        self._apart: Final = {name for name in editor.input_names if name not in together}
        """Values that every text has its own of."""
        self._constants: Final = {"", *editor.initializers}
        self._nodes: Final[list[Message]] = []
        self._made: Final[set[str]] = set()

    def run(self) -> None:
        """Rewrite the graph."""
        graph = self._editor.graph
        inputs = [each for each in graph.input if each.name in self._apart]
        for each in list(graph.node):
            if self._runs_once(each):
                each.input[:] = [self._joined(name) if name in self._apart else name for name in each.input]
                self._nodes.append(each)
                if self._constants.issuperset(each.input):
                    self._constants.update(each.output)
            else:
                self._nodes.extend(self._copy(each, text) for text in self._texts)
                self._apart.update(filter(None, each.output))
        self._editor.rewrite(lambda _: ())
        graph.node.extend(self._nodes)
        outputs = [each for each in graph.output if each.name in self._apart]
        for values, own in ((graph.input, inputs), (graph.output, outputs)):
            for each in own:
                values.remove(each)
                for text in self._texts:
                    copy = type(each)()
                    copy.CopyFrom(each)
                    copy.name = of_text(each.name, text)
                    for dim in copy.type.tensor_type.shape.dim:
                        if dim.dim_param:
                            dim.dim_param = of_text(dim.dim_param, text)
                    values.append(copy)
        graph.input.extend(value_info(of_text(ROWS, text), "int64", [of_text("M", text)]) for text in self._texts)
        graph.input.append(value_info(ORDER, "int64", ["N"]))

    def _runs_once(self, each: Message) -> bool:
        """Whether a node runs over the rows of all texts: it reads weights, or nothing that a text has of its own."""
        if self._selection in each.input:
            return True
        tensors = self._editor.initializers
        constants = [name for name in each.input if name and name in self._constants]
        if each.op_type in _WEIGHTED and any(name not in tensors or len(tensors[name].dims) > 1 for name in constants):
            return True
        return each.op_type != "Shape" and self._apart.isdisjoint(each.input)

    def _copy(self, each: Message, text: int) -> Message:
        """The node of one text; the nodes that gather its rows are added."""
        copy = type(each)()
        copy.CopyFrom(each)
        copy.name = of_text(each.name or each.output[0], text)
        copy.input[:] = [self._of_text(name, text) for name in each.input]
        copy.output[:] = [of_text(name, text) if name else "" for name in each.output]
        return copy

    def _of_text(self, name: str, text: int) -> str:
        """A value of one text: its own, or its rows of those of all texts; constants are the same for all."""
        if name in self._constants:
            return name
        if name in self._apart:
            return of_text(name, text)
        return self._add("Gather", [name, of_text(ROWS, text)], of_text(f"{name}.rows", text))

    def _joined(self, name: str) -> str:
        """The rows of all texts, in the order of the pass."""
        joined = self._add("Concat", [of_text(name, text) for text in self._texts], f"{name}.texts")
        return self._add("Gather", [joined, ORDER], f"{name}.joined")

    def _add(self, operator: str, inputs: list[str], name: str) -> str:
        """Add a node along the axis of tokens once."""
        if name not in self._made:
            self._made.add(name)
            self._nodes.append(onnx_node(operator, inputs, name, axis=1))
        return name
