"""Layers without attention: the states that they keep, as nodes of a graph and in NumPy.

The first layer of a hybrid layout has one of two mixers in place of attention. Both use that layer's projections, so
that all layouts share their weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from support.layout_kinds import HEAD_DIM, HEADS, CacheType, Layout, States
from support.small_graphs import Nodes

Array = npt.NDArray[Any]
KERNEL: Final = 3
CHANNELS: Final = HEADS * HEAD_DIM
CONVOLUTION: Final = (0.6 * np.cos(np.arange(CHANNELS * KERNEL))).reshape(CHANNELS, 1, KERNEL).astype(np.float32)
"""Weights of the convolution, `[channels, 1, tokens]`, the latest token last."""
_DECAYS: Final = 2
"""Number of heads with a decay of their own, one for each head of keys and values."""
_SCALE: Final = HEAD_DIM**-0.5


def state_layers(layout: Layout) -> int:
    """Number of leading layers that keep a state instead of keys and values."""
    return 0 if layout.states is States.NONE else 1


def state_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shapes of the states of a layer without the batch, by their names with `{}` for the layer, after `past_`."""
    kept = KERNEL - 1 if layout.operator_states else KERNEL
    shapes: dict[States, dict[str, tuple[int, ...]]] = {
        States.NONE: {},
        States.CONVOLUTION: {"conv.{}": (CHANNELS, kept)},
        States.RECURRENT: {"conv.{}": (CHANNELS, kept), "recurrent.{}": (_DECAYS, HEAD_DIM, HEAD_DIM)},
    }
    return shapes[layout.states]


def state_names(layout: Layout, side: str, layer: int) -> list[str]:
    """Names of the inputs (`past`) or outputs (`present`) of a layer's states."""
    return [layout.name_of(f"{side}_{name}", layer) for name in state_shapes(layout)]


def state_values(layout: Layout, side: str) -> list[onnx.ValueInfoProto]:
    """The inputs (`past`) or outputs (`present`) with states."""
    batch: int | str = 1 if layout.fixed_batch else "batch_size"
    kind = TensorProto.FLOAT16 if layout.cache_type is CacheType.FLOAT16 else TensorProto.FLOAT
    return [
        helper.make_tensor_value_info(name, kind, [batch, *shape])
        for layer in range(state_layers(layout))
        for name, shape in zip(state_names(layout, side, layer), state_shapes(layout).values(), strict=True)
    ]


def write_mixer(
    nodes: Nodes,
    layout: Layout,
    output_names: Mapping[str, str],
    layer: int,
    normed: str,
    projected: Sequence[str],
    *,
    cached: bool,
) -> str:
    """Write the mixer of a layer; returns what its output projection takes, [batch, new, channels].

    Args:
        nodes: nodes of the graph or branch.
        layout: the layout.
        output_names: names of the outputs in this graph or branch.
        layer: number of the layer.
        normed: input of the layer, [batch, new, hidden].
        projected: query, key and value, [batch, new, heads * 16].
        cached: whether the graph takes states; otherwise they start with zeros.
    """
    half = layout.cache_type is CacheType.FLOAT16
    pasts = []
    for name, shape in zip(state_names(layout, "past", layer), state_shapes(layout).values(), strict=True):
        if not cached:
            pasts.append(nodes.constant(np.zeros((1, *shape)), np.float32, f"{name}/zeros"))
        else:
            pasts.append(nodes.op("Cast", name, to=TensorProto.FLOAT) if half else name)
    query, key, value = projected
    mixed, *states = _convolution(nodes, query, pasts[0], state_shapes(layout)["conv.{}"][1])
    if layout.states is States.RECURRENT:
        first = nodes.op("Slice", normed, nodes.constant([0]), nodes.constant([_DECAYS]), nodes.constant([2]))
        decay = nodes.op("Log", nodes.op("Sigmoid", first))
        outputs = [f"{nodes.prefix}mixed_{layer}", f"{nodes.prefix}state_{layer}"]
        attributes = {"q_num_heads": HEADS, "kv_num_heads": _DECAYS, "update_rule": "gated", "scale": _SCALE}
        nodes.op(
            "LinearAttention",
            *(mixed, key, value, pasts[1], decay),
            outputs=outputs,
            domain="com.microsoft",
            **attributes,
        )
        mixed = outputs[0]
        states.append(outputs[1])
    for name, state in zip(state_names(layout, "present", layer), states, strict=True):
        if half:
            nodes.op("Cast", state, to=TensorProto.FLOAT16, outputs=[output_names[name]])
        else:
            nodes.op("Identity", state, outputs=[output_names[name]])
    return mixed


def _convolution(nodes: Nodes, value: str, past: str, kept: int) -> tuple[str, str]:
    """The convolved tokens [batch, new, channels], and the state after them [batch, channels, kept]."""
    turned = nodes.op("Transpose", value, perm=[0, 2, 1])
    weights = nodes.constant(CONVOLUTION, np.float32, "convolution")
    if kept < KERNEL:
        outputs = [f"{nodes.prefix}{past}/convolved", f"{nodes.prefix}{past}/present"]
        attributes = {"ndim": 1, "activation": "none"}
        inputs = [turned, weights, "", past]
        nodes.op("CausalConvWithState", *inputs, outputs=outputs, domain="com.microsoft", **attributes)
        convolved, present = outputs
    else:
        end, last = nodes.constant([np.iinfo(np.int64).max]), nodes.constant([2])
        together = nodes.op("Concat", past, turned, axis=2)
        seen = nodes.op("Slice", together, nodes.constant([kept - KERNEL + 1]), end, last)
        convolved = nodes.op("Conv", seen, weights, group=CHANNELS)
        present = nodes.op("Slice", together, nodes.constant([-kept]), end, last)
    return nodes.op("Transpose", convolved, perm=[0, 2, 1]), present


class Mixer:
    """The mixer of one layer in float64 NumPy, with its states."""

    def __init__(self, states: States) -> None:
        self._recurrent = states is States.RECURRENT
        self._inputs = np.zeros((KERNEL - 1, CHANNELS))
        self._state = np.zeros((_DECAYS, HEAD_DIM, HEAD_DIM))

    def forward(self, normed: Array, query: Array, key: Array, value: Array) -> Array:
        """What the output projection takes, `[n, channels]`, of tokens that follow those of earlier calls."""
        together = np.concatenate([self._inputs, query])
        self._inputs = together[-KERNEL + 1 :]
        mixed: Array = sum(
            together[index : index + len(query)] * CONVOLUTION[:, 0, index].astype(np.float64)
            for index in range(KERNEL)
        )
        if not self._recurrent:
            return mixed
        decays = 1 / (1 + np.exp(-normed[:, :_DECAYS]))
        outputs = []
        for token, decay in enumerate(decays):
            keys, values = (each[token].reshape(_DECAYS, HEAD_DIM) for each in (key, value))
            self._state = self._state * decay[:, None, None] + keys[:, :, None] * values[:, None]
            heads = mixed[token].reshape(HEADS, HEAD_DIM)
            outputs.append([_SCALE * heads[index] @ self._state[index * _DECAYS // HEADS] for index in range(HEADS)])
        return np.array(outputs).reshape(len(query), CHANNELS)
