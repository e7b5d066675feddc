"""What one Hugging Face model family does differently from the others.

Every family is a decoder of the same plan: RMS norm, grouped-query attention with rotary positions, RMS norm, gated
feed-forward. `architectures/<model_type>.py` holds one `Family` that says where it departs from that plan; a new
family of this plan is a new file there and nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from ...errors import CheckpointError
from .. import architectures
from ..checkpoint.json_fields import number
from .sliding_windows import Never, Windows

OPTIMUM: Final = 'pip install "edge-run[optimum]"'
"""How to install the exporter of other families."""
_SHARED_MODULES: Final = frozenset(("family", "windows"))
"""Modules of `architectures` that are not named like a `model_type`."""


@dataclass(frozen=True)
class ConfigFlag:
    """A choice that config.json makes: the boolean of that name, false when absent."""

    name: str

    def read(self, config: Mapping[str, Any]) -> bool:
        """The flag's value in a parsed config.json."""
        return bool(config.get(self.name, False))


@dataclass(frozen=True)
class Always:
    """A choice the family makes for all its checkpoints."""

    value: bool

    def read(self, config: Mapping[str, Any]) -> bool:  # noqa: ARG002 -- same call as ConfigFlag.read
        """The family's value, whatever config.json says."""
        return self.value


Choice = ConfigFlag | Always


@dataclass(frozen=True)
class Power:
    """A factor: the number of that name in config.json, 1 when absent, raised to an exponent."""

    name: str
    exponent: float = 1.0

    def read(self, config: Mapping[str, Any]) -> float:
        """The factor of a parsed config.json.

        Raises:
            CheckpointError: it is not a positive number.
        """
        return float(number(config, self.name, default=1.0) ** self.exponent)


@dataclass(frozen=True)
class Norms:
    """Names, inside a layer, of the RMS norms of what goes into its two parts and of what comes out of them.

    None where there is no such norm.
    """

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
class Experts:
    """The settings of a feed-forward that is, in most layers, a choice among experts for each token."""

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    """How many there are; the first of these settings that is there says it."""
    chosen: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    """Channels between an expert's projections."""
    normalized: Choice = ConfigFlag("norm_topk_prob")
    """Whether the chosen experts' shares are made to sum to 1."""
    router: str = "gate"
    """Module that chooses."""
    router_bias: bool = False
    biased: bool = False
    """Whether the experts' projections add biases."""
    stacked: bool = False
    """Whether one tensor holds all experts of a layer, rows of gate and up in turns (`stacked_experts`)."""
    steepness: str | None = None
    """The setting that holds a in gate * sigmoid(a * gate); None stands for 1."""
    bound: str | None = None
    """The setting that bounds gate from above, and up on both sides."""
    up_offset: float = 0.0
    """What is added to up."""
    period: str = "decoder_sparse_step"
    """Every so many layers have experts."""
    without: str = "mlp_only_layers"
    """Numbers of layers that have none all the same."""


class HeadNorm(Enum):
    """How queries and keys are RMS-normalized before the rotation (`q_norm`, `k_norm`)."""

    NONE = auto()
    EACH_HEAD = auto()
    """Every head by itself, all with the same weights."""
    WHOLE = auto()
    """All heads of the queries together, and all of the keys."""


@dataclass(frozen=True)
class Family:
    """Where a family departs from the common plan."""

    qkv_bias: Choice = Always(False)
    """Whether the query, key and value projections add a bias."""
    output_bias: Choice = Always(False)
    """Whether the attention's output projection adds a bias."""
    mlp_bias: Choice = Always(False)
    """Whether the gate, up and down projections add a bias."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Modules that hold the query, key and value projections: one each, or one for all."""
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Modules that hold the gate and up projections: one each, or one for both."""
    experts: Experts | None = None
    """None where the feed-forward is the same for every token."""
    stored_as: str | None = None
    """The `quant_method` of quantized checkpoints that can be read all the same."""
    sinks: bool = False
    """Whether each head's attention has a part that goes to no token (`sinks`)."""
    norms: Norms = NORMS_BEFORE
    norms_add_one: bool = False
    """Whether norms scale by 1 + weight."""
    head_norm: HeadNorm = HeadNorm.NONE
    activation: str = "hidden_act"
    """The setting that names the activation."""
    windows: Windows = field(default_factory=Never)
    """Which layers see a sliding window only."""
    unrotated: bool = False
    """Whether there are layers without rotary positions (`no_rope_layers`)."""
    local_rope_base: str | None = None
    """The setting that holds theta of the layers with a window; None where all layers turn alike."""
    partial_rotary: bool = False
    """Whether `partial_rotary_factor` may leave channels unrotated."""
    attention_scale: Power | None = None
    """Factor on the attention scores; None stands for 1 / sqrt(head_dim)."""
    attention_softcap: str | None = None
    """The setting that bounds attention scores: cap * tanh(score / cap)."""
    logits_softcap: str | None = None
    """The setting that bounds logits in the same way."""
    embedding_scale: Power | None = None
    """Factor on the embedded tokens."""
    residual_scale: Power | None = None
    """Factor on what attention and feed-forward add to the residual."""
    logits_scale: Power | None = None
    """Factor on the logits."""
    nested: str | None = None
    """The setting of a multimodal model's config.json that holds its text model's settings."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What settings are when config.json does not name them, where that differs from the common plan."""


def supported_families() -> list[str]:
    """The `model_type`s that have an architecture file, sorted."""
    names = {module.name for module in pkgutil.iter_modules(architectures.__path__)}
    return sorted(names - _SHARED_MODULES)


def find_family(model_type: str) -> Family:
    """The family of that Hugging Face `model_type`.

    Raises:
        CheckpointError: there is no architecture file for it.
    """
    known = supported_families()
    if model_type not in known:
        raise CheckpointError(
            f"model_type {model_type!r} is not a supported architecture",
            f"supported are {', '.join(known)}; Optimum exports more: {OPTIMUM}",
        )
    family = importlib.import_module(f"{architectures.__name__}.{model_type}").FAMILY
    if not isinstance(family, Family):
        raise TypeError(f"architectures/{model_type}.py must define FAMILY: Family")
    return family
