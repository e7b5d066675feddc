"""Tiny random models: Hugging Face checkpoints, and bundles exported from them.

The random weights are large enough that logits differ clearly and greedy text is reproducible. The tokenizer is a real
one with special tokens and a chat template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgerun.export import FP32, ExportRecipe, WeightFormat, export_checkpoint
from edgerun.export.bundle_content import SourceModel
from edgerun.export.check.contract_session import ContractSession
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint

TOKENS: Final = np.random.default_rng(5).integers(0, 300, 40)
"""The tokens of which `logits_of` gives logits."""
LLAMA3: Final = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_FACTORS: Final = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.4}
YARN_FULL: Final = {**YARN, **_FACTORS}
LONGROPE: Final = {"type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [4.0] * 8}
"""Settings of rotary scalings."""

WORDS = ("the", "sea", "and", "sand", "of", "then", "is", "in", "on", "other", "thing", "that", "was", "to", "be")
"""Words of calibration texts."""

SPECIAL_TOKENS: Final = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unknown|>")
"""Ids 0 to 4, in this order; <|end|> is the end-of-text token."""
CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MERGES: Final = (
    *("t h", "h e", "i n", "e r", "a n", "o n", "r e", "Ġ t", "Ġ a", "Ġ s", "Ġt he", "an d", "Ġ th", "in g", "o u"),
    *("Ġ w", "e n", "Ġ o", "a t", "i s", "Ġ b", "o r", "Ġ c", "e s", "i t", "Ġ and", "o f", "Ġ of", "t o", "Ġ to"),
)
_QWEN3_5: Final[Mapping[str, Any]] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 32,
    "attention_bias": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
}
_QWEN_EXPERTS: Final[Mapping[str, Any]] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
FAMILY_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 2},
    "qwen3": {"attention_bias": False, "head_dim": 32, "use_sliding_window": False},
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "attention_bias": False,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "head_dim": 32,
    },
    "gpt_oss": {
        "num_hidden_layers": 3,
        "attention_bias": True,
        "head_dim": 32,
        "intermediate_size": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "mistral": {"sliding_window": 12},
    "ministral3": {
        "sliding_window": None,
        "head_dim": 32,
        "rope_parameters": {
            "type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "phi3": {
        "sliding_window": None,
        "partial_rotary_factor": 0.5,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "original_max_position_embeddings": 128,
    },
    "gemma2": {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "attention_bias": False,
    },
    "gemma3_text": {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 3,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "rope_theta": 1e6,
        "rope_local_base_freq": 100.0,
        "sliding_window": 12,
        "sliding_window_pattern": 3,
        "attention_bias": False,
    },
    "gemma4_text": {
        "hidden_act": None,
        "rope_theta": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 5,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000.0},
        },
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 300,
        "final_logit_softcapping": 5.0,
        "attention_bias": False,
    },
    "smollm3": {
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    },
    "granite": {
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "nope",
        "attention_bias": False,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_expand": 2,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
    },
    "olmo2": {"attention_bias": False},
    "lfm2": {
        "rms_norm_eps": None,
        "norm_eps": 1e-5,
        "hidden_act": None,
        "num_hidden_layers": 5,
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": {
        **_QWEN3_5,
        **_QWEN_EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "intermediate_size": None,
    },
    "qwen3_next": {
        **_QWEN3_5,
        **_QWEN_EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rope_theta": 10000.0,
        "rope_parameters": None,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
}
GRANITE_EXPERTS: Final[Mapping[str, Any]] = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32}
"""Settings of a tiny Granite 4.0-H with experts."""
HYBRID_FAMILIES: Final = ("lfm2", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid")
"""Families with layers that keep a state in place of keys and values."""
ATTENTION_FAMILIES: Final = tuple(sorted(FAMILY_SETTINGS.keys() - set(HYBRID_FAMILIES)))
"""Families whose layers all have attention, and so a cache that can be cut anywhere, and token trees."""
ARCHITECTURES: Final = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
}
"""Architecture names that are not the capitalized model type."""

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """config.json of a model of two or three layers; an override of None removes the setting."""
    config = {
        "architectures": [ARCHITECTURES.get(family, f"{family.capitalize()}ForCausalLM")],
        "model_type": family,
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        **FAMILY_SETTINGS[family],
        **overrides,
    }
    removed = overrides.keys() | FAMILY_SETTINGS[family].keys()
    return {name: value for name, value in config.items() if value is not None or name not in removed}


def tiny_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights by their Hugging Face names, float32."""
    random = np.random.default_rng(seed)
    model_type, hidden, wide = config["model_type"], config["hidden_size"], config.get("intermediate_size", 0)
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim", hidden // heads)
    gemma = model_type in ("gemma2", "gemma3_text")
    delta_nets = model_type in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    adding_one = gemma or delta_nets
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    if model_type == "lfm2" and config.get("block_auto_adjust_ff_dim", True):
        multiple = config.get("block_multiple_of", 256)
        wide = -(-int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * wide / 3)) // multiple) * multiple

    def matrix(name: str, rows: int, columns: int, size: float) -> None:
        tensors[name] = (random.standard_normal((rows, columns)) * size).astype(np.float32)

    def linear(name: str, rows: int, columns: int, biased: bool = False) -> None:
        matrix(f"{name}.weight", rows, columns, 1.5 / math.sqrt(columns))
        if biased:
            tensors[f"{name}.bias"] = (random.standard_normal(rows) * 0.5).astype(np.float32)

    def norm(name: str, width: int) -> None:
        tensors[f"{name}.weight"] = (float(not adding_one) + 0.2 * random.standard_normal(width)).astype(np.float32)

    def queries_keys_values(name: str, query_heads: int = heads, biased: bool = False) -> None:
        for projection, count in (("q", query_heads), ("k", kv_heads), ("v", kv_heads)):
            linear(f"{name}.self_attn.{projection}_proj", count * head_dim, hidden, biased)

    flagged = bool(config.get("attention_bias"))
    # Gemma multiplies its embeddings by sqrt(hidden).
    scaled = gemma or model_type == "gemma4_text"
    matrix("model.embed_tokens.weight", config["vocab_size"], hidden, 0.15 if scaled else 0.4)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        if model_type == "lfm2":
            norm(f"{name}.operator_norm", hidden)
            norm(f"{name}.ffn_norm", hidden)
            biased = config["conv_bias"]
            if config["layer_types"][layer] == "conv":
                linear(f"{name}.conv.in_proj", 3 * hidden, hidden, biased)
                linear(f"{name}.conv.conv", hidden, config["conv_L_cache"], biased)
                tensors[f"{name}.conv.conv.weight"] = tensors[f"{name}.conv.conv.weight"][:, None]
                linear(f"{name}.conv.out_proj", hidden, hidden, biased)
            else:
                queries_keys_values(name)
                linear(f"{name}.self_attn.out_proj", hidden, heads * head_dim)
                norm(f"{name}.self_attn.q_layernorm", head_dim)
                norm(f"{name}.self_attn.k_layernorm", head_dim)
            for module, rows, columns in (("w1", wide, hidden), ("w3", wide, hidden), ("w2", hidden, wide)):
                linear(f"{name}.feed_forward.{module}", rows, columns)
            continue
        if model_type == "gemma4_text":
            linears, norms = _gemma4_layer(config, layer)
            for module, (rows, columns) in linears.items():
                linear(f"{name}.{module}", rows, columns, flagged and module.startswith("self_attn."))
            for module, width in norms.items():
                norm(f"{name}.{module}", width)
                if module.startswith("self_attn."):  # the factor 1 / sqrt(head_dim) of other families is in these
                    tensors[f"{name}.{module}.weight"] *= np.float32(width**-0.25)
            tensors[f"{name}.layer_scalar"] = (1 + 0.2 * random.standard_normal(1)).astype(np.float32)
            continue
        if model_type != "olmo2":
            norm(f"{name}.input_layernorm", hidden)
        norm(f"{name}.post_attention_layernorm", hidden)
        if delta_nets:
            if model_type == "qwen3_5_text" or layer in config.get("mlp_only_layers", ()):
                for projection, rows, columns in (("gate", wide, hidden), ("up", wide, hidden), ("down", hidden, wide)):
                    linear(f"{name}.mlp.{projection}_proj", rows, columns)
            else:
                experts = shared_expert_weights(config, f"{name}.mlp", random)
                tensors |= separate_experts(experts) if model_type == "qwen3_next" else experts
            if (config.get("layer_types") or ["linear_attention", "full_attention"])[layer] == "full_attention":
                queries_keys_values(name, 2 * heads, flagged)
                linear(f"{name}.self_attn.o_proj", hidden, heads * head_dim, flagged)
                norm(f"{name}.self_attn.q_norm", head_dim)
                norm(f"{name}.self_attn.k_norm", head_dim)
            else:
                tensors |= delta_net_weights(config, f"{name}.linear_attn", random)
            continue
        if model_type == "granitemoehybrid":
            wide = config["shared_intermediate_size"]
            linear(f"{name}.shared_mlp.input_linear", 2 * wide, hidden)
            linear(f"{name}.shared_mlp.output_linear", hidden, wide)
            if experts := config.get("num_local_experts", 8):
                linear(f"{name}.block_sparse_moe.router.layer", experts, hidden)
                inner = config["intermediate_size"]
                for module, rows, columns in (("input", 2 * inner, hidden), ("output", hidden, inner)):
                    stack = f"{name}.block_sparse_moe.{module}_linear"
                    linear(stack, experts * rows, columns)
                    tensors[f"{stack}.weight"] = tensors[f"{stack}.weight"].reshape(experts, rows, columns)
            if config["layer_types"][layer] == "attention":
                queries_keys_values(name, biased=flagged)
                linear(f"{name}.self_attn.o_proj", hidden, heads * head_dim, flagged)
            else:
                tensors |= mamba2_weights(config, f"{name}.mamba", random)
            continue
        if gemma:
            norm(f"{name}.pre_feedforward_layernorm", hidden)
        if gemma or model_type == "olmo2":
            norm(f"{name}.post_feedforward_layernorm", hidden)
        if model_type == "phi3":
            linear(f"{name}.self_attn.qkv_proj", (heads + 2 * kv_heads) * head_dim, hidden)
            linear(f"{name}.mlp.gate_up_proj", 2 * wide, hidden)
        else:
            queries_keys_values(name, biased=flagged or model_type == "qwen2")
        linear(f"{name}.self_attn.o_proj", hidden, heads * head_dim, flagged)
        if model_type in ("qwen3", "qwen3_moe", "gemma3_text", "olmo2"):
            norm(f"{name}.self_attn.q_norm", heads * head_dim if model_type == "olmo2" else head_dim)
            norm(f"{name}.self_attn.k_norm", kv_heads * head_dim if model_type == "olmo2" else head_dim)
        if model_type == "gpt_oss":
            experts = config["num_local_experts"]
            tensors[f"{name}.self_attn.sinks"] = random.standard_normal(heads).astype(np.float32)
            linear(f"{name}.mlp.router", experts, hidden, biased=True)
            for projection, rows, columns in (("gate_up", 2 * wide, hidden), ("down", hidden, wide)):
                module = f"{name}.mlp.experts.{projection}_proj"
                matrix(module, experts * columns, rows, 1.5 / math.sqrt(columns))
                tensors[module] = tensors[module].reshape(experts, columns, rows)
                tensors[f"{module}_bias"] = random.standard_normal((experts, rows)).astype(np.float32)
            continue
        modules = [(f"{name}.mlp", wide)]
        sparse = model_type == "qwen3_moe" and (layer + 1) % config["decoder_sparse_step"] == 0
        if sparse and layer not in config["mlp_only_layers"]:
            linear(f"{name}.mlp.gate", config["num_experts"], hidden)
            inner = config["moe_intermediate_size"]
            modules = [(f"{name}.mlp.experts.{expert}", inner) for expert in range(config["num_experts"])]
        for module, inner in modules:
            for projection, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
                if model_type != "phi3" or projection == "down":
                    linear(f"{module}.{projection}_proj", rows, columns, bool(config.get("mlp_bias")))
    if width := config.get("hidden_size_per_layer_input", 0):
        layers = config["num_hidden_layers"]
        matrix("model.embed_tokens_per_layer.weight", config["vocab_size"], layers * width, 0.3)
        linear("model.per_layer_model_projection", layers * width, hidden)
        norm("model.per_layer_projection_norm", width)
    norm("model.embedding_norm" if model_type == "lfm2" else "model.norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden, 0.4)
    return tensors


def _gemma4_layer(config: Mapping[str, Any], layer: int) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """The linears of a layer with their outputs and inputs, and its norms with their width."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    full = config["layer_types"][layer] == "full_attention"
    shared = layer >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    head_dim = config["global_head_dim"] if full else config["head_dim"]
    wide = config["intermediate_size"] * (2 if config.get("use_double_wide_mlp") and shared else 1)
    as_values = full and config.get("attention_k_eq_v", False)
    if as_values:
        kv_heads = config.get("num_global_key_value_heads", kv_heads)
    linears = {"self_attn.q_proj": (heads * head_dim, hidden), "self_attn.o_proj": (hidden, heads * head_dim)}
    norms = {"self_attn.q_norm": head_dim}
    if not shared:
        linears["self_attn.k_proj"] = (kv_heads * head_dim, hidden)
        norms["self_attn.k_norm"] = head_dim
        if not as_values:
            linears["self_attn.v_proj"] = (kv_heads * head_dim, hidden)
    linears |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
    for each in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        norms[f"{each}_layernorm"] = hidden
    if width := config.get("hidden_size_per_layer_input", 0):
        linears |= {"per_layer_input_gate": (width, hidden), "per_layer_projection": (hidden, width)}
        norms["post_per_layer_input_norm"] = hidden
    return linears, norms


def _random_tensors(
    shapes: Mapping[str, tuple[int, ...]], name: str, random: np.random.Generator
) -> dict[str, npt.NDArray[np.float64]]:
    return {
        f"{name}.{suffix}": random.standard_normal(shape) * 1.5 / math.sqrt(shape[-1])
        for suffix, shape in shapes.items()
    }


def shared_expert_weights(
    config: Mapping[str, Any], name: str, random: np.random.Generator
) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights of experts, all of a layer in one tensor, and of a shared one with a gate, float32."""
    hidden, experts = config["hidden_size"], config["num_experts"]
    wide, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    shapes = {
        "gate.weight": (experts, hidden),
        "experts.gate_up_proj": (experts, 2 * wide, hidden),
        "experts.down_proj": (experts, hidden, wide),
        "shared_expert.gate_proj.weight": (shared, hidden),
        "shared_expert.up_proj.weight": (shared, hidden),
        "shared_expert.down_proj.weight": (hidden, shared),
        "shared_expert_gate.weight": (1, hidden),
    }
    tensors = {suffix: value.astype(np.float32) for suffix, value in _random_tensors(shapes, name, random).items()}
    # Rounded inputs may select other experts, so these add less to the hidden states than dense feed-forwards.
    tensors[f"{name}.experts.down_proj"] *= np.float32(0.4)
    tensors[f"{name}.shared_expert.down_proj.weight"] *= np.float32(0.4)
    return tensors


def separate_experts(tensors: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors with one for each projection of each expert, in place of those with all experts of a layer."""
    apart = {name: value for name, value in tensors.items() if ".experts." not in name}
    for name, stack in tensors.items():
        if ".experts." in name:
            module, _, projection = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
            for expert, matrix in enumerate(stack):
                for part, rows in zip(parts, np.split(matrix, len(parts)), strict=True):
                    apart[f"{module}.{expert}.{part}.weight"] = np.ascontiguousarray(rows)
    return apart


def delta_net_weights(
    config: Mapping[str, Any], name: str, random: np.random.Generator
) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights of a gated delta net whose states remember some dozens of tokens, float32."""
    hidden, value_heads = config["hidden_size"], config["linear_num_value_heads"]
    values = value_heads * config["linear_value_head_dim"]
    convolved = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    projections = {"qkv": convolved, "z": values, "b": value_heads, "a": value_heads}
    if config["model_type"] == "qwen3_next":
        projections = {"qkvz": convolved + values, "ba": 2 * value_heads}
    shapes = {
        **{f"in_proj_{part}.weight": (rows, hidden) for part, rows in projections.items()},
        "out_proj.weight": (hidden, values),
        "conv1d.weight": (convolved, 1, config["linear_conv_kernel_dim"]),
    }
    tensors = _random_tensors(shapes, name, random)
    tensors[f"{name}.A_log"] = random.uniform(-4, 0, value_heads)
    tensors[f"{name}.dt_bias"] = random.standard_normal(value_heads)
    tensors[f"{name}.norm.weight"] = 1 + 0.2 * random.standard_normal(config["linear_value_head_dim"])
    return {suffix: value.astype(np.float32) for suffix, value in tensors.items()}


def mamba2_weights(
    config: Mapping[str, Any], name: str, random: np.random.Generator
) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights of a Mamba-2 state space whose states remember some dozens of tokens, float32."""
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    width = config["mamba_expand"] * hidden
    convolved = width + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    shapes = {
        "in_proj.weight": (width + convolved + heads, hidden),
        "out_proj.weight": (hidden, width),
        "conv1d.weight": (convolved, 1, config["mamba_d_conv"]),
    }
    tensors = _random_tensors(shapes, name, random)
    biased = {"in_proj": config["mamba_proj_bias"], "out_proj": config["mamba_proj_bias"]}
    for module, present in {**biased, "conv1d": config["mamba_conv_bias"]}.items():
        if present:
            tensors[f"{name}.{module}.bias"] = random.standard_normal(shapes[f"{module}.weight"][0]) * 0.3
    tensors[f"{name}.A_log"] = random.uniform(-4, 0, heads)
    tensors[f"{name}.dt_bias"] = random.standard_normal(heads)
    tensors[f"{name}.D"] = 1 + 0.3 * random.standard_normal(heads)
    tensors[f"{name}.norm.weight"] = 1 + 0.2 * random.standard_normal(width)
    return {suffix: value.astype(np.float32) for suffix, value in tensors.items()}


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly that many tokens, at least 6; small ones lack most letters."""
    common = list("Ġetaoinshrdlucmfwypvbgkqjxz.,'!?0123456789Ċ")
    letters = common + sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(common))
    symbols = letters[: vocab_size - len(SPECIAL_TOKENS)]
    merges = [tuple(merge.split()) for merge in MERGES][: vocab_size - len(SPECIAL_TOKENS) - len(symbols)]
    filler = [f"<|extra {i}|>" for i in range(vocab_size - len(SPECIAL_TOKENS) - len(symbols) - len(merges))]
    tokens = [*SPECIAL_TOKENS, *symbols, *("".join(merge) for merge in merges), *filler]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=SPECIAL_TOKENS[4]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: npt.DTypeLike = np.float32,
    shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint and return its folder.

    Args:
        folder: created if it does not exist.
        family: one of `FAMILY_SETTINGS`.
        seed: random seed of the weights.
        dtype: type of the stored weights: float32, float16 or ml_dtypes.bfloat16.
        shards: number of weight files.
        overrides: settings of config.json; None removes one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    write_json(folder / "config.json", config)
    tensors = {name: value.astype(dtype) for name, value in tiny_weights(config, seed).items()}
    write_weights(folder, tensors, shards)
    tiny_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "unk_token": SPECIAL_TOKENS[4],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "generation_config.json", {"eos_token_id": 0, "pad_token_id": 0, "do_sample": False})
    return folder


