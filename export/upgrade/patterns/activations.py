"""Fuses activation functions in plain operators.

The search follows element-wise operators after a `Sigmoid`, `Tanh` or `Erf` as long as everything is computed from one
value. The results for a range of numbers identify the function, however it was written (`subgraph_runner`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ....errors import ExportError
from ..edit.editable import MICROSOFT, EditableGraph, Node
from ..subgraph_runner import PassShape, SubgraphRunner

Float64Array = npt.NDArray[np.float64]

_RANGE: Final = np.linspace(-8, 8, 321)
_TOLERANCE: Final = 1e-5
_MAX_NODES: Final = 12
"""Largest number of nodes of an activation."""
_ELEMENTWISE: Final = frozenset({"Add", "Cast", "Div", "Erf", "Mul", "Neg", "Pow", "Sigmoid", "Sub", "Tanh"})


def _silu(x: Float64Array) -> Float64Array:
    return np.asarray(x / (1 + np.exp(-x)))


def _gelu(x: Float64Array) -> Float64Array:
    return np.array([value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x])


def _gelu_by_tanh(x: Float64Array) -> Float64Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


@dataclass(frozen=True)
class _Operator:
    op: str
    function: Callable[[Float64Array], Float64Array]
    attributes: Mapping[str, Any] = field(default_factory=dict)


_OPERATORS: Final = (
    _Operator("QuickGelu", _silu, {"alpha": 1.0}),
    _Operator("FastGelu", _gelu_by_tanh),
    _Operator("Gelu", _gelu),
)


def fuse_activations(graph: EditableGraph) -> None:
    """Replace SiLU and both forms of GELU by single operators."""
    runner = SubgraphRunner(graph)
    for node in graph.nodes_of("Sigmoid", "Tanh", "Erf"):
        if node.output(0) in runner.token_dependent:
            _replace(graph, runner, node)
    graph.sweep()


def _replace(graph: EditableGraph, runner: SubgraphRunner, core: Node) -> None:
    for end in _following(graph, core):
        for source in _sources(graph, runner, end):
            operator = _recognized(runner, source, end)
            if operator is not None:
                name = f"{end}.{operator.op}"
                fused = graph.add(operator.op, [source], name=name, domain=MICROSOFT, **operator.attributes)
                graph.replace_value(end, fused.output(0))
                return


def _following(graph: EditableGraph, core: Node) -> list[str]:
    """Values that are computed from the core element by element, the farthest first."""
    ends = [core.output(0)]
    for _ in range(_MAX_NODES):
        readers = graph.consumers(ends[-1])
        if len(readers) != 1 or readers[0].op not in _ELEMENTWISE or ends[-1] in graph.outputs:
            break
        ends.append(readers[0].output(0))
    return ends[:0:-1]


def _sources(graph: EditableGraph, runner: SubgraphRunner, end: str) -> Iterator[str]:
    """Values from which all of `end` is computed element by element, the nearest first."""
    frontier = {end}
    for _ in range(_MAX_NODES):
        computed = {name: node for name in frontier if (node := graph.producer(name)) is not None}
        if not computed:
            return
        latest = max(computed, key=lambda name: runner.order.get(computed[name], 0))
        node = computed[latest]
        if len(frontier) == 1 and latest != end and _has_core(graph, runner, end, latest):
            yield latest
        if node.op not in _ELEMENTWISE:
            return
        frontier.remove(latest)
        frontier.update(name for name in node.inputs if name in runner.token_dependent)


def _has_core(graph: EditableGraph, runner: SubgraphRunner, end: str, source: str) -> bool:
    """Whether the subgraph from `source` to `end` contains a core, and keeps the shape."""
    waiting, seen = [end], {source}
    while waiting:
        name = waiting.pop()
        node = graph.producer(name)
        if name in seen or node is None:
            continue
        seen.add(name)
        if node.op in ("Sigmoid", "Tanh", "Erf"):
            return runner.shape(source) == runner.shape(end)
        waiting += [each for each in node.inputs if each in runner.token_dependent]
    return False


def _recognized(runner: SubgraphRunner, source: str, end: str) -> _Operator | None:
    """The operator that computes `end` from `source`; None if it is not a known one."""
    shape = runner.shape(source)
    if shape is None or "new" not in shape:
        return None
    lengths = PassShape(len(_RANGE), 0)
    given = np.zeros([lengths.size(each) for each in shape], np.float32)
    np.moveaxis(given, shape.index("new"), -1)[...] = _RANGE
    try:
        out = runner.run([end], lengths, {source: given})[end].astype(np.float64)
    except ExportError:
        return None
    for operator in _OPERATORS:
        expected = operator.function(given.astype(np.float64).reshape(-1))
        if np.allclose(out.reshape(-1), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return operator
    return None
