"""Layers with a Mamba-2 state space in place of attention.

Such a layer projects its input to a gate, the channels x, B and C, and a step dt for every head; x, B and C are
convolved along the tokens first. A head keeps a matrix S of state channels times its own channels, which every token
decays by a scalar:

    S = exp(-exp(A) dt) S + B (dt x)^T;  y = S^T C + D x

B and C are shared by the heads of a group (Dao, Gu: Transformers are SSMs, 2024; Granite 4.0-H).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...errors import CheckpointError
from ...models.json_file import shown
from ..checkpoint.json_fields import count, optional_list
from .attention_shapes import layers_of_kind
from .delta_net import MAX_HEADS
from .short_convolution import MAX_KERNEL

_MAMBA: Final = ("mamba", "linear_attention")
"""Names of the layers in `layer_types`: those of checkpoints, and those that transformers 5 writes."""
_ATTENTION: Final = ("attention", "full_attention")

_INFINITE: Final = (math.inf, "Infinity", {"__float__": "Infinity"})
"""Forms in which releases of transformers write an infinite number."""


@dataclass(frozen=True)
class Mamba2Config:
    """The layers of a model with a Mamba-2 state space."""

    layers: tuple[bool, ...]
    """Whether each layer has a state space in place of attention."""
    groups: int
    """Number of B and C, each of which serves as many neighbouring heads."""
    value_heads: int
    key_dim: int
    """State channels: those of B and C."""
    value_dim: int
    """Channels of a head."""
    kernel: int
    """Number of tokens that the convolution of x, B and C spans."""
    convolution_biased: bool
    biased: bool
    """Whether both projections have biases."""

    @property
    def key_width(self) -> int:
        """Channels of B of all groups, and of C."""
        return self.groups * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of all heads together."""
        return self.value_heads * self.value_dim

    @property
    def update_width(self) -> int:
        """Numbers by which a token updates the states: B of the groups, dt x and the decays of the heads."""
        return self.key_width + self.value_width + self.value_heads

    @property
    def convolved(self) -> int:
        """Channels of x, B and C together, which are convolved."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True)
class Mamba2:
    """The state spaces of a family."""

    module: str = "mamba"
    """Module of a layer's state space."""

    def read(self, config: Mapping[str, Any], layers: int) -> Mamba2Config:
        """Return the state spaces of a parsed config.json.

        Raises:
            CheckpointError: the settings are malformed, contradict each other or are not supported, name an unknown
                kind of layer, or leave no layer with attention.
        """
        kinds = optional_list(config, "layer_types", layers) or [_MAMBA[0]] * layers
        mamba_layers = layers_of_kind(kinds, _MAMBA, _ATTENTION)
        _refuse_unsupported(config)
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
        return Mamba2Config(
            mamba_layers,
            groups,
            heads,
            count(config, "mamba_d_state", default=256),
            head_dim,
            count(config, "mamba_d_conv", default=4, minimum=2, maximum=MAX_KERNEL),
            bool(config.get("mamba_conv_bias", True)),
            bool(config.get("mamba_proj_bias", False)),
        )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
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
