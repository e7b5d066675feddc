"""config.json of a Hugging Face checkpoint as a `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...errors import CheckpointError
from ...models.json_file import shown
from ...models.manifest import BlockDiffusion
from ..architectures import find_family
from ..architectures.family import Experts, Family, Power, chosen, first_present
from ..architectures.layer_attention import (
    KEYS_AS_VALUES,
    HeadShape,
    cache_owners,
    full_attention_heads,
    rotated_layers,
)
from ..architectures.state_layers import StateLayers
from .json_fields import count, number, optional_number, read_json
from .rope import QueryScaling, Rope, max_positions, read_query_scaling, read_rotations

_MOST: Final = 10_000
"""Limit on layers, and on experts of a layer."""
SILU, GELU_TANH = "silu", "gelu_pytorch_tanh"
"""Activation functions of the gate."""


@dataclass(frozen=True)
class LayerAttention:
    """Properties of attention that may differ between layers."""

    rope: Rope | None
    """Rotary embedding; None for a layer without positions."""
    window: int | None
    """Number of most recent tokens, including itself, that a token attends to; None for all."""
    kv_heads: int
    """Number of key and value heads."""
    head_dim: int
    """Number of channels of a head."""
    rotated_channels: int
    """Number of leading channels of a head that are rotated."""
    owner: int | None = None
    """The earlier layer whose keys and values are read; None for keys and values of its own."""
    keys_as_values: bool = False
    """Whether values are the keys before their norm and rotation."""

    @property
    def kv_width(self) -> int:
        """Channels of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture-of-experts feed-forward."""

    count: int
    top_k: int
    """Number of experts that the router selects for each token."""
    intermediate_size: int
    """Channels between the projections of an expert."""
    normalized: bool
    """Whether the weights of the selected experts are normalized to sum to 1."""
    alpha: float
    """The alpha in gate * sigmoid(alpha * gate)."""
    limit: float | None
    """Upper bound of the gate, and bound of the magnitude of up; None for no bound."""
    up_offset: float
    """Constant added to up."""
    shared_size: int
    """Channels between the projections of the feed-forward beside the experts; 0 for a model without one."""
    layers: tuple[bool, ...]
    """Whether each layer has experts."""


@dataclass(frozen=True)
class DecoderConfig:
    """Architecture of a decoder-only transformer (see `architectures.family`)."""

    family: str
    traits: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Channels between the projections of a dense feed-forward; see also `feed_forward_width`."""
    double_wide: bool
    """Whether layers that read another layer's keys have twice as many."""
    layers: int
    heads: int
    kv_heads: int
    """Number of key and value heads; like `head_dim` of the first layer where layers differ."""
    head_dim: int
    rotated_channels: int
    """Number of leading channels of a head that are rotated, in the first layer where layers differ."""
    attention: tuple[LayerAttention, ...]
    """One entry per layer."""
    per_layer_width: int
    """Channels of the embedding that each layer has of its own; 0 for a model without them."""
    experts: ExpertsConfig | None
    blocks: BlockDiffusion | None
    """How blocks of masked tokens are filled; None for a model that generates token by token."""
    state_layers: StateLayers | None
    """The layers with a convolution or linear attention in place of attention; None for a model without them."""
    max_positions: int
    default_positions: int
    """Longest context of the default rotary table; LongRoPE has another table for longer contexts."""
    norm_epsilon: float
    activation: str
    """`SILU` or `GELU_TANH`."""
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    attention_scale: float | None
    """Factor on the attention scores; None for 1 / sqrt(head_dim)."""
    query_scaling: QueryScaling | None
    """How queries grow with their position; None if they do not."""
    attention_softcap: float | None
    logits_softcap: float | None
    embedding_scale: float
    residual_scale: float
    logits_scale: float

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with key and value caches: those with attention over their own keys."""
        others = self.layers_with_states
        return tuple(
            index for index in range(self.layers) if self.attention[index].owner is None and index not in others
        )

    @property
    def layers_with_states(self) -> tuple[int, ...]:
        """Indices of the layers that keep a state in place of keys and values."""
        return () if self.state_layers is None else tuple(np.flatnonzero(self.state_layers.layers).tolist())

    @property
    def uniform(self) -> bool:
        """Whether all layers with attention have the same heads and their own caches, and no layer has own inputs."""
        shapes = {(each.kv_heads, each.head_dim, each.owner) for each in self.attention}
        return shapes == {(self.kv_heads, self.head_dim, None)} and not self.per_layer_width

    def feed_forward_width(self, index: int) -> int:
        """Channels between the projections of the dense feed-forward of layer `index`."""
        doubled = self.double_wide and self.attention[index].owner is not None
        return self.intermediate_size * (2 if doubled else 1)

    def first_layers(self, count: int) -> DecoderConfig:
        """The architecture of the first layers alone."""
        experts, states = self.experts, self.state_layers
        return replace(
            self,
            layers=count,
            attention=self.attention[:count],
            experts=None if experts is None else replace(experts, layers=experts.layers[:count]),
            state_layers=None if states is None else replace(states, layers=states.layers[:count]),
        )

    @property
    def query_width(self) -> int:
        """Channels of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim


