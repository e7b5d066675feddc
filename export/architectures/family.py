"""How the Hugging Face model families differ.

Every family is a decoder of the same architecture: RMS norm, grouped-query attention with rotary positions, RMS norm,
gated feed-forward. A `Family` states its differences, in the module of its maker or of the family that it resembles.
Support for a new family of this architecture takes such an entry and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ...models.manifest import BlockDiffusion
from .layer_attention import Windows, no_windows
from .state_layers import StateLayers
from .vision import VisionFamily

Choice = str | bool
"""A choice made by a boolean of config.json, false when absent, or one that is the same for all checkpoints."""


def chosen(config: Mapping[str, Any], choice: Choice) -> bool:
    """Return the value of a choice for a parsed config.json."""
    return choice if isinstance(choice, bool) else bool(config.get(choice, False))


Power = tuple[str, float]
"""A factor: a number of config.json (1 when absent) by its name, raised to an exponent."""


@dataclass(frozen=True)
class Norms:
    """Module names of a layer's RMS norms before and after attention and feed-forward; None for an absent norm."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


NORMS_BEFORE: Final = Norms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
NORMS_AFTER: Final = Norms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
NORMS_AROUND: Final = Norms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True)
class SharedExpert:
    """A feed-forward that all tokens run through beside the selected experts; `gate_up` names its projections too."""

    module: str = "mlp.shared_expert"
    """Module in the layer."""
    gate: str | None = "mlp.shared_expert_gate"
    """Linear with one output, whose sigmoid is a factor on the outputs; None for a feed-forward without this factor."""
    intermediate_size: str = "shared_expert_intermediate_size"
    """Setting of the channels between its projections."""


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts feed-forward of a family, by the names of its settings in config.json."""

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    """Number of experts per layer, 0 for a dense model; the first of these settings that is present applies."""
    intermediate_size: str = "moe_intermediate_size"
    """Channels between the projections of an expert."""
    normalized: Choice = "norm_topk_prob"
    """Whether the weights of the selected experts are normalized to sum to 1."""
    module: str = "mlp"
    """Module of the router and the experts in the layer."""
    shared: SharedExpert | None = None
    """The feed-forward beside the experts; None for a family without one."""
    router: str = "gate"
    """Module name of the router."""
    bias: bool = False
    """Whether the router and the projections of the experts have biases."""
    stacked: bool = False
    """Whether one tensor holds all experts of a layer, with alternating rows of gate and up, as gpt-oss has it."""
    alpha: str | None = None
    """Setting of alpha in gate * sigmoid(alpha * gate); None for an alpha of 1."""
    limit: str | None = None
    """Setting of the gate's upper bound, which also bounds the magnitude of up; None for no bound."""
    up_offset: float = 0.0
    """Constant added to up."""


