"""Layers that keep a state in place of keys and values: short convolutions, gated delta nets and Mamba-2.

A short convolution projects its input to three parts B, C and x of `hidden_size` channels each, convolves B * x along
the tokens, every channel by itself with a kernel of a few tokens, and projects C times the result (LFM2).

A gated delta net keeps a matrix S of key channels times value channels for every value head. The channels of queries,
keys and values are convolved along the tokens first. Then every token decays S, replaces a part of what S has stored
under its key by its value, and reads S with its query:

    S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q / sqrt(key channels)

(Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024; Qwen3-Next, Qwen3.5).

A Mamba-2 state space projects its input to a gate, the channels x, B and C, and a step dt for every head; x, B and C
are convolved along the tokens first. A head keeps a matrix S of state channels times its own channels, which every
token decays by a scalar:

    S = exp(-exp(A) dt) S + B (dt x)^T;  y = S^T C + D x

B and C are shared by the heads of a group (Dao, Gu: Transformers are SSMs, 2024; Granite 4.0-H).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...errors import CheckpointError
from ...models.json_file import is_whole, shown
from ..checkpoint.json_fields import count, optional_list
from .layer_attention import layers_of_kind

_CONVOLUTION, _LINEAR, _ATTENTION = "conv", "linear_attention", "full_attention"
"""Names of layers in `layer_types`."""
MAX_KERNEL: Final = 64
"""Limit on the tokens of a kernel, each of which is a product of its own in the graph."""
MAX_HEADS: Final = 4096
_LISTED: Final = "full_attn_idxs"
"""Setting that lists the layers with attention beside convolutions where `layer_types` is absent."""
_MAMBA: Final = ("mamba", "linear_attention")
"""Names of the layers with Mamba-2 in `layer_types`: in checkpoints, and as transformers 5 writes them."""
_ATTENTION_OF_MAMBA: Final = ("attention", "full_attention")
_INFINITE: Final = (math.inf, "Infinity", {"__float__": "Infinity"})
"""Forms in which releases of transformers write an infinite number."""


@dataclass(frozen=True)
class ConvolutionConfig:
    """The convolution layers of a model."""

    layers: tuple[bool, ...]
    """Whether each layer has a convolution in place of attention."""
    kernel: int
    """Number of tokens that an output depends on, its own included."""
    biased: bool
    """Whether the convolution and both projections have biases."""


def read_convolutions(config: Mapping[str, Any], layers: int) -> ConvolutionConfig:
    """Return the convolution layers of a parsed config.json.

    Raises:
        CheckpointError: the settings are malformed, name an unknown kind of layer, or leave no layer with attention.
    """
    kinds = optional_list(config, "layer_types", layers)
    if kinds is None:
        indices = list(range(layers)) if config.get(_LISTED) is None else config[_LISTED]
        if not isinstance(indices, list) or any(not is_whole(each, 0) or each >= layers for each in indices):
            raise CheckpointError(f"config.json: {_LISTED} must list layers below {layers}, found {shown(indices)}")
        kinds = [_ATTENTION if layer in indices else _CONVOLUTION for layer in range(layers)]
    return ConvolutionConfig(
        layers_of_kind(kinds, (_CONVOLUTION,), (_ATTENTION,)),
        count(config, "conv_L_cache", default=3, minimum=2, maximum=MAX_KERNEL),
        bool(config.get("conv_bias", False)),
    )


@dataclass(frozen=True)
class RecurrentConfig:
    """The layers of a model with linear attention: gated delta nets, or state spaces of Mamba-2."""

    layers: tuple[bool, ...]
    """Whether each layer has a recurrence in place of attention."""
    key_heads: int
    """Number of key and query heads, each of which serves as many neighbouring value heads; of groups in Mamba-2."""
    value_heads: int
    key_dim: int
    """Channels of a key or query head; in Mamba-2 of B and C."""
    value_dim: int
    """Channels of a value head."""
    kernel: int
    """Number of tokens that the convolution of queries, keys and values, or of x, B and C, spans."""
    delta_rule: bool
    """Whether they are delta nets."""
    by_key_head: bool = False
    """Whether the projections give all of a key head together, with the value heads that it serves."""
    convolution_biased: bool = False
    biased: bool = False
    """Whether both projections have biases."""

    @property
    def key_width(self) -> int:
        """Channels of all keys together, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of all values together."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Channels of queries, keys and values together, which are convolved."""
        return 2 * self.key_width + self.value_width

    @property
    def update_width(self) -> int:
        """Numbers by which a token updates the states.

        Keys and values of the value heads, decays and betas; of Mamba-2, B of the groups, dt x and decays of the heads.
        """
        if self.delta_rule:
            return self.value_heads * (self.key_dim + self.value_dim + 2)
        return self.key_width + self.value_width + self.value_heads