def read_config(folder: Path) -> DecoderConfig:
    """Read `folder`/config.json.

    Raises:
        CheckpointError: the file is absent, damaged or incomplete, or describes a model that is not supported.
    """
    config: Mapping[str, Any] = read_json(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{folder / 'config.json'} has no model_type", "download the checkpoint again")
    return parse_config(config)


def parse_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a parsed config.json with a `model_type`.

    Raises:
        CheckpointError: it is incomplete, or describes a model that is not supported.
    """
    model_type = str(config["model_type"])
    family = find_family(model_type)
    common = {name: config[own] for name, own in family.settings.items() if own in config}
    config = {**family.defaults, **text_settings({**config, **common}, family)}
    _refuse_unsupported(config, family)
    heads = count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", default=heads)
    hidden = count(config, "hidden_size")
    layers = count(config, "num_hidden_layers", maximum=_MOST)
    states = None if family.state_layers is None else family.state_layers(config, layers)
    windows = [None] * layers if states is not None else family.windows(config, layers)
    usual = kv_heads, count(config, "head_dim", default=hidden // heads)
    shapes = full_attention_heads(config, usual, windows) if family.full_attention else [usual] * layers
    for shape in dict.fromkeys([usual, *shapes]):
        _check_heads(heads, *shape)
    full = next((shape for shape, window in zip(shapes, windows, strict=True) if window is None), usual)
    rotations = read_rotations(config, family, full[1], usual[1])
    attention = _read_attention(config, family, windows, shapes, rotations)
    rope, first, scale = rotations[0][0], attention[0], family.attention_scale
    experts = None if family.experts is None else _read_experts(config, family.experts, layers)
    return DecoderConfig(
        family=model_type,
        traits=family,
        vocab_size=count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_intermediate_size(config, family),
        double_wide=family.double_wide is not None and bool(config.get(family.double_wide)),
        layers=layers,
        heads=heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        rotated_channels=first.rotated_channels,
        attention=attention,
        per_layer_width=_per_layer_width(config) if family.per_layer_inputs else 0,
        experts=experts,
        blocks=None if family.blocks is None else _read_blocks(config, family.blocks),
        state_layers=states,
        max_positions=max_positions(config),
        default_positions=rope.original_positions if rope.kind == "longrope" else max_positions(config),
        norm_epsilon=number(config, family.norm_epsilon, default=1e-6),
        activation=_activation(config, family, experts),
        tied_head=bool(config.get(first_present(config, family.tied_head), False)),
        qkv_bias=family.qkv_bias or chosen(config, family.attention_bias),
        output_bias=chosen(config, family.attention_bias),
        mlp_bias=chosen(config, family.mlp_bias),
        attention_scale=_scale(config, scale) if isinstance(scale, tuple) else scale,
        query_scaling=read_query_scaling(config, family),
        attention_softcap=_softcap(config, family.attention_softcap),
        logits_softcap=_softcap(config, family.logits_softcap),
        embedding_scale=_scale(config, family.embedding_scale),
        residual_scale=_scale(config, family.residual_scale),
        logits_scale=_scale(config, family.logits_scale),
    )


def _intermediate_size(config: Mapping[str, Any], family: Family) -> int:
    size = count(config, first_present(config, family.intermediate_size))
    if family.adjusted_size is None or not config.get(family.adjusted_size, True):
        return size
    multiple = count(config, "block_multiple_of", default=256)
    size = int(number(config, "block_ffn_dim_multiplier", default=1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _read_attention(
    config: Mapping[str, Any],
    family: Family,
    windows: Sequence[int | None],
    shapes: Sequence[HeadShape],
    rotations: tuple[tuple[Rope, int], tuple[Rope, int]],
) -> tuple[LayerAttention, ...]:
    """Read the properties of attention in each layer, whose windows and heads are known."""
    keys_as_values = family.full_attention and bool(config.get(KEYS_AS_VALUES))
    owners = cache_owners(config, family.shared_caches, windows)
    has_rotary = family.position_type is None or config.get(family.position_type) == "rope"
    rotated = rotated_layers(config, len(windows)) if family.unrotated else [has_rotary] * len(windows)
    return tuple(
        LayerAttention(
            rotations[window is not None][0] if rotated[layer] else None,
            window,
            *shapes[layer],
            rotations[window is not None][1],
            None if owners[layer] == layer else owners[layer],
            keys_as_values and window is None,
        )
        for layer, window in enumerate(windows)
    )


def _check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 8:
        raise CheckpointError(
            f"head_dim {head_dim} is not a multiple of 8", "ONNX Runtime's GroupQueryAttention needs one that is"
        )


def text_settings(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return the settings of the language model, which are nested in a multimodal model."""
    if family.nested_type is None:
        return config
    nested = config.get("text_config")
    if nested is None and family.may_be_flat:
        return config
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"config.json: text_config must be an object, found {shown(nested)}")
    found = nested.get("model_type", family.nested_type)
    if found != family.nested_type:
        raise CheckpointError(
            f"the language model of this checkpoint has the model_type {shown(found)}",
            f"supported is {family.nested_type}",
        )
    # tie_word_embeddings is only ever set outside the nested object.
    return {**{name: config[name] for name in ("tie_word_embeddings",) if name in config}, **nested}


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        method = method if isinstance(method, str) else "unknown"
        if method != family.quant_method:
            raise CheckpointError(
                f"the checkpoint is already quantized ({method})",
                "export the original float checkpoint: float32, float16 and bfloat16 are supported",
            )
    for name, what in family.refused.items():
        if config.get(name):
            raise CheckpointError(f"{name} is not supported", f"the graph cannot have {what}")
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # of images, which are not exported
        raise CheckpointError(
            "use_bidirectional_attention is not supported", "only decoders with causal attention are supported"
        )


