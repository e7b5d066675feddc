"""Greedy tokens of the tiny llama in float64 NumPy, which every layout has to give.

Unlike the exporter's reference decoder, it supports sliding windows and int8 caches, and it has a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgerun.export.check.reference_operations import softmax
from support.layout_kinds import HEAD_DIM, HEADS, LAYERS, VOCABULARY, CacheType, Layout, States
from support.layout_states import Mixer
from support.tiny_models import tiny_config, tiny_weights

Array = npt.NDArray[Any]
INT8_SCALE = 0.05
"""Scale of an int8 cache."""


def layout_weights(layout: Layout, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Weights of a layout's model by their Hugging Face names."""
    return tiny_weights(tiny_config("llama", **layout.overrides), seed)


class _Computed(NamedTuple):
    """What of a layout and its weights changes the logits."""

    kv_heads: int
    window: int | None
    int8_cache: bool
    states: States
    seed: int


def _computed(layout: Layout, seed: int) -> _Computed:
    return _Computed(layout.kv_heads, layout.window, layout.cache_type is CacheType.INT8, layout.states, seed)


def greedy_tokens(layout: Layout, prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The `count` greedy tokens after `prompt`."""
    return _greedy(_computed(layout, seed), tuple(prompt), count)[0]


def clear_prompt(layout: Layout, length: int, count: int, margin: float, salt: int = 0) -> list[int]:
    """Random tokens after which none of `count` greedy choices is close: rounding errors change no token."""
    for seed in range(200):
        prompt: list[int] = np.random.default_rng((length, salt, seed)).integers(5, VOCABULARY, length).tolist()
        # Most prompts with a close choice have one among the first tokens.
        if all(_greedy(_computed(layout, 0), tuple(prompt), most)[1] > margin for most in (count // 4, count)):
            return prompt
    raise AssertionError("every prompt has a close choice")


@cache
def _greedy(computed: _Computed, prompt: tuple[int, ...], count: int) -> tuple[list[int], float]:
    """The greedy tokens, and the smallest difference between the two highest logits."""
    decoder = Decoder(computed)
    tokens: list[int] = []
    margins = []
    while len(tokens) < count:
        logits = decoder.forward(tokens[-1:] or prompt)[-1]
        second, first = np.partition(logits, -2)[-2:]
        margins.append(float(first - second))
        tokens.append(int(logits.argmax()))
    return tokens, min(margins, default=np.inf)


@cache
def _weights(kv_heads: int, seed: int) -> dict[str, Array]:
    tensors = tiny_weights(tiny_config("llama", num_key_value_heads=kv_heads), seed)
    return {name: value.astype(np.float64) for name, value in tensors.items()}


class Decoder:
    """A llama decoder with a growing cache, whose first layer may keep another state instead."""

    def __init__(self, computed: _Computed) -> None:
        self.weights = _weights(computed.kv_heads, computed.seed)
        self.computed = computed
        self.cache: list[list[Array]] = [[np.zeros((0, computed.kv_heads, HEAD_DIM))] * 2 for _ in range(LAYERS)]
        self.length = 0
        self.mixers = {} if computed.states is States.NONE else {0: Mixer(computed.states)}

    @classmethod
    def of(cls, layout: Layout) -> Decoder:
        """The decoder of a layout's model."""
        return cls(_computed(layout, 0))

    def forward(self, tokens: Sequence[int]) -> Array:
        """Logits [n, vocabulary] of `tokens`, which follow those of earlier calls."""
        weights = self.weights
        positions = self.length + np.arange(len(tokens))
        self.length += len(tokens)
        hidden = weights["model.embed_tokens.weight"][list(tokens)]
        for layer in range(LAYERS):
            name = f"model.layers.{layer}"
            normed = _norm(hidden, weights[f"{name}.input_layernorm.weight"])
            hidden = hidden + self._attention(layer, normed, positions)
            normed = _norm(hidden, weights[f"{name}.post_attention_layernorm.weight"])
            gate, up = (normed @ weights[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
        return _norm(hidden, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T

    def _attention(self, layer: int, normed: Array, positions: npt.NDArray[np.int64]) -> Array:
        name = f"model.layers.{layer}.self_attn"
        length = len(positions)
        projected = [normed @ self.weights[f"{name}.{part}_proj.weight"].T for part in "qkv"]
        if layer in self.mixers:
            return self.mixers[layer].forward(normed, *projected) @ self.weights[f"{name}.o_proj.weight"].T
        query, key, value = (each.reshape(length, -1, HEAD_DIM) for each in projected)
        query, key = _rotate(query, positions), _rotate(key, positions)
        if self.computed.int8_cache:
            key, value = (np.clip(np.rint(x / INT8_SCALE), -128, 127) * INT8_SCALE for x in (key, value))
        keys, values = (np.concatenate([old, new]) for old, new in zip(self.cache[layer], (key, value), strict=True))
        self.cache[layer] = [keys, values]
        distance = positions[:, None] - np.arange(len(keys))
        masked = distance < 0
        if self.computed.window is not None and layer % 2 == 1:
            masked |= distance >= self.computed.window
        # As [heads, tokens, channels], with keys and values repeated for the heads that share them.
        keys, values = (
            np.repeat(each, HEADS // self.computed.kv_heads, axis=1).swapaxes(0, 1) for each in (keys, values)
        )
        scores = query.swapaxes(0, 1) @ keys.swapaxes(1, 2) / np.sqrt(HEAD_DIM)
        heads = softmax(np.where(masked, -np.inf, scores)) @ values
        return heads.swapaxes(0, 1).reshape(length, -1) @ self.weights[f"{name}.o_proj.weight"].T


def _norm(value: Array, weight: Array) -> Array:
    return value / np.sqrt(np.mean(value**2, axis=-1, keepdims=True) + 1e-5) * weight


def _rotate(heads: Array, positions: npt.NDArray[np.int64]) -> Array:
    angles = positions[:, None] * 10000.0 ** (-2 * np.arange(HEAD_DIM // 2) / HEAD_DIM)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
