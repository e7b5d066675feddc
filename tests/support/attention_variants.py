"""Decoders of only attention layers, in plain operators that are written in many ways."""

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
    """How positions are masked."""

    ADDED = "0 or minus infinity is added"
    SELECTED = "Where selects the score or a large negative number"
    ALIBI = "a penalty that grows with the distance is added (ALiBi)"
    UNMASKED = "every token sees all, which is correct for one new token"
    BLOCKS = "a token sees the positions before it in its own block of 4"


class RotaryPairs(Enum):
    """Which channels are rotated as a pair."""

    NONE = "no rotation"
    HALVES = "i and i + n/2"
    ADJACENT = "2i and 2i + 1"
    LENGTH_DEPENDENT = "i and i + n/2, by an angle that also depends on the length of the sequence"


@dataclass(frozen=True)
class DecoderVariant:
    """One way to write a decoder with attention."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 1
    scale: float = 0.25
    scale_on_both: bool = False
    """Whether queries and keys are both multiplied by the root of the scale, instead of the scores by the scale."""
    softcap: float = 0.0
    window: int = 0
    masking: Masking = Masking.ADDED
    rotary: RotaryPairs = RotaryPairs.HALVES
    rotary_dim: int = 16
    """Number of channels of a head that are rotated."""
    rotary_scale: float = 1.0
    """Factor of cosines and sines (YaRN, LongRoPE)."""
    tokens_first: bool = False
    """Whether heads are rotated before the axes of tokens and heads are exchanged."""
    key_rotary_scale: float = 1.0
    """Additional factor of the cosines and sines of keys."""


def plain_decoder(variant: DecoderVariant, seed: int = 0) -> onnx.ModelProto:
    """The decoder with random weights."""
    return _Writer(variant, seed).model()


class _Writer:
    def __init__(self, variant: DecoderVariant, seed: int) -> None:
        self._variant = variant
        self._nodes = Nodes(OPSET)
        self._random = np.random.default_rng(seed)

    def model(self) -> onnx.ModelProto:
        variant, nodes = self._variant, self._nodes
        declare = helper.make_tensor_value_info
        total = nodes.extent("attention_mask", 1)
        first = nodes.extent("past_key_values.0.key", 2)
        slots = nodes.op("Unsqueeze", nodes.span(nodes.constant([0]), total), nodes.constant([0]))
        queries = nodes.op("Unsqueeze", nodes.span(first, total), nodes.constant([1]))
        value = nodes.op("Gather", self._weight("table", VOCABULARY, WIDTH), "input_ids")
        for layer in range(variant.layers):
            attended = self._attention(layer, value, slots, queries, total)
            value = nodes.op(
                "Add", value, self._linear(attended, f"o.{layer}", variant.heads * variant.head_dim, WIDTH)
            )
        nodes.op("MatMul", value, self._weight("head", WIDTH, VOCABULARY), outputs=["logits"])
        ids = [declare(name, TensorProto.INT64, ["batch", "new"]) for name in ("input_ids", "position_ids")]
        mask = declare("attention_mask", TensorProto.INT64, ["batch", "total"])
        caches = {
            side: [
                declare(
                    f"{name}.{layer}.{half}",
                    TensorProto.FLOAT,
                    ["batch", variant.kv_heads, side, variant.head_dim],
                )
                for layer in range(variant.layers)
                for half in ("key", "value")
            ]
            for side, name in (("past", "past_key_values"), ("total", "present"))
        }
        logits = declare("logits", TensorProto.FLOAT, ["batch", "new", VOCABULARY])
        return nodes.model([*ids, mask, *caches["past"]], [logits, *caches["total"]])

    def _attention(self, layer: int, value: str, slots: str, queries: str, total: str) -> str:
        variant, nodes = self._variant, self._nodes
        query = self._heads(value, f"q.{layer}", variant.heads, total)
        key = self._heads(value, f"k.{layer}", variant.kv_heads, total, variant.key_rotary_scale)
        new_value = self._heads(value, f"v.{layer}", variant.kv_heads, None)
        keys, values = (
            nodes.op("Concat", f"past_key_values.{layer}.{half}", new, outputs=[f"present.{layer}.{half}"], axis=2)
            for half, new in (("key", key), ("value", new_value))
        )
        keys, values = self._repeated(keys), self._repeated(values)
        transposed = nodes.op("Transpose", keys, perm=[0, 1, 3, 2])
        if variant.scale_on_both:
            root = nodes.constant(variant.scale**0.5, np.float32)
            scores = nodes.op("MatMul", nodes.op("Mul", query, root), nodes.op("Mul", transposed, root))
        else:
            inverse = nodes.constant(1 / variant.scale, np.float32)
            scores = nodes.op("Div", nodes.op("MatMul", query, transposed), inverse)
        if variant.softcap:
            cap = nodes.constant(variant.softcap, np.float32)
            scores = nodes.op("Mul", nodes.op("Tanh", nodes.op("Div", scores, cap)), cap)
        weights = nodes.op("Softmax", self._masked(scores, slots, queries), axis=-1)
        merged = nodes.op("Transpose", nodes.op("MatMul", weights, values), perm=[0, 2, 1, 3])
        return nodes.op("Reshape", merged, nodes.constant([0, 0, -1]))

    def _heads(self, value: str, name: str, count: int, total: str | None, scale: float = 1.0) -> str:
        variant, nodes = self._variant, self._nodes
        wide = self._linear(value, name, WIDTH, count * variant.head_dim)
        split = nodes.op("Reshape", wide, nodes.constant([0, 0, count, variant.head_dim]))
        rotates = total is not None and variant.rotary is not RotaryPairs.NONE
        if rotates and variant.tokens_first:
            split = self._rotate(split, total or "", 2, scale)
        heads = nodes.op("Transpose", split, perm=[0, 2, 1, 3])
        return self._rotate(heads, total or "", 1, scale) if rotates and not variant.tokens_first else heads

    def _rotate(self, heads: str, total: str, axis: int, scale: float) -> str:
        """Rotate the first `rotary_dim` channels; `axis` is that of the heads."""
        variant, nodes = self._variant, self._nodes
        pairs = variant.rotary_dim // 2
        angles = self._angles(total, pairs)
        scale *= variant.rotary_scale
        cosines, sines = (
            nodes.op(
                "Mul",
                nodes.op("Unsqueeze", nodes.op(kind, angles), nodes.constant([axis])),
                nodes.constant(scale, np.float32),
            )
            for kind in ("Cos", "Sin")
        )
        adjacent = variant.rotary is RotaryPairs.ADJACENT
        bounds = (
            ((0, variant.rotary_dim, 2), (1, variant.rotary_dim, 2))
            if adjacent
            else ((0, pairs, 1), (pairs, 2 * pairs, 1))
        )
        first, second = (self._cut(heads, *each) for each in bounds)
        left = nodes.op("Sub", nodes.op("Mul", first, cosines), nodes.op("Mul", second, sines))
        right = nodes.op("Add", nodes.op("Mul", second, cosines), nodes.op("Mul", first, sines))
        if adjacent:
            last = nodes.constant([-1])
            parts = [nodes.op("Unsqueeze", each, last) for each in (left, right)]
            shape = nodes.constant([0, 0, 0, variant.rotary_dim])
            rotated = nodes.op("Reshape", nodes.op("Concat", *parts, axis=-1), shape)
        else:
            rotated = nodes.op("Concat", left, right, axis=-1)
        if variant.rotary_dim == variant.head_dim:
            return rotated
        return nodes.op("Concat", rotated, self._cut(heads, variant.rotary_dim, variant.head_dim, 1), axis=-1)

    def _angles(self, total: str, pairs: int) -> str:
        nodes = self._nodes
        positions = nodes.op("Cast", "position_ids", to=TensorProto.FLOAT)
        if self._variant.rotary is RotaryPairs.LENGTH_DEPENDENT:
            positions = nodes.op("Div", positions, nodes.op("Cast", total, to=TensorProto.FLOAT))
        split = nodes.op("Unsqueeze", positions, nodes.constant([-1]))
        return nodes.op("Mul", split, nodes.constant(100.0 ** -(np.arange(pairs) / pairs), np.float32))

    def _cut(self, value: str, start: int, stop: int, step: int) -> str:
        return self._nodes.op("Slice", value, *(self._nodes.constant([each]) for each in (start, stop, -1, step)))

    def _repeated(self, heads: str) -> str:
        variant, nodes = self._variant, self._nodes
        group = variant.heads // variant.kv_heads
        if group == 1:
            return heads
        split = nodes.op("Unsqueeze", heads, nodes.constant([2]))
        many = nodes.op("Tile", split, nodes.constant([1, 1, group, 1, 1]))
        return nodes.op("Reshape", many, nodes.constant([0, variant.heads, -1, variant.head_dim]))

    def _masked(self, scores: str, slots: str, queries: str) -> str:
        variant, nodes = self._variant, self._nodes
        seen = nodes.op("LessOrEqual", slots, queries)
        if variant.masking is Masking.UNMASKED:
            return scores
        if variant.masking is Masking.BLOCKS:
            four = nodes.constant(4)
            same = nodes.op("Equal", nodes.op("Div", slots, four), nodes.op("Div", queries, four))
            seen = nodes.op("And", seen, same)
        if variant.window:
            since = nodes.op("Sub", queries, nodes.constant(variant.window))
            seen = nodes.op("And", seen, nodes.op("Greater", slots, since))
        if variant.masking is Masking.SELECTED:
            return nodes.op("Where", seen, scores, nodes.constant(-1e9, np.float32))
        bias = nodes.op("Where", seen, nodes.constant(0, np.float32), nodes.constant(-np.inf, np.float32))
        if variant.masking is Masking.ALIBI:
            distance = nodes.op("Cast", nodes.op("Sub", slots, queries), to=TensorProto.FLOAT)
            bias = nodes.op("Add", bias, nodes.op("Mul", distance, nodes.constant(0.1, np.float32)))
        return nodes.op("Add", scores, bias)

    def _linear(self, value: str, name: str, width: int, out: int) -> str:
        return self._nodes.op("MatMul", value, self._weight(name, width, out))

    def _weight(self, name: str, first: int, second: int) -> str:
        value = self._random.standard_normal((first, second)) / np.sqrt(WIDTH)
        return self._nodes.constant(value, np.float32, name)
