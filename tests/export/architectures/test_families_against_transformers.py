"""Exported graphs against transformers itself, where it is installed (the oracle extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgerun
from edgerun import GenerateOptions, Speculation
from edgerun.export import FP32, ExportRecipe
from edgerun.export.check.contract_session import ContractSession
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from support.tiny_models import GRANITE_EXPERTS, LLAMA3, LONGROPE, YARN, YARN_FULL, exported, write_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # several threads for such small models take longer where other tests run too

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = np.random.default_rng(11).integers(0, 300, 48)

CASES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": False}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}}),
    ("qwen2", {"rope_scaling": YARN}),
    ("qwen3", {"rope_scaling": YARN_FULL}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    ("qwen3_moe", {}),
    (
        "qwen3_moe",
        {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [], "tie_word_embeddings": False},
    ),
    ("gpt_oss", {}),
    ("gpt_oss", {"tie_word_embeddings": False, "attention_bias": False}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "tie_word_embeddings": False, "head_dim": 32}),
    ("ministral3", {}),
    ("ministral3", {"tie_word_embeddings": False, "sliding_window": 20}),
    ("phi3", {}),
    ("phi3", {"partial_rotary_factor": 1.0, "sliding_window": 11}),
    ("phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": False}),
    ("phi3", {"rope_scaling": LONGROPE}),
    ("gemma2", {}),
    ("gemma2", {"tie_word_embeddings": False, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"attention_bias": True}),
    ("gemma3_text", {}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "final_logit_softcapping": 4.0}),
    ("gemma4_text", {}),
    (
        "gemma4_text",
        {
            "num_kv_shared_layers": None,
            "use_double_wide_mlp": None,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
            "tie_word_embeddings": False,
        },
    ),
    ("gemma4_text", {"attention_bias": True, "head_dim": 8, "global_head_dim": 24, "final_logit_softcapping": None}),
    ("smollm3", {}),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 9, "attention_bias": True, "mlp_bias": True}),
    ("granite", {}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("olmo2", {}),
    ("lfm2", {}),
    (
        "lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 5,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] + ["conv"] * 4,
        },
    ),
    ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 24, "block_ffn_dim_multiplier": 1.3}),
    ("qwen3_5_text", {}),
    (
        "qwen3_5_text",
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 2,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    ("qwen3_5_moe_text", {}),
    (
        "qwen3_5_moe_text",
        {"tie_word_embeddings": False, "num_experts": 3, "num_experts_per_tok": 1, "num_key_value_heads": 1},
    ),
    ("qwen3_next", {}),
    (
        "qwen3_next",
        {
            "tie_word_embeddings": False,
            "norm_topk_prob": False,
            "mlp_only_layers": [],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
        },
    ),
    ("granitemoehybrid", {"mamba_n_groups": 1}),
    ("granitemoehybrid", {**GRANITE_EXPERTS, "mamba_n_groups": 1}),
    (
        "granitemoehybrid",
        {
            **GRANITE_EXPERTS,
            "num_local_experts": None,
            "num_experts_per_tok": 1,
            "mamba_n_groups": 2,
            "tie_word_embeddings": False,
        },
    ),
    ("granitemoehybrid", {"mamba_n_groups": 2}),
    (
        "granitemoehybrid",
        {
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_d_head": "auto",
            "mamba_n_heads": 4,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mamba_d_conv": 3,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["attention", "mamba", "mamba", "attention"],
        },
    ),
    ("olmo2", {"tie_word_embeddings": False, "num_key_value_heads": None}),
]


def require_known(family: str, overrides: dict[str, Any]) -> None:
    """Skip what the installed transformers lacks; some families are in transformers 5 alone."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    if overrides.get("mamba_n_groups", 1) > 1 and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 4 normalizes all groups together")