def _read_blocks(config: Mapping[str, Any], usual: BlockDiffusion) -> BlockDiffusion:
    mask = count(config, "mask_token_id", default=usual.mask, minimum=0, maximum=count(config, "vocab_size") - 1)
    return replace(usual, size=count(config, "block_size", default=usual.size), mask=mask)


def _read_experts(config: Mapping[str, Any], settings: Experts, layers: int) -> ExpertsConfig | None:
    name = first_present(config, settings.count)
    if config.get(name) == 0:
        return None
    experts_count = count(config, name, maximum=_MOST)
    period = count(config, "decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list, found {shown(dense)}")
    return ExpertsConfig(
        count=experts_count,
        top_k=count(config, "num_experts_per_tok", maximum=experts_count),
        intermediate_size=count(config, settings.intermediate_size),
        normalized=chosen(config, settings.normalized),
        alpha=number(config, settings.alpha) if settings.alpha else 1.0,
        limit=number(config, settings.limit) if settings.limit else None,
        up_offset=settings.up_offset,
        shared_size=0 if settings.shared is None else count(config, settings.shared.intermediate_size),
        layers=tuple((layer + 1) % period == 0 and layer not in dense for layer in range(layers)),
    )


def _per_layer_width(config: Mapping[str, Any]) -> int:
    """Channels of the embedding that each layer has of its own; 0 for a model without them."""
    width = count(config, "hidden_size_per_layer_input", default=0, minimum=0)
    tokens, name = count(config, "vocab_size"), "vocab_size_per_layer_input"
    if width and count(config, name, default=tokens) != tokens:
        raise CheckpointError(
            f"config.json: {name} {config[name]} differs from vocab_size {tokens}",
            "supported is a table with every token",
        )
    return width


def _activation(config: Mapping[str, Any], family: Family, experts: ExpertsConfig | None) -> str:
    name = config.get(family.activation) or SILU
    found = SILU if name == "swish" else name
    if found not in (SILU, GELU_TANH):
        raise CheckpointError(
            f"{family.activation} {shown(name)} is not supported", f"supported are {SILU}, {GELU_TANH}"
        )
    if experts is not None and found != SILU:
        raise CheckpointError(
            f"{family.activation} {found} is not supported with experts",
            f"the operator that runs experts has {SILU} alone",
        )
    return str(found)


def _scale(config: Mapping[str, Any], power: Power | None) -> float:
    return 1.0 if power is None else float(number(config, power[0], default=1.0) ** power[1])


def _softcap(config: Mapping[str, Any], name: str | None) -> float | None:
    return None if name is None or optional_number(config, name) is None else number(config, name)
