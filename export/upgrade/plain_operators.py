"""Constant folding of shapes and bounds that are the same in every pass, and norms and GELU in plain operators.

A graph that was exported for any batch size computes shapes and bounds at run time, several nodes for each reshape. For
one sequence every dimension except the number of tokens is known, and that one can be inferred. ONNX Runtime itself
fuses norms and activations, but not norms with the residual addition before them, and of GELU's approximation by tanh
not every way to write it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import numpy as np

from ...errors import ExportError
from .decoder_io import PassShape
from .editable import MICROSOFT, EditableGraph, Node
from .float_linears import is_unscaled
from .graph_parts import Array
from .subgraph_runner import SubgraphRunner, sizes

_PASSES: Final = (PassShape(5, 9), PassShape(3, 17))
_POLYNOMIAL: Final = frozenset({"Add", "Mul", "Pow", "Tanh"})
_NORMALIZING: Final = frozenset({"Add", "Cast", "Div", "Mul", "Reciprocal", "Sqrt"})
_NORM: Final = "SimplifiedLayerNormalization"
_TOLERANCE: Final = 1e-5
_MANY_TOKENS: Final = 1 << 10
_ARRANGING: Final = frozenset({"Expand", "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Unsqueeze"})
"""Operators that rearrange their first input as the others say."""


def fold_shapes(graph: EditableGraph, context: int) -> None:
    """Make shapes and bounds constants, and remove reshapes that do nothing.

    A value that is the same in short passes may differ in a long one (the start of a window), so a pass that fills
    `context` is also compared.
    """
    runner = SubgraphRunner(graph)
    for node in graph.nodes_of("Reshape"):
        dimensions = runner.shape(node.output(0))
        if node.input(1) not in graph.tensors and dimensions is not None:
            shape = [each if isinstance(each, int) else -1 for each in dimensions]
            if sum(not isinstance(each, int) for each in dimensions) <= 1:
                graph.set_input(node, 1, graph.add_tensor("shape.settled", np.array(shape, np.int64)))
    tokens = min(_MANY_TOKENS, context - 1)
    bounds = {name for node in graph.nodes_of(*_ARRANGING) for name in node.inputs[1:]}
    names = sorted(bounds - {"", *graph.tensors, *graph.inputs, *runner.token_dependent})
    with suppress(ExportError):
        first, *others = (runner.run(names, each) for each in (*_PASSES, PassShape(tokens, context - tokens)))
        for name in names:
            if all(np.array_equal(first[name], other[name]) for other in others):
                graph.replace_uses(name, graph.add_tensor("bound.settled", first[name]))
    for node in graph.nodes_of("Gemm"):
        _keep_batch_axis(graph, runner, node)
    for node in graph.nodes_of("Reshape"):
        if runner.shape(node.input(0)) == runner.shape(node.output(0)) is not None:
            graph.replace_uses(node.output(0), node.input(0))
    graph.sweep()


def _keep_batch_axis(graph: EditableGraph, runner: SubgraphRunner, gemm: Node) -> None:
    """Replace a Gemm between two reshapes by a MatMul that keeps the batch axis.

    The reshapes are [1, M, K] or [1, M, heads, K / heads] to [M, K], and [M, N] to [1, M, N].
    """
    flattened = graph.producer_of(gemm.input(0), "Reshape")
    matrix = graph.tensors.get(gemm.input(1))
    reshaped = [node for node in graph.consumers(gemm.output(0)) if node.op != "Shape"]
    plain = is_unscaled(gemm) and not gemm.attribute("transA", 0) and not gemm.attribute("transB", 0)
    if flattened is None or matrix is None or not plain or gemm.output(0) in graph.outputs:
        return
    value = flattened.input(0)
    source, wanted = runner.shape(value) or (), (1, "new", *(runner.shape(gemm.output(0)) or ())[1:])
    if source[:2] != (1, "new") or runner.shape(gemm.input(0)) != ("new", matrix.shape[0]) or not reshaped:
        return
    if not all(node.op == "Reshape" and runner.shape(node.output(0)) == wanted for node in reshaped):
        return
    if len(source) > 3:
        value = graph.value("Reshape", [value, [1, -1, matrix.shape[0]]], name=f"{value}.joined")
    value = graph.value("MatMul", [value, gemm.input(1)], name=gemm.name or gemm.output(0))
    if gemm.input(2):
        value = graph.value("Add", [value, gemm.input(2)], name=f"{value}.biased")
    for node in reshaped:
        graph.replace_value(node.output(0), value)


def fuse_norms(graph: EditableGraph) -> None:
    """Replace RMS norms, x / sqrt(mean(x ** 2) + epsilon) * weight, by one operator that also adds the residual."""
    means = graph.nodes_of("ReduceMean")
    runner = SubgraphRunner(graph) if means else None
    for mean in means:
        square = graph.producer_of(mean.input(0), "Pow", "Mul")
        if square is not None and runner is not None:
            _fuse_norm(runner, square.input(0), mean.output(0))
    for norm in graph.nodes_of(_NORM):
        add = graph.producer_of(norm.input(0), "Add")
        if add is None or any(name in graph.tensors for name in add.inputs) or add.output(0) in graph.outputs:
            continue
        outputs = [f"{norm.output(0)}.added", "", "", f"{add.output(0)}.sum"]
        epsilon, inputs = norm.attribute("epsilon"), [*add.inputs, norm.input(1)]
        fused = graph.add(f"Skip{_NORM}", inputs, outputs, domain=MICROSOFT, epsilon=epsilon)
        graph.replace_value(norm.output(0), fused.output(0))
        graph.replace_uses(add.output(0), fused.output(3))
    graph.sweep()


def _fuse_norm(runner: SubgraphRunner, value: str, result: str) -> None:
    """Replace the norm of `value` that is computed from `result`, its mean square, if there is one."""
    graph = runner.graph
    known = {value, result}
    value = graph.source(value, "Cast")
    known.add(value)
    shape, lengths = runner.shape(value) or (), PassShape(3, 0)
    x = np.random.default_rng(0).uniform(-1, 1, sizes(shape, lengths)).astype(np.float32)
    epsilon, weight, found = 0.0, "", ("", "", 0.0)
    while (node := graph.sole_reader(result, *_NORMALIZING)) is not None and known.issuperset(runner.inputs(node)):
        result = node.output(0)
        known.add(result)
        for name in node.inputs:
            constant = graph.array(name)
            if constant is not None and node.op == "Add" and constant.size == 1:
                epsilon = float(constant.reshape(-1)[0])
            elif constant is not None and node.op == "Mul" and constant.shape == shape[-1:]:
                weight = name
        expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)
        scaled = expected if not weight else expected * graph.tensors[weight].array()
        if runner.shape(result) == shape and _computes(runner, value, result, lengths, x, scaled):
            found = (result, weight, epsilon)
    if found[0]:
        scale = found[1] or np.ones(x.shape[-1], np.float32)
        fused = graph.value(_NORM, [value, scale], name=f"{found[0]}.norm", axis=-1, epsilon=found[2], stash_type=1)
        graph.replace_value(found[0], fused)


def _computes(
    runner: SubgraphRunner, source: str, result: str, lengths: PassShape, given: Array, expected: Array
) -> bool:
    try:
        found = runner.run([result], lengths, {source: given})[result]
    except ExportError:
        return False
    return found.shape == expected.shape and np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def fuse_gelu(graph: EditableGraph) -> None:
    """Replace GELU's approximation by tanh by one operator; it is recognized by what it computes."""
    cores = graph.nodes_of("Tanh")
    runner = SubgraphRunner(graph) if cores else None
    for core in cores:
        result = core.output(0)
        while runner and (node := graph.sole_reader(result, *_POLYNOMIAL)) is not None:
            result = node.output(0)
            source = _only_source(runner, result)
            if source is None:
                continue
            lengths = PassShape(5, 0)
            x = np.random.default_rng(0).uniform(-6, 6, sizes(runner.shape(source) or (), lengths)).astype(np.float32)
            expected = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
            if _computes(runner, source, result, lengths, x, expected):
                graph.replace_value(result, graph.value("FastGelu", [source], name=f"{result}.gelu", domain=MICROSOFT))
                break
    graph.sweep()


def _only_source(runner: SubgraphRunner, result: str) -> str | None:
    """The value of the same shape that a polynomial or its tanh is computed from; None if there are several."""
    sources, waiting = set(), [result]
    while waiting:
        name = waiting.pop()
        node = runner.graph.producer_of(name, *_POLYNOMIAL)
        if node is None:
            sources.add(name)
        else:
            waiting += runner.inputs(node)
    source = sources.pop()
    return source if not sources and runner.shape(source) == runner.shape(result) is not None else None
