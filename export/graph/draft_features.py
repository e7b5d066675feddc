"""The output of a target with which a draft head works: hidden states of the tokens of a pass."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InputError
from ...models.draft_heads import HeadKind, feature_layers
from ..checkpoint.config import DecoderConfig


@dataclass(frozen=True)
class DraftFeatures:
    """Which hidden states a graph gives as `draft_features`."""

    layers: tuple[int, ...] = ()
    """Layers whose inputs, the residual stream, are concatenated; the number of layers stands for the output of the
    last one. Empty for the states after the last norm."""
    all_tokens: bool = True
    """Whether all tokens of a pass have features, or those with logits only."""

    def size(self, config: DecoderConfig) -> int:
        """Number of features of a token."""
        return max(1, len(self.layers)) * config.hidden_size

    def needs_last_layer(self, config: DecoderConfig) -> bool:
        """Whether the last layer has to run for tokens without logits too."""
        return self.all_tokens and (self.after_norm or config.layers in self.layers)

    @property
    def after_norm(self) -> bool:
        """Whether the features are what the LM head reads."""
        return not self.layers


def eagle_features(config: DecoderConfig, listed: tuple[int, ...] | None) -> DraftFeatures:
    """The features of an EAGLE-3 head.

    Args:
        config: the target.
        listed: the layers that the head's config.json lists; None for the default.

    Raises:
        InputError: the target does not have such layers.
    """
    layers = feature_layers(config.layers, listed)
    if not all(0 <= layer < config.layers for layer in layers):
        raise InputError(
            f"the head reads the inputs of layers {', '.join(map(str, layers))}, but the model has {config.layers}",
            "give a head that was trained for this model",
        )
    return DraftFeatures(layers)


def features_for(kind: HeadKind, config: DecoderConfig, listed: tuple[int, ...] | None) -> DraftFeatures:
    """The features that a head of a kind takes; arguments and errors as for `eagle_features`."""
    return eagle_features(config, listed) if kind is HeadKind.EAGLE else DraftFeatures(all_tokens=False)
