"""Layers with a gated short convolution in place of attention.

Such a layer projects its input to three parts B, C and x of `hidden_size` channels each, convolves B * x along the
tokens, every channel by itself with a kernel of a few tokens, and projects C times the result (LFM2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...errors import CheckpointError
from ...models.json_file import is_whole, shown
from ..checkpoint.json_fields import count, optional_list
from .attention_shapes import layers_of_kind

_CONVOLUTION, _ATTENTION = "conv", "full_attention"
MAX_KERNEL: Final = 64
"""Limit on the tokens of a kernel, each of which is a product of its own in the graph."""


@dataclass(frozen=True)
class ConvolutionConfig:
    """The convolution layers of a model."""

    layers: tuple[bool, ...]
    """Whether each layer has a convolution in place of attention."""
    kernel: int
    """Number of tokens that an output depends on, its own included."""
    biased: bool
    """Whether the convolution and both projections have biases."""


@dataclass(frozen=True)
class ShortConvolution:
    """The convolution layers of a family, by the names of its settings in config.json."""

    kernel: str = "conv_L_cache"
    """Number of tokens that an output depends on, its own included."""
    bias: str = "conv_bias"
    """Whether the convolution and both projections have biases."""
    attention: str = "full_attn_idxs"
    """Setting that lists the layers with attention where `layer_types` is absent."""
    module: str = "conv"
    """Module of a layer's convolution, which contains `in_proj`, `conv` and `out_proj`."""

    def read(self, config: Mapping[str, Any], layers: int) -> ConvolutionConfig:
        """Return the convolution layers of a parsed config.json.

        Raises:
            CheckpointError: the settings are malformed, name an unknown kind of layer, or leave no layer with
                attention.
        """
        kinds = optional_list(config, "layer_types", layers)
        if kinds is None:
            kinds = [_ATTENTION if each else _CONVOLUTION for each in self._listed(config, layers)]
        return ConvolutionConfig(
            layers_of_kind(kinds, (_CONVOLUTION,), (_ATTENTION,)),
            count(config, self.kernel, default=3, minimum=2, maximum=MAX_KERNEL),
            bool(config.get(self.bias, False)),
        )

    def _listed(self, config: Mapping[str, Any], layers: int) -> list[bool]:
        """Whether each layer has attention, where the settings list the indices of those that do."""
        indices = config.get(self.attention)
        if indices is None:
            return [True] * layers
        if not isinstance(indices, list) or any(not is_whole(each, 0) or each >= layers for each in indices):
            raise CheckpointError(
                f"config.json: {self.attention} must list layers below {layers}, found {shown(indices)}"
            )
        return [layer in indices for layer in range(layers)]