def load(source: Path) -> Any:
    """Load the model in float64; only the eager implementations support soft caps and float64 experts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):  # from transformers 5 on
        model.set_experts_implementation("eager")
    return model.double()


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=str)
def test_logits_equal_those_of_transformers(tmp_path, family: str, overrides: dict[str, Any]) -> None:
    require_known(family, overrides)
    source = write_checkpoint(tmp_path / "checkpoint", family, **overrides)
    # The installed release of transformers may write settings under other names.
    transformers.AutoConfig.from_pretrained(source).save_pretrained(tmp_path / "rewritten")
    assert read_config(tmp_path / "rewritten") == read_config(source)
    model = load(source)
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)[None]).logits[0].numpy()
    context = ExportRecipe(FP32).context_for(read_config(source))
    computed = reference_logits(Checkpoint(source), read_config(source), TOKENS, context)
    # transformers keeps its rotary angles in float32 even in a float64 model.
    np.testing.assert_allclose(computed, expected, atol=2e-4)
    bundle = exported(source, tmp_path / "bundle")
    session = ContractSession(bundle, 64)
    np.testing.assert_allclose(session.forward(TOKENS, np.arange(48)), expected, atol=2e-4)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in ("llama", "qwen2", "qwen3", "lfm2", "ministral3", "gemma4_text")),
        *((family, {}) for family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")),
        ("granitemoehybrid", {"mamba_n_groups": 2}),
        ("granitemoehybrid", {**GRANITE_EXPERTS, "mamba_n_groups": 1}),
    ],
    ids=str,
)
def test_greedy_text_is_that_of_transformers(tmp_path, family: str, overrides: dict[str, Any]) -> None:
    require_known(family, overrides)
    source = write_checkpoint(tmp_path / "checkpoint", family, max_position_embeddings=512, **overrides)
    model, prompt = load(source), [7, 8, 9, 7, 8, 30, 41]
    expected = list(prompt)
    with torch.no_grad():
        for _ in range(200):
            expected.append(int(model(torch.tensor([expected]), use_cache=False).logits[0, -1].argmax()))
    bundle = exported(source, tmp_path / "bundle")
    with edgerun.load(bundle, threads=1, cache=False, learned=False, history=False) as engine:
        for speculation in (Speculation.OFF, Speculation.AUTO):
            sequence = engine.model.new_sequence()
            options = GenerateOptions(max_tokens=200, temperature=0, speculation=speculation, ignore_eos=True)
            assert list(engine.model.answer(sequence, prompt, options))
            assert sequence.token_ids == expected


SHORT = {"max_position_embeddings": 128}
BEYOND = [
    ("llama", 32, {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("llama", 32, {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("llama", 128, {**SHORT, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}}),
    ("qwen2", 128, {**SHORT, "rope_scaling": {**YARN, "original_max_position_embeddings": 32}}),
    # The files of Qwen2.5 and Qwen3 leave the longest context at the original one.
    ("qwen2", 32, {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("qwen3", 128, {**SHORT, "rope_scaling": {**YARN_FULL, "original_max_position_embeddings": 32}}),
    (
        "qwen3",
        128,
        {**SHORT, "rope_scaling": {**YARN, "original_max_position_embeddings": 32, "attention_factor": 1.7}},
    ),
    ("phi3", 32, {"original_max_position_embeddings": 32, "rope_scaling": LONGROPE}),
    ("llama", 32, {"max_position_embeddings": 32, "rope_scaling": {**LONGROPE, "factor": 4.0}}),
    (
        "llama",
        32,
        {"max_position_embeddings": 32, "rope_scaling": {**LONGROPE, "factor": 4.0, "attention_factor": 1.4}},
    ),
]


@pytest.mark.parametrize("context", [32, 33, 120])
@pytest.mark.parametrize(("family", "default", "overrides"), BEYOND, ids=str)
def test_scalings_beyond_the_trained_length(tmp_path, family: str, default: int, overrides, context: int) -> None:
    """With a text as long as the exported context, transformers uses the same rotation as the graph.

    LongRoPE has other factors from the first token beyond the original length on, dynamic scaling another base.
    """
    source = write_checkpoint(tmp_path / "checkpoint", family, **overrides)
    assert ExportRecipe(FP32).context_for(read_config(source)) == default
    tokens = np.random.default_rng(12).integers(0, 300, context)
    model = load(source)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)[None]).logits[0].numpy()
    bundle = exported(source, tmp_path / "bundle", ExportRecipe(FP32, context=context))
    session = ContractSession(bundle, context)
    np.testing.assert_allclose(session.forward(tokens, np.arange(context)), expected, atol=3e-4)