def read_delta_nets(config: Mapping[str, Any], layers: int, *, by_key_head: bool = False) -> RecurrentConfig:
    """Return the delta nets of a parsed config.json.

    With `by_key_head`, one projection gives query, key, values and gates of the output of each key head, and another
    the inputs of its betas and decays (`in_proj_qkvz`, `in_proj_ba`).

    Raises:
        CheckpointError: the settings are malformed, name an unknown kind of layer, or leave no layer with attention.
    """
    kinds = optional_list(config, "layer_types", layers)
    if kinds is None:
        period = count(config, "full_attention_interval", default=4)
        kinds = [_LINEAR if (layer + 1) % period else _ATTENTION for layer in range(layers)]
    delta_layers = layers_of_kind(kinds, (_LINEAR,), (_ATTENTION,))
    key_heads = count(config, "linear_num_key_heads", default=16, maximum=MAX_HEADS)
    value_heads = count(config, "linear_num_value_heads", default=32, maximum=MAX_HEADS)
    if value_heads % key_heads:
        raise CheckpointError(
            f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    return RecurrentConfig(
        delta_layers,
        key_heads,
        value_heads,
        count(config, "linear_key_head_dim", default=128),
        count(config, "linear_value_head_dim", default=128),
        count(config, "linear_conv_kernel_dim", default=4, minimum=2, maximum=MAX_KERNEL),
        delta_rule=True,
        by_key_head=by_key_head,
    )


def read_mamba2(config: Mapping[str, Any], layers: int) -> RecurrentConfig:
    """Return the state spaces of a parsed config.json.

    Raises:
        CheckpointError: the settings are malformed, contradict each other or are not supported, name an unknown kind of
            layer, or leave no layer with attention.
    """
    kinds = optional_list(config, "layer_types", layers) or [_MAMBA[0]] * layers
    mamba_layers = layers_of_kind(kinds, _MAMBA, _ATTENTION_OF_MAMBA)
    limit = config.get("time_step_limit")
    if limit is not None and limit not in [[0, bound] for bound in _INFINITE]:
        raise CheckpointError(
            f"config.json: time_step_limit {shown(limit)} is not supported", "supported are steps without limits"
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(
            f"config.json: hidden_act {shown(config['hidden_act'])} is not supported",
            "the convolutions of Mamba-2 layers have silu",
        )
    heads = count(config, "mamba_n_heads", default=128, maximum=MAX_HEADS)
    groups = count(config, "mamba_n_groups", default=1, maximum=MAX_HEADS)
    if heads % groups:
        raise CheckpointError(f"mamba_n_heads {heads} is not a multiple of mamba_n_groups {groups}")
    width = count(config, "mamba_expand", default=2) * count(config, "hidden_size")
    automatic = config.get("mamba_d_head") in (None, "auto")
    head_dim = max(width // heads, 1) if automatic else count(config, "mamba_d_head")
    if heads * head_dim != width:
        raise CheckpointError(
            f"{heads} mamba_n_heads of {head_dim} channels (mamba_d_head) do not make mamba_expand * hidden_size, "
            f"which is {width}"
        )
    return RecurrentConfig(
        mamba_layers,
        groups,
        heads,
        count(config, "mamba_d_state", default=256),
        head_dim,
        count(config, "mamba_d_conv", default=4, minimum=2, maximum=MAX_KERNEL),
        delta_rule=False,
        convolution_biased=bool(config.get("mamba_conv_bias", True)),
        biased=bool(config.get("mamba_proj_bias", False)),
    )


StateLayers = ConvolutionConfig | RecurrentConfig
"""The layers of a model that keep a state; no model has several kinds."""