def first_present(config: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the first of several names of a setting that config.json has; the last one if it has none."""
    return next((name for name in names if config.get(name) is not None), names[-1])


@dataclass(frozen=True)
class Family:
    """How a family differs from the common architecture."""

    attention_bias: Choice = False
    """Whether all projections of attention have a bias."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have one in any case."""
    mlp_bias: Choice = False
    """Whether the gate, up and down projections have a bias."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Modules of the query, key and value projections: one each, or one for all."""
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Modules of the gate and up projections: one each, or one for both."""
    output: str = "o_proj"
    """Module of the output projection of attention."""
    down: str = "down_proj"
    """Module of the down projection."""
    mlp: str = "mlp"
    """Module of a layer's feed-forward."""
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    """Modules of the norms of queries and keys, see `head_norm`."""
    tied_head: tuple[str, ...] = ("tie_word_embeddings",)
    """Settings of whether the LM head is the embedding; the first that is present applies."""
    final_norm: str = "norm"
    """Module of the norm before the LM head."""
    norm_epsilon: str = "rms_norm_eps"
    """Setting of the constant that norms add to the mean square."""
    intermediate_size: tuple[str, ...] = ("intermediate_size",)
    """Settings of the number of channels between the projections of a dense feed-forward; the first present applies."""
    adjusted_size: str | None = None
    """Setting, true when absent, by which two thirds of that number are meant, multiplied and rounded up."""
    state_layers: Callable[[Mapping[str, Any], int], StateLayers] | None = None
    """Reads which layers keep a state in place of keys and values; None for a family without them."""
    mtp: bool = False
    """Whether checkpoints may have a multi-token-prediction module, see `drafts.feature_heads`."""
    gated_attention: bool = False
    """Whether the query projection also gives a gate for the output of each head."""
    experts: Experts | None = None
    """None for a dense feed-forward."""
    quant_method: str | None = None
    """The `quant_method` of quantized checkpoints that can be read; None for none."""
    sinks: bool = False
    """Whether attention has a learned sink logit per head (`sinks`)."""
    norms: Norms = NORMS_BEFORE
    norms_add_one: bool = False
    """Whether norms scale by 1 + weight."""
    head_norm: Literal["head", "whole"] | None = None
    """How queries and keys are RMS-normalized before rotation (`q_norm`, `k_norm`): each head by itself, all with the
    same weights, or all query heads together, and all key heads together."""
    value_norm: bool = False
    """Whether each head of the values is RMS-normalized too, without weights."""
    activation: str = "hidden_act"
    """Setting that names the activation."""
    windows: Windows = no_windows
    """Which layers use a sliding window."""
    full_attention: bool = False
    """Whether layers without a window have other heads than the others, see `full_attention_heads`."""
    shared_caches: str | None = None
    """Setting of how many of the last layers read the keys and values of an earlier layer of their kind."""
    double_wide: str | None = None
    """Setting of whether the feed-forward of these layers has twice as many channels."""
    per_layer_inputs: bool = False
    """Whether every layer has a small embedding of its own beside the hidden states (Gemma 3n and 4).

    One table holds the embeddings of all layers. A projection of the token embedding, normed, is added to each of them.
    At its end, a layer gates its part of the sum by the hidden states, projects it back and adds it to them.
    """
    layer_scale: str | None = None
    """Tensor of a layer with one factor on the hidden states after it."""
    unrotated: bool = False
    """Whether some layers have no rotary positions (`no_rope_layers`)."""
    position_type: str | None = None
    """Setting that is `rope` where layers have rotary positions; None for a family whose layers always have them."""
    local_rope_base: str | None = None
    """Setting of theta in sliding-window layers; None where all layers share one theta."""
    partial_rotary: bool = False
    """Whether `partial_rotary_factor` is supported, which leaves channels unrotated."""
    attention_scale: Power | float | None = None
    """Factor on the attention scores; None for 1 / sqrt(head_dim)."""
    query_scaling: bool = False
    """Whether queries grow with their position where the rotary settings have `llama_4_scaling_beta`."""
    attention_softcap: str | None = None
    """Setting of the soft cap on attention scores, cap * tanh(score / cap)."""
    logits_softcap: str | None = None
    """Setting of the soft cap on logits."""
    embedding_scale: Power | None = None
    """Factor on the token embeddings."""
    residual_scale: Power | None = None
    """Factor on the outputs of attention and feed-forward before they are added to the residual."""
    logits_scale: Power | None = None
    """Factor on the logits."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Settings that have to be false or absent, and what they ask for."""
    blocks: BlockDiffusion | None = None
    """How blocks of masked tokens are filled where `block_size` and `mask_token_id` are absent; None for a family that
    generates token by token."""
    nested_type: str | None = None
    """The `model_type` of the text model whose settings a multimodal config.json nests; None for text models."""
    may_be_flat: bool = False
    """Whether some of its multimodal checkpoints do not nest them."""
    vision: VisionFamily | None = None
    """The vision tower of multimodal models; None for text models, and those whose tower is not exported."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Names of settings in config.json, where they differ from the common ones, by the common name."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of the names of tensors, where they differ from the common ones, by the common one; `#` is the number
    of a layer."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of settings that config.json may omit, where they differ from the common ones."""
