"""Tensor names of llama.cpp and of Hugging Face, for the llama and qwen families."""

from __future__ import annotations

import re
from typing import Final

from ..checkpoint.layout import EMBEDDING, FINAL_NORM, HEAD

ROPE_FACTORS: Final = "rope_freqs.weight"
"""Divisors of the rotary frequencies; they become a setting, not a tensor of the model."""

_OUTER: Final = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_INNER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK: Final = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)")


def checkpoint_name(name: str, layers: int) -> str | None:
    """What Hugging Face calls the tensor of that name in a model of `layers` layers; None: no such model has it."""
    if name in _OUTER:
        return _OUTER[name]
    block = _BLOCK.fullmatch(name)
    if block is None or block[2] not in _INNER or int(block[1]) >= layers:
        return None
    return f"model.layers.{block[1]}.{_INNER[block[2]]}.{block[3]}"
