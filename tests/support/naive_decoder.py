"""Decoders of one or two attention layers and nothing else, in plain operators, with attention written in many ways."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from support.layout_nodes import Nodes

VOCABULARY: Final = 50
WIDTH: Final = 32
OPSET: Final = 17


class Masking(Enum):
    """How rows are kept from seeing what they must not."""

    ADDED = "0 or minus infinity is added"
    CHOSEN = "Where puts a large negative number"
    SLOPED = "a penalty that grows with the distance is added (ALiBi)"
    OPEN = "every row sees all, which is right for one new row"
    BLOCKS = "a row sees its own block of 4 positions and what is before it there"


class Turning(Enum):
    """Which channels make a pair in the rotation."""

    NONE = "no rotation"
    HALVES = "i and i + n/2"
    NEIGHBOURS = "2i and 2i + 1"
    BY_LENGTH = "i and i + n/2, by an angle that depends on the text's length too"


@dataclass(frozen=True)
class Plain:
    """One way to write a decoder."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 1
    scale: float = 0.25
    scale_on_both: bool = False
    """Whether queries and keys are each multiplied by the scale's root, and not the scores by the scale."""
    softcap: float = 0.0
    window: int = 0
    masking: Masking = Masking.ADDED
    turning: Turning = Turning.HALVES
    turned: int = 16
    """Channels of a head that are rotated."""
    factor: float = 1.0
    """By which cosines and sines are multiplied (YaRN, LongRoPE)."""
    rows_first: bool = False
    """Whether heads are rotated before rows and heads change places."""
    key_factor: float = 1.0
    """By which the keys' cosines and sines are multiplied besides."""


def plain_decoder(plain: Plain, seed: int = 0) -> onnx.ModelProto:
    """The decoder, seeded random weights inside."""
    return _Writer(plain, seed).model()


