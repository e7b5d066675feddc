"""Activation functions in plain operators become single ones.

From a `Sigmoid`, `Tanh` or `Erf` the graph is followed forwards, element by element, as far as everything comes from
one value. What comes out for a range of numbers tells the function, in whatever way it was written (`probe`).
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
from .subgraph_probe import Moment, Probe

Float64Array = npt.NDArray[np.float64]

_RANGE: Final = np.linspace(-8, 8, 321)
_TOLERANCE: Final = 1e-5
_LONGEST: Final = 12
"""Nodes of an activation at most."""
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
    """Replace SiLU and both kinds of GELU."""
    probe = Probe(graph)
    for node in graph.nodes_of("Sigmoid", "Tanh", "Erf"):
        if node.output(0) in probe.tokens_of:
            _replace(graph, probe, node)
    graph.sweep()


def _replace(graph: EditableGraph, probe: Probe, core: Node) -> None:
    for end in _onwards(graph, core):
        for source in _sources(graph, probe, end):
            operator = _meaning(probe, source, end)
            if operator is not None:
                name = f"{end}.{operator.op}"
                fused = graph.add(operator.op, [source], name=name, domain=MICROSOFT, **operator.attributes)
                graph.hand_over(end, fused.output(0))
                return


def _onwards(graph: EditableGraph, core: Node) -> list[str]:
    """Values that follow from the core, the farthest first."""
    ends = [core.output(0)]
    for _ in range(_LONGEST):
        readers = graph.consumers(ends[-1])
        if len(readers) != 1 or readers[0].op not in _ELEMENTWISE or ends[-1] in graph.outputs:
            break
        ends.append(readers[0].output(0))
    return ends[:0:-1]


def _sources(graph: EditableGraph, probe: Probe, end: str) -> Iterator[str]:
    """Values that all of `end` comes from, element by element, the nearest first."""
    frontier = {end}
    for _ in range(_LONGEST):
        made = {name: node for name in frontier if (node := graph.producer(name)) is not None}
        if not made:
            return
        latest = max(made, key=lambda name: probe.order.get(made[name], 0))
        node = made[latest]
        if len(frontier) == 1 and latest != end and _is_whole(graph, probe, end, latest):
            yield latest
        if node.op not in _ELEMENTWISE:
            return
        frontier.remove(latest)
        frontier.update(name for name in node.inputs if name in probe.tokens_of)


def _is_whole(graph: EditableGraph, probe: Probe, end: str, source: str) -> bool:
    """Whether the piece has a core inside, and is not only what follows from one."""
    waiting, seen = [end], {source}
    while waiting:
        name = waiting.pop()
        node = graph.producer(name)
        if name in seen or node is None:
            continue
        seen.add(name)
        if node.op in ("Sigmoid", "Tanh", "Erf"):
            return probe.extents(source) == probe.extents(end)
        waiting += [each for each in node.inputs if each in probe.tokens_of]
    return False


def _meaning(probe: Probe, source: str, end: str) -> _Operator | None:
    extents = probe.extents(source)
    if extents is None or "rows" not in extents:
        return None
    moment = Moment(len(_RANGE), 0)
    given = np.zeros([moment.extent(each) for each in extents], np.float32)
    rows = np.moveaxis(given, extents.index("rows"), -1)
    rows[...] = _RANGE
    try:
        out = probe.run([end], moment, {source: given})[end].astype(np.float64)
    except ExportError:
        return None
    for operator in _OPERATORS:
        expected = operator.function(given.astype(np.float64).reshape(-1))
        if np.allclose(out.reshape(-1), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return operator
    return None
