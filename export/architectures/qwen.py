"""Qwen2 to Qwen3.5."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from ...models.manifest import BlockDiffusion
from .family import Experts, Family, SharedExpert
from .layer_attention import windows_in_last_layers
from .state_layers import read_delta_nets
from .vision import QWEN2_5_VL, QWEN3_VL

_QWEN2: Final = Family(qkv_bias=True, windows=windows_in_last_layers)
_QWEN3: Final = Family(
    attention_bias="attention_bias",
    head_norm="head",
    windows=windows_in_last_layers,
    defaults={"head_dim": 128},
)
"""Qwen3 (dense): RMS-normalized query and key heads of 128 channels by default."""

_SDAR: Final = BlockDiffusion(4, 151669)
"""SDAR (arXiv 2510.06303): Qwen3, trained on to fill blocks of masked tokens."""

_QWEN3_5_TEXT: Final = Family(
    attention_bias="attention_bias",
    norms_add_one=True,
    head_norm="head",
    gated_attention=True,
    partial_rotary=True,
    state_layers=read_delta_nets,
    mtp=True,
    defaults={"head_dim": 256, "partial_rotary_factor": 0.25},
)
"""Qwen3.5: gated delta nets in three layers of four, attention whose output is gated in the others."""

_QWEN3_5_MOE_TEXT: Final = replace(
    _QWEN3_5_TEXT,
    experts=Experts(normalized=True, shared=SharedExpert()),
    # No layer has a dense feed-forward, and config.json does not state its size.
    intermediate_size=("intermediate_size", "shared_expert_intermediate_size"),
)
"""Qwen3.5 with experts: its layers, and feed-forwards of selected experts beside one with a gate."""

FAMILIES: Final[Mapping[str, Family]] = {
    # Qwen2 and Qwen2.5: biases on the query, key and value projections only.
    "qwen2": _QWEN2,
    # Their rotary positions have three axes, of which the tokens of texts have equal ones.
    "qwen2_5_vl": replace(_QWEN2, nested_type="qwen2_5_vl_text", may_be_flat=True, vision=QWEN2_5_VL),
    "qwen3_vl": replace(_QWEN3, nested_type="qwen3_vl_text", vision=QWEN3_VL),
    "qwen3": _QWEN3,
    # Qwen3 with a mixture-of-experts feed-forward.
    "qwen3_moe": replace(_QWEN3, experts=Experts(), defaults={}),
    "sdar": replace(_QWEN3, blocks=_SDAR),
    "sdar_moe": replace(_QWEN3, experts=Experts(), defaults={}, blocks=_SDAR),
    # Fast-dLLM v2 (arXiv 2509.26328): Qwen2.5, trained on in the same way with logits one place before their token.
    "Fast_dLLM_Qwen": Family(
        qkv_bias=True, blocks=BlockDiffusion(32, 151665, shifted=True), settings={"block_size": "bd_size"}
    ),
    # Dream (arXiv 2508.15487) and DiffuCoder: Qwen2.5, trained on with all tokens attending to each other.
    "Dream": replace(_QWEN2, blocks=BlockDiffusion(32, 151666, shifted=True, bidirectional=True)),
    "qwen3_5_text": _QWEN3_5_TEXT,
    # Language model of Qwen3.5 checkpoints; the image part is not exported.
    "qwen3_5": replace(_QWEN3_5_TEXT, nested_type="qwen3_5_text"),
    "qwen3_5_moe_text": _QWEN3_5_MOE_TEXT,
    # Language model of Qwen3.5 checkpoints with experts; the image part is not exported.
    "qwen3_5_moe": replace(_QWEN3_5_MOE_TEXT, nested_type="qwen3_5_moe_text"),
    # Qwen3-Next: as Qwen3.5 with experts, with all of a key head together in the projections of delta nets.
    "qwen3_next": replace(
        _QWEN3_5_TEXT,
        state_layers=partial(read_delta_nets, by_key_head=True),
        experts=Experts(shared=SharedExpert()),
        defaults={**_QWEN3_5_TEXT.defaults, "norm_topk_prob": True},
    ),
}
