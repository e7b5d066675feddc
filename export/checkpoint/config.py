"""config.json of a Hugging Face checkpoint, read into the numbers the graph is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from ...errors import CheckpointError
from ...models.json_file import shown
from ..architectures.family import Experts, Family, Power, find_family
from ..architectures.sliding_windows import rotated_layers
from ..graph.rope import LongRope, Rope
from .json_fields import count, number, optional_number, read_json
from .rope_settings import max_positions, read_rotations

MOST_LAYERS: Final = 10_000
"""Of a model; ten times as many as any has."""
MOST_EXPERTS: Final = 10_000
"""Of a layer, likewise."""


class Activation(Enum):
    """What the gate goes through."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


_ACTIVATIONS: Final = {"swish": Activation.SILU, **{each.value: each for each in Activation}}


@dataclass(frozen=True)
class LayerAttention:
    """What the attention of one layer does differently from that of others."""

    rope: Rope | None
    """None where the layer has no positions."""
    window: int | None
    """How many of the newest tokens, its own included, a token sees; None where it sees all."""


@dataclass(frozen=True)
class ExpertsConfig:
    """A feed-forward that chooses experts for each token."""

    count: int
    chosen: int
    width: int
    """Channels between an expert's projections."""
    normalized: bool
    """Whether the chosen ones' shares are made to sum to 1."""
    steepness: float
    """The a in gate * sigmoid(a * gate)."""
    bound: float | None
    """Of gate from above, and of up on both sides."""
    up_offset: float
    """What is added to up."""
    layers: tuple[bool, ...]
    """Whether each layer has experts."""


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer of the common plan (see `family`)."""

    family: str
    traits: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated_channels: int
    """Channels of a head that turn with the position, from the first on."""
    attention: tuple[LayerAttention, ...]
    """Layer by layer."""
    experts: ExpertsConfig | None
    max_positions: int
    default_positions: int
    """How far the model's usual rotation reaches; to serve longer texts it has another, for all positions."""
    norm_epsilon: float
    activation: Activation
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    attention_scale: float | None
    """Factor on the attention scores; None stands for 1 / sqrt(head_dim)."""
    attention_softcap: float | None
    logits_softcap: float | None
    embedding_scale: float
    residual_scale: float
    logits_scale: float

    @property
    def query_width(self) -> int:
        """Channels of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key heads together; of the value heads just as many."""
        return self.kv_heads * self.head_dim


def read_config(folder: Path) -> DecoderConfig:
    """Read `folder`/config.json.

    Raises:
        CheckpointError: it is absent, not JSON, lacks a number, or describes a model that is not supported.
    """
    config: Mapping[str, Any] = read_json(folder / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{folder / 'config.json'} names no model_type", "download the checkpoint again")
    family = find_family(model_type)
    config = {**family.defaults, **_text_settings(config, family)}
    _refuse_unsupported(config, family)
    heads = count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", default=heads)
    hidden = count(config, "hidden_size")
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = count(config, "head_dim", default=hidden // heads)
    if head_dim % 8:
        raise CheckpointError(
            f"head_dim {head_dim} is not a multiple of 8", "ONNX Runtime's GroupQueryAttention needs one that is"
        )
    layers = count(config, "num_hidden_layers", most=MOST_LAYERS)
    rotations = read_rotations(config, family, head_dim)
    windows = family.windows.of_layers(config, layers)
    turns = rotated_layers(config, layers) if family.unrotated else [True] * layers
    scaling = rotations.rope.scaling
    return DecoderConfig(
        family=model_type,
        traits=family,
        vocab_size=count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=count(config, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotated_channels=rotations.channels,
        attention=tuple(
            LayerAttention((rotations.rope if window is None else rotations.local) if turn else None, window)
            for window, turn in zip(windows, turns, strict=True)
        ),
        experts=_read_experts(config, family.experts, layers) if family.experts else None,
        max_positions=max_positions(config),
        default_positions=scaling.original_positions if isinstance(scaling, LongRope) else max_positions(config),
        norm_epsilon=number(config, "rms_norm_eps", default=1e-6),
        activation=_activation(config, family),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias.read(config),
        output_bias=family.output_bias.read(config),
        mlp_bias=family.mlp_bias.read(config),
        attention_scale=family.attention_scale.read(config) if family.attention_scale else None,
        attention_softcap=_softcap(config, family.attention_softcap),
        logits_softcap=_softcap(config, family.logits_softcap),
        embedding_scale=_scale(config, family.embedding_scale),
        residual_scale=_scale(config, family.residual_scale),
        logits_scale=_scale(config, family.logits_scale),
    )


def _text_settings(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The settings of the language model, which a multimodal model keeps apart."""
    if family.nested is None:
        return config
    nested = config.get(family.nested)
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"config.json: {family.nested} must be an object, found {shown(nested)}")
    # Whether the head is tied is said outside or not at all.
    return {**{name: config[name] for name in ("tie_word_embeddings",) if name in config}, **nested}


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        method = method if isinstance(method, str) else "unknown"
        if method != family.stored_as:
            raise CheckpointError(
                f"the checkpoint is already quantized ({method})",
                "export the original float checkpoint: float32, float16 and bfloat16 are supported",
            )
    if config.get("use_bidirectional_attention"):
        raise CheckpointError(
            "use_bidirectional_attention is not supported", "supported are decoders, which see earlier tokens only"
        )


def _read_experts(config: Mapping[str, Any], settings: Experts, layers: int) -> ExpertsConfig:
    counted = next((name for name in settings.count if config.get(name) is not None), settings.count[0])
    many = count(config, counted, most=MOST_EXPERTS)
    period = count(config, settings.period, default=1)
    without = config.get(settings.without) or []
    if not isinstance(without, list):
        raise CheckpointError(f"config.json: {settings.without} must be a list, found {shown(without)}")
    return ExpertsConfig(
        count=many,
        chosen=count(config, settings.chosen, most=many),
        width=count(config, settings.width),
        normalized=settings.normalized.read(config),
        steepness=number(config, settings.steepness) if settings.steepness else 1.0,
        bound=number(config, settings.bound) if settings.bound else None,
        up_offset=settings.up_offset,
        layers=tuple((layer + 1) % period == 0 and layer not in without for layer in range(layers)),
    )


def _activation(config: Mapping[str, Any], family: Family) -> Activation:
    name = config.get(family.activation) or Activation.SILU.value
    found = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if found is None:
        supported = ", ".join(each.value for each in Activation)
        raise CheckpointError(f"{family.activation} {shown(name)} is not supported", f"supported are {supported}")
    return found


def _scale(config: Mapping[str, Any], power: Power | None) -> float:
    return power.read(config) if power else 1.0


def _softcap(config: Mapping[str, Any], name: str | None) -> float | None:
    if name is None or optional_number(config, name) is None:
        return None
    return number(config, name)
