"""LFM2: gated short convolutions in most layers, attention with normalized heads in the others."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from .family import Family, HeadNorm, Norms
from .state_layers import read_convolutions
from .vision import LFM2_VL

_LFM2: Final = Family(
    gate_up=("w1", "w3"),
    down="w2",
    mlp="feed_forward",
    output="out_proj",
    norms=Norms(before_attention="operator_norm", before_mlp="ffn_norm"),
    head_norm=HeadNorm.EACH_HEAD,
    head_norms=("q_layernorm", "k_layernorm"),
    final_norm="embedding_norm",
    norm_epsilon="norm_eps",
    intermediate_size=("block_ff_dim", "intermediate_size"),
    adjusted_size="block_auto_adjust_ff_dim",
    state_layers=read_convolutions,
    tied_head=("tie_embedding", "tie_word_embeddings"),
    defaults={
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128_000,
    },
)
FAMILIES: Final[Mapping[str, Family]] = {
    "lfm2": _LFM2,
    "lfm2_vl": replace(_LFM2, nested_type="lfm2", vision=LFM2_VL),
}