def source_model(folder: Path, family: str = "llama", context: int = 256, **overrides: Any) -> SourceModel:
    """Write a random checkpoint into a folder, and open it as calibration does."""
    checkpoint = Checkpoint(write_checkpoint(folder, family, **overrides))
    return SourceModel(checkpoint, read_config(folder), context)


def write_bundle(
    folder: Path, family: str = "llama", *, weights: WeightFormat | ExportRecipe = FP32, seed: int = 0, **overrides: Any
) -> Path:
    """Write a random checkpoint to `folder`/checkpoint, export it to `folder`/bundle and return the latter."""
    source = write_checkpoint(folder / "checkpoint", family, seed=seed, **overrides)
    return exported(source, folder / "bundle", weights)


def exported(source: Path, destination: Path, weights: WeightFormat | ExportRecipe = FP32) -> Path:
    """Export a checkpoint and return the bundle."""
    recipe = weights if isinstance(weights, ExportRecipe) else ExportRecipe(weights)
    return export_checkpoint(source, destination, recipe).bundle


def require_same_files(bundle: Path, other: Path) -> None:
    """Two bundles have the same graph and the same weights, byte for byte."""
    for name in ("model.onnx", "model.onnx.data"):
        assert (bundle / name).read_bytes() == (other / name).read_bytes()


