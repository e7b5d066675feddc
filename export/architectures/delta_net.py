"""Layers with a gated delta net in place of attention.

Such a layer keeps a matrix S of key channels times value channels for every value head. The channels of queries, keys
and values are convolved along the tokens first. Then every token decays S, replaces a part of what S has stored under
its key by its value, and reads S with its query:

    S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q / sqrt(key channels)

(Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024; Qwen3-Next, Qwen3.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...errors import CheckpointError
from ..checkpoint.json_fields import count, optional_list
from .attention_shapes import layers_of_kind
from .short_convolution import MAX_KERNEL

_LINEAR, _ATTENTION = "linear_attention", "full_attention"
MAX_HEADS: Final = 4096


@dataclass(frozen=True)
class DeltaNetConfig:
    """The layers of a model with a gated delta net."""

    layers: tuple[bool, ...]
    """Whether each layer has a delta net in place of attention."""
    key_heads: int
    value_heads: int
    """A multiple of the key heads, each of which serves as many neighbouring value heads."""
    key_dim: int
    """Channels of a key or query head."""
    value_dim: int
    """Channels of a value head."""
    kernel: int
    """Number of tokens that the convolution of queries, keys and values spans."""
    by_key_head: bool
    """Whether the projections give all of a key head together, with the value heads that it serves."""

    @property
    def key_width(self) -> int:
        """Channels of all keys together, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of all values together."""
        return self.value_heads * self.value_dim

    @property
    def update_width(self) -> int:
        """Numbers by which a token updates the states: keys and values of the value heads, decays and betas."""
        return self.value_heads * (self.key_dim + self.value_dim + 2)

    @property
    def convolved(self) -> int:
        """Channels of queries, keys and values together, which are convolved."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta nets of a family, by the names of its settings in config.json."""

    interval: str = "full_attention_interval"
    """Setting n by which every n-th layer has attention, where `layer_types` is absent."""
    module: str = "linear_attn"
    """Module of a layer's delta net."""
    by_key_head: bool = False
    """Whether one projection gives query, key, values and gates of the output of each key head, and another the inputs
    of its betas and decays (`in_proj_qkvz`, `in_proj_ba`)."""

    def read(self, config: Mapping[str, Any], layers: int) -> DeltaNetConfig:
        """Return the delta nets of a parsed config.json.

        Raises:
            CheckpointError: the settings are malformed, name an unknown kind of layer, or leave no layer with
                attention.
        """
        kinds = optional_list(config, "layer_types", layers)
        if kinds is None:
            period = count(config, self.interval, default=4)
            kinds = [_LINEAR if (layer + 1) % period else _ATTENTION for layer in range(layers)]
        delta_layers = layers_of_kind(kinds, (_LINEAR,), (_ATTENTION,))
        key_heads = count(config, "linear_num_key_heads", default=16, maximum=MAX_HEADS)
        value_heads = count(config, "linear_num_value_heads", default=32, maximum=MAX_HEADS)
        if value_heads % key_heads:
            raise CheckpointError(
                f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
            )
        return DeltaNetConfig(
            delta_layers,
            key_heads,
            value_heads,
            count(config, "linear_key_head_dim", default=128),
            count(config, "linear_value_head_dim", default=128),
            count(config, "linear_conv_kernel_dim", default=4, minimum=2, maximum=MAX_KERNEL),
            self.by_key_head,
        )