class _Writer:
    def __init__(self, plain: Plain, seed: int) -> None:
        self._plain = plain
        self._nodes = Nodes(OPSET)
        self._random = np.random.default_rng(seed)

    def model(self) -> onnx.ModelProto:
        plain, nodes = self._plain, self._nodes
        declare = helper.make_tensor_value_info
        total = nodes.extent("attention_mask", 1)
        first = nodes.extent("past_key_values.0.key", 2)
        slots = nodes.op("Unsqueeze", nodes.span(nodes.constant([0]), total), nodes.constant([0]))
        rows = nodes.op("Unsqueeze", nodes.span(first, total), nodes.constant([1]))
        value = nodes.op("Gather", self._weight("table", VOCABULARY, WIDTH), "input_ids")
        for layer in range(plain.layers):
            attended = self._attention(layer, value, slots, rows, total)
            value = nodes.op("Add", value, self._linear(attended, f"o.{layer}", plain.heads * plain.head_dim, WIDTH))
        nodes.op("MatMul", value, self._weight("head", WIDTH, VOCABULARY), outputs=["logits"])
        ids = [declare(name, TensorProto.INT64, ["batch", "new"]) for name in ("input_ids", "position_ids")]
        mask = declare("attention_mask", TensorProto.INT64, ["batch", "total"])
        ports = {
            side: [
                declare(
                    f"{name}.{layer}.{half}",
                    TensorProto.FLOAT,
                    ["batch", plain.kv_heads, side, plain.head_dim],
                )
                for layer in range(plain.layers)
                for half in ("key", "value")
            ]
            for side, name in (("past", "past_key_values"), ("total", "present"))
        }
        logits = declare("logits", TensorProto.FLOAT, ["batch", "new", VOCABULARY])
        graph = helper.make_graph(
            nodes.nodes,
            "plain",
            [*ids, mask, *ports["past"]],
            [logits, *ports["total"]],
            [onnx.numpy_helper.from_array(array, name) for name, array in nodes.constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)

    def _attention(self, layer: int, value: str, slots: str, rows: str, total: str) -> str:
        plain, nodes = self._plain, self._nodes
        query = self._heads(value, f"q.{layer}", plain.heads, total)
        key = self._heads(value, f"k.{layer}", plain.kv_heads, total, plain.key_factor)
        fresh = self._heads(value, f"v.{layer}", plain.kv_heads, None)
        keys, values = (
            nodes.op("Concat", f"past_key_values.{layer}.{half}", new, outputs=[f"present.{layer}.{half}"], axis=2)
            for half, new in (("key", key), ("value", fresh))
        )
        keys, values = self._repeated(keys), self._repeated(values)
        turned = nodes.op("Transpose", keys, perm=[0, 1, 3, 2])
        if plain.scale_on_both:
            root = nodes.constant(plain.scale**0.5, np.float32)
            scores = nodes.op("MatMul", nodes.op("Mul", query, root), nodes.op("Mul", turned, root))
        else:
            inverse = nodes.constant(1 / plain.scale, np.float32)
            scores = nodes.op("Div", nodes.op("MatMul", query, turned), inverse)
        if plain.softcap:
            cap = nodes.constant(plain.softcap, np.float32)
            scores = nodes.op("Mul", nodes.op("Tanh", nodes.op("Div", scores, cap)), cap)
        weights = nodes.op("Softmax", self._masked(scores, slots, rows), axis=-1)
        merged = nodes.op("Transpose", nodes.op("MatMul", weights, values), perm=[0, 2, 1, 3])
        return nodes.op("Reshape", merged, nodes.constant([0, 0, -1]))

    def _heads(self, value: str, name: str, count: int, total: str | None, factor: float = 1.0) -> str:
        plain, nodes = self._plain, self._nodes
        wide = self._linear(value, name, WIDTH, count * plain.head_dim)
        apart = nodes.op("Reshape", wide, nodes.constant([0, 0, count, plain.head_dim]))
        turns = total is not None and plain.turning is not Turning.NONE
        if turns and plain.rows_first:
            apart = self._turn(apart, total or "", 2, factor)
        heads = nodes.op("Transpose", apart, perm=[0, 2, 1, 3])
        return self._turn(heads, total or "", 1, factor) if turns and not plain.rows_first else heads

    def _turn(self, heads: str, total: str, axis: int, factor: float) -> str:
        """Rotate the first `turned` channels; `axis` is that of the heads."""
        plain, nodes = self._plain, self._nodes
        pairs = plain.turned // 2
        angles = self._angles(total, pairs)
        factor *= plain.factor
        cosines, sines = (
            nodes.op(
                "Mul",
                nodes.op("Unsqueeze", nodes.op(kind, angles), nodes.constant([axis])),
                nodes.constant(factor, np.float32),
            )
            for kind in ("Cos", "Sin")
        )
        neighbours = plain.turning is Turning.NEIGHBOURS
        bounds = ((0, plain.turned, 2), (1, plain.turned, 2)) if neighbours else ((0, pairs, 1), (pairs, 2 * pairs, 1))
        first, second = (self._cut(heads, *each) for each in bounds)
        left = nodes.op("Sub", nodes.op("Mul", first, cosines), nodes.op("Mul", second, sines))
        right = nodes.op("Add", nodes.op("Mul", second, cosines), nodes.op("Mul", first, sines))
        if neighbours:
            last = nodes.constant([-1])
            parts = [nodes.op("Unsqueeze", each, last) for each in (left, right)]
            shape = nodes.constant([0, 0, 0, plain.turned])
            rotated = nodes.op("Reshape", nodes.op("Concat", *parts, axis=-1), shape)
        else:
            rotated = nodes.op("Concat", left, right, axis=-1)
        if plain.turned == plain.head_dim:
            return rotated
        return nodes.op("Concat", rotated, self._cut(heads, plain.turned, plain.head_dim, 1), axis=-1)

    def _angles(self, total: str, pairs: int) -> str:
        nodes = self._nodes
        positions = nodes.op("Cast", "position_ids", to=TensorProto.FLOAT)
        if self._plain.turning is Turning.BY_LENGTH:
            positions = nodes.op("Div", positions, nodes.op("Cast", total, to=TensorProto.FLOAT))
        apart = nodes.op("Unsqueeze", positions, nodes.constant([-1]))
        return nodes.op("Mul", apart, nodes.constant(100.0 ** -(np.arange(pairs) / pairs), np.float32))

    def _cut(self, value: str, start: int, stop: int, step: int) -> str:
        return self._nodes.op("Slice", value, *(self._nodes.constant([each]) for each in (start, stop, -1, step)))

    def _repeated(self, heads: str) -> str:
        plain, nodes = self._plain, self._nodes
        group = plain.heads // plain.kv_heads
        if group == 1:
            return heads
        apart = nodes.op("Unsqueeze", heads, nodes.constant([2]))
        many = nodes.op("Tile", apart, nodes.constant([1, 1, group, 1, 1]))
        return nodes.op("Reshape", many, nodes.constant([0, plain.heads, -1, plain.head_dim]))

    def _masked(self, scores: str, slots: str, rows: str) -> str:
        plain, nodes = self._plain, self._nodes
        seen = nodes.op("LessOrEqual", slots, rows)
        if plain.masking is Masking.OPEN:
            return scores
        if plain.masking is Masking.BLOCKS:
            four = nodes.constant(4)
            same = nodes.op("Equal", nodes.op("Div", slots, four), nodes.op("Div", rows, four))
            seen = nodes.op("And", seen, same)
        if plain.window:
            since = nodes.op("Sub", rows, nodes.constant(plain.window))
            seen = nodes.op("And", seen, nodes.op("Greater", slots, since))
        if plain.masking is Masking.CHOSEN:
            return nodes.op("Where", seen, scores, nodes.constant(-1e9, np.float32))
        bias = nodes.op("Where", seen, nodes.constant(0, np.float32), nodes.constant(-np.inf, np.float32))
        if plain.masking is Masking.SLOPED:
            distance = nodes.op("Cast", nodes.op("Sub", slots, rows), to=TensorProto.FLOAT)
            bias = nodes.op("Add", bias, nodes.op("Mul", distance, nodes.constant(0.1, np.float32)))
        return nodes.op("Add", scores, bias)

    def _linear(self, value: str, name: str, width: int, out: int) -> str:
        return self._nodes.op("MatMul", value, self._weight(name, width, out))

    def _weight(self, name: str, first: int, second: int) -> str:
        value = self._random.standard_normal((first, second)) / np.sqrt(WIDTH)
        return self._nodes.constant(value, np.float32, name)