def logits_of(bundle: Path, tokens: IntArray = TOKENS, capacity: int = 64) -> FloatArray:
    """Logits of all positions of a bundle in one pass, float32 [n, vocabulary]."""
    return ContractSession(bundle, capacity).forward(tokens, np.arange(len(tokens)))


def greedy_story(bundle: Path) -> str:
    """The beginning that `ORIGIN.md` of the stories model quotes, and 180 more tokens, each in a pass of its own."""
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    tokens, session = tokenizer.encode("Once upon a time").ids, ContractSession(bundle, 256)
    following = session.forward(np.array(tokens), np.array([len(tokens) - 1])).argmax(-1)
    for _ in range(180):
        tokens.append(int(following[0]))
        following = session.forward(following, np.array([0])).argmax(-1)
    return str(tokenizer.decode(tokens))


def write_endless_bundle(folder: Path) -> Path:
    """Write a bundle with a long context and no end-of-text token, for tests of interruption."""
    bundle = write_bundle(folder, max_position_embeddings=30_000, num_hidden_layers=6)
    (bundle / "edge.json").unlink()
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        config = json.loads((bundle / name).read_text(encoding="utf-8"))
        write_json(bundle / name, {key: value for key, value in config.items() if "eos" not in key})
    return bundle


def write_weights(folder: Path, tensors: Mapping[str, FloatArray], shards: int = 1) -> None:
    """Write model.safetensors, or an index and several shards."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    names = sorted(tensors)
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write an object as JSON."""
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")
