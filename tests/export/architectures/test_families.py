"""The differences between families: in the logits, in decoding with trees, and in config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgerun.errors import CheckpointError, InputError
from edgerun.export import FP32, INT4, INT8, ExportRecipe, WeightFormat
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import GELU_TANH, DecoderConfig, parse_config, read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.models.bundle import open_bundle
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession as RuntimeGraph
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from support.adversarial_drafters import eager
from support.nightly import some_nightly
from support.tiny_models import (
    FAMILY_SETTINGS,
    GRANITE_EXPERTS,
    HYBRID_FAMILIES,
    LONGROPE,
    TOKENS,
    exported,
    logits_of,
    require_same_files,
    separate_experts,
    tiny_config,
    tiny_weights,
    write_bundle,
    write_checkpoint,
    write_json,
    write_weights,
)


def config_of(folder: Path, family: str, **overrides: Any) -> DecoderConfig:
    write_json(folder / "config.json", tiny_config(family, **overrides))
    return read_config(folder)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [*((family, {}) for family in FAMILY_SETTINGS), ("granitemoehybrid", GRANITE_EXPERTS)],
    ids=[*FAMILY_SETTINGS, "granitemoehybrid with experts"],
)
def test_decoding_beyond_the_window_equals_the_reference(tmp_path, family: str, overrides: dict[str, Any]) -> None:
    """Plain decoding and token trees, some of whose draft tokens are rejected, give the reference's greedy tokens."""
    bundle = write_bundle(tmp_path, family, tie_word_embeddings=False, **overrides)
    graph = RuntimeGraph(bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))
    prompt, limits = [7, 8, 9, 7, 8], DecodeLimits(48, frozenset())
    outputs, tree_tokens, trees = [], 0, graph.graph_io.supports_trees
    assert trees is (family not in HYBRID_FAMILIES)  # states are known along a chain
    for speculator in (None, eager(SuffixDrafter(), RecyclingDrafter(RecycledTable(300)), trees=trees)):
        sampler = Sampler(SamplingParams(), 300)
        steps = list(decode(graph.bind(graph.arena(256)), prompt, sampler, limits, speculator, None))
        outputs.append([token for step in steps for token in step.tokens])
        tree_tokens += sum(step.round.width for step in steps if step.round is not None)
    assert outputs[0] == outputs[1]
    assert tree_tokens > 60
    text = np.array([*prompt, *outputs[0]])
    expected = reference_logits(Checkpoint(tmp_path / "checkpoint"), read_config(tmp_path / "checkpoint"), text, 256)
    assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == outputs[0]


SETTINGS_WITH_EFFECT = [
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9}, {"sliding_window": 10}),
    ("qwen3_moe", {}, {"num_experts_per_tok": 3}),
    ("qwen3_moe", {}, {"norm_topk_prob": False}),
    ("gpt_oss", {}, {"num_experts_per_tok": 3}),
    ("gpt_oss", {}, {"swiglu_limit": 1.0}),
    ("gpt_oss", {}, {"swiglu_alpha": 1.6}),
    ("gpt_oss", {}, {"sliding_window": 11}),
    ("mistral", {}, {"sliding_window": None}),
    ("mistral", {}, {"sliding_window": 11}),
    ("phi3", {}, {"partial_rotary_factor": 1.0}),
    ("phi3", {"rope_scaling": LONGROPE}, {"original_max_position_embeddings": 120}),
    ("gemma2", {}, {"attn_logit_softcapping": 4.0}),
    ("gemma2", {}, {"final_logit_softcapping": 4.0}),
    ("gemma2", {}, {"query_pre_attn_scalar": 32}),
    ("gemma2", {}, {"hidden_activation": "silu"}),
    ("gemma2", {}, {"sliding_window": 13}),
    ("gemma3_text", {}, {"rope_local_base_freq": 200.0}),
    ("gemma3_text", {}, {"rope_theta": 2e6}),
    ("gemma3_text", {}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("gemma3_text", {}, {"sliding_window_pattern": 2}),
    ("gemma3_text", {}, {"final_logit_softcapping": 4.0}),
    ("smollm3", {}, {"no_rope_layers": [1, 1, 1]}),
    ("qwen3_5_text", {}, {"rms_norm_eps": 0.1}),
    ("qwen3_5_text", {}, {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}}),
    ("qwen3_5_moe_text", {}, {"num_experts_per_tok": 3}),
    ("qwen3_next", {}, {"norm_topk_prob": False}),
    ("qwen3_next", {}, {"partial_rotary_factor": 0.25}),
    ("granitemoehybrid", {}, {"position_embedding_type": "rope"}),
    ("granitemoehybrid", {}, {"rms_norm_eps": 0.1}),
    ("granitemoehybrid", {}, {"residual_multiplier": 0.71}),
    ("granite", {}, {"embedding_multiplier": 3.1}),
    ("granite", {}, {"attention_multiplier": 0.5}),
    ("granite", {}, {"residual_multiplier": 0.71}),
    ("granite", {}, {"logits_scaling": 0.6}),
]


@pytest.mark.parametrize(
    ("family", "before", "after"),
    SETTINGS_WITH_EFFECT,
    ids=[f"{family} {after}" for family, _, after in SETTINGS_WITH_EFFECT],
)
def test_settings_change_the_logits(tmp_path, family: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """An export, which compares the graph with the reference, would not notice a setting that both ignore."""
    weights = Checkpoint(write_checkpoint(tmp_path / "checkpoint", family, **{**before, **after}))
    settings = (tiny_config(family, **before), tiny_config(family, **{**before, **after}))
    first, second = (reference_logits(weights, parse_config(each), TOKENS, 256) for each in settings)
    assert np.abs(first - second).max() > 1e-2
    exported(tmp_path / "checkpoint", tmp_path / "bundle")


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_oss", "olmo2"),
        *("qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid"),
    ],
)
def test_every_tensor_changes_the_logits(tmp_path, family: str) -> None:
    """The graph agrees with the reference, which would not notice a tensor that both ignore."""
    overrides = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    source = write_checkpoint(tmp_path, family, **overrides)
    config, weights = read_config(source), tiny_weights(tiny_config(family, **overrides))
    tokens = TOKENS[:16]
    before = reference_logits(Checkpoint(source), config, tokens, 256)
    for name, value in weights.items():
        changed = value.copy()
        changed.flat[::7] += 0.5
        write_weights(source, {**weights, name: changed})
        after = reference_logits(Checkpoint(source), config, tokens, 256)
        assert np.abs(after - before).max() > 1e-4, name


@pytest.mark.parametrize("weight_format", some_nightly([INT4, FP32], every=2), ids=str)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 8}),
        ("llama", {"head_dim": 24}),
        ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
        ("llama", {"hidden_size": 80, "intermediate_size": 172, "num_attention_heads": 5, "num_key_value_heads": 5}),
        ("llama", {"num_hidden_layers": 1, "num_key_value_heads": None}),
        ("llama", {"vocab_size": 10}),
        ("llama", {"rms_norm_eps": 0.5}),
        ("llama", {"rope_theta": 100.0}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"num_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": False}),
        ("qwen3_moe", {"num_hidden_layers": 1, "mlp_only_layers": [], "num_experts_per_tok": 5}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2], "attention_bias": True}),
        ("gpt_oss", {"attention_bias": False, "num_local_experts": 2}),
        ("gpt_oss", {"num_hidden_layers": 1, "layer_types": None, "head_dim": 8, "num_experts_per_tok": 5}),
        ("gemma2", {"head_dim": 24}),
        ("gemma3_text", {"head_dim": 8, "num_key_value_heads": 4}),
        ("gemma3_text", {"num_hidden_layers": 1}),
        ("phi3", {"partial_rotary_factor": 0.75}),
        ("phi3", {"num_attention_heads": 8, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
        ("phi3", {"num_hidden_layers": 1, "hidden_size": 96, "num_attention_heads": 1, "partial_rotary_factor": 0.25}),
        ("smollm3", {"no_rope_layers": [0, 0, 0]}),
        ("smollm3", {"head_dim": 24}),
        ("olmo2", {"num_hidden_layers": 1, "num_key_value_heads": 1}),
        ("olmo2", {"head_dim": 24, "attention_bias": True}),
        ("granite", {"num_hidden_layers": 1, "logits_scaling": 8.0, "residual_multiplier": 0.22}),
        ("qwen3_5_text", {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 2}),
        ("qwen3_5_text", {"head_dim": 24, "num_hidden_layers": 2, "layer_types": None, "full_attention_interval": 2}),
        ("qwen3_5_moe_text", {"num_experts": 1, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 32}),
        ("qwen3_next", {"linear_num_key_heads": 1, "norm_topk_prob": False, "mlp_only_layers": []}),
        ("qwen3_next", {"num_experts": 0, "mlp_only_layers": [0, 1, 2], "shared_expert_intermediate_size": None}),
        ("granitemoehybrid", {**GRANITE_EXPERTS, "num_local_experts": 3, "num_experts_per_tok": 3}),
        ("granitemoehybrid", {"mamba_n_groups": 8, "mamba_d_conv": 2, "logits_scaling": 2.0}),
        ("granitemoehybrid", {"mamba_n_heads": 1, "mamba_n_groups": 1, "mamba_d_head": 128, "mamba_d_state": 1}),
        ("mistral", {"sliding_window": 1}),
        ("mistral", {"head_dim": 24, "sliding_window": 2}),
    ],
    ids=str,
)
def test_odd_shapes(tmp_path, family: str, overrides: dict[str, Any], weight_format) -> None:
    bundle = write_bundle(tmp_path, family, weights=weight_format, **overrides)
    assert open_bundle(bundle).manifest.parity["max_abs_diff"] < 1e-4


@pytest.mark.parametrize("weight_format", [INT8, INT4], ids=str)
def test_experts_use_one_operator_and_an_exact_router(tmp_path, weight_format) -> None:
    bundle = write_bundle(tmp_path, "qwen3_moe", weights=weight_format)
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    operators = [node.op_type for node in graph.node]
    assert (operators.count("QMoE"), operators.count("MatMul")) == (2, 2)
    weights = open_bundle(bundle).manifest.weights
    assert weights["layers.0.router"] == FP32
    assert weights["layers.0.gate_up"] == weights["layers.0.down"] == weight_format
    assert "layers.1.router" not in weights
    expected = reference_logits(Checkpoint(tmp_path / "checkpoint"), read_config(tmp_path / "checkpoint"), TOKENS, 256)
    assert np.corrcoef(logits_of(bundle).ravel(), expected.ravel())[0, 1] > (0.99 if weight_format == INT8 else 0.8)


def test_experts_in_one_tensor_export_like_separate_ones(tmp_path) -> None:
    """Releases of the same models differ in this, and so do the versions of transformers that save them."""
    source = write_checkpoint(tmp_path / "together", "qwen3_5_moe_text")
    weights = tiny_weights(tiny_config("qwen3_5_moe_text"))
    other = write_checkpoint(tmp_path / "apart", "qwen3_5_moe_text")
    write_weights(other, separate_experts(weights))
    require_same_files(*(exported(each, tmp_path / f"{each.name}-bundle", INT4) for each in (source, other)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 6}, r"mlp\.gate\.weight has shape \[5, 64\], but config\.json implies \[6, 64\]"),
        ({"moe_intermediate_size": 64}, r"experts\.0\.gate_proj\.weight has shape \[32, 64\], but .* \[64, 64\]"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size must be a positive integer"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act gelu_pytorch_tanh is not supported with experts"),
    ],
    ids=["more experts", "wider experts", "no shared size", "activation"],
)
def test_experts_that_do_not_fit_are_refused_in_one_line(tmp_path, change: dict[str, Any], message: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "qwen3_5_moe_text")
    write_json(source / "config.json", tiny_config("qwen3_5_moe_text", **{"intermediate_size": 64, **change}))
    with pytest.raises(CheckpointError, match=message) as error:
        exported(source, tmp_path / "bundle")
    assert "\n" not in str(error.value)


def test_blocks_that_do_not_divide_experts_are_refused(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "qwen3_moe")
    message = r"layers\.0\.down have 32 columns, which is not a multiple of the block size 64; choose smaller blocks"
    with pytest.raises(InputError, match=message):
        exported(source, tmp_path / "bundle", ExportRecipe(WeightFormat(4, 64)))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4_weights() -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights of the tiny gpt-oss with experts in MXFP4, and with the same experts in float32."""
    packed, unpacked = tiny_weights(tiny_config("gpt_oss")), {}
    random = np.random.default_rng(1)
    for name in [name for name in packed if name.endswith("_proj") and "experts" in name]:
        experts, columns, rows = packed.pop(name).shape
        codes = random.integers(0, 16, (experts, rows, columns // 32, 32)).astype(np.uint8)
        scales = random.integers(122, 127, (experts, rows, columns // 32)).astype(np.uint8)
        packed[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        packed[f"{name}_scales"] = scales
        weights = FP4[codes] * np.float32(2) ** (scales.astype(np.float32) - 127)[..., None]
        unpacked[name] = np.ascontiguousarray(weights.reshape(experts, rows, columns).transpose(0, 2, 1))
    return packed, {**{name: value for name, value in packed.items() if value.dtype != np.uint8}, **unpacked}


def write_mxfp4(folder: Path, weights: dict[str, Any]) -> Path:
    write_checkpoint(folder, "gpt_oss", quantization_config={"quant_method": "mxfp4"})
    write_weights(folder, weights)
    return folder


@pytest.mark.parametrize("weight_format", [FP32, INT8, INT4], ids=str)
def test_mxfp4_experts_export_like_their_float_values(tmp_path, weight_format) -> None:
    packed, unpacked = mxfp4_weights()
    sources = write_mxfp4(tmp_path / "packed", packed), write_mxfp4(tmp_path / "unpacked", unpacked)
    require_same_files(*(exported(each, tmp_path / f"{each.name}-bundle", weight_format) for each in sources))


def test_mxfp4_values_equal_those_of_transformers(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    packed, _ = mxfp4_weights()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    expected = mxfp4.convert_moe_packed_tensors(
        torch.tensor(packed[f"{name}_blocks"]), torch.tensor(packed[f"{name}_scales"]), dtype=torch.float32
    )
    read = np.concatenate(list(Checkpoint(write_mxfp4(tmp_path, packed)).chunks(name)))
    np.testing.assert_array_equal(read, expected.numpy().transpose(0, 2, 1).reshape(read.shape))


STACK = "model.layers.1.mlp.experts.down_proj"
DAMAGED = [
    ("scales", None, r"lacks the tensor .*down_proj_scales; the checkpoint is incomplete"),
    ("blocks", None, r"lacks the tensor .*down_proj; the checkpoint is incomplete"),
    ("scales", lambda value: value[:, :1], r"down_proj does not have the MXFP4 layout of gpt-oss; download"),
    ("blocks", lambda value: value.astype(np.float32), r"does not have the MXFP4 layout of gpt-oss; download"),
    ("blocks scales", lambda value: value[:4], r"down_proj has shape \[256, 32\], but .* implies \[320, 32\]"),
    ("scales", lambda value: value | 255, r"down_proj holds NaN or infinite weights"),
    ("bias", lambda value: value[:4], r"down_proj_bias has shape \[4, 64\], but config\.json implies \[5, 64\]"),
]


@pytest.mark.parametrize(("parts", "change", "message"), DAMAGED, ids=[message for *_, message in DAMAGED])
def test_damaged_experts_are_refused_in_one_line(tmp_path, parts: str, change, message: str) -> None:
    weights, _ = mxfp4_weights()
    for name in (f"{STACK}_{part}" for part in parts.split()):
        value = weights.pop(name)
        weights |= {} if change is None else {name: change(value)}
    source = write_mxfp4(tmp_path / "checkpoint", weights)
    with pytest.raises(CheckpointError, match=message) as caught:
        exported(source, tmp_path / "bundle")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


NESTED = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "mistral3": "ministral3", "qwen3_5": "qwen3_5_text"}
NESTED["qwen3_5_moe"] = "qwen3_5_moe_text"
"""Multimodal families, and those of their language models."""


def nested(folder: Path, rename: dict[str, str], kind: str = "gemma3", **text_settings: Any) -> Path:
    """Write a multimodal checkpoint with the tiny language model, an image tensor and one of a draft head."""
    inside = NESTED[kind]
    write_checkpoint(folder, inside)
    text = {**tiny_config(inside), **text_settings}
    config = {"model_type": kind, "text_config": text, "vision_config": {"hidden_size": 32}, "eos_token_id": 0}
    write_json(folder / "config.json", config)
    weights = {"vision_tower.patch.weight": np.ones((4, 4), np.float32), "mtp.fc.weight": np.ones((4, 4), np.float32)}
    for name, value in tiny_weights(tiny_config(inside)).items():
        old = next(prefix for prefix in rename if name.startswith(prefix))
        weights[rename[old] + name.removeprefix(old)] = value
    write_weights(folder, weights)
    return folder


@pytest.mark.parametrize("kind", NESTED)
def test_language_model_of_a_multimodal_checkpoint(tmp_path, kind: str) -> None:
    alone = write_bundle(tmp_path / "alone", NESTED[kind], weights=INT4)
    for before, after in (("", "language_model."), ("model.", "model.language_model.")):  # in old and new releases
        inside = exported(nested(tmp_path / after, {before: after}, kind), tmp_path / "bundle", INT4)
        require_same_files(inside, alone)
        assert open_bundle(inside).manifest.architecture.family == kind


@pytest.mark.parametrize(
    ("rename", "kind", "settings", "message"),
    [
        ("language_model.", "mistral3", {"model_type": "mistral"}, "has the model_type 'mistral'; supported is minist"),
        ("decoder.", "gemma3", {}, r"lacks the tensor model\.embed_tokens\.weight; the checkpoint is incompl"),
    ],
)
def test_other_multimodal_checkpoints_are_refused(tmp_path, rename: str, kind: str, settings, message: str) -> None:
    source = nested(tmp_path / "nested", {"": rename}, kind, **settings)
    with pytest.raises(CheckpointError, match=message):
        exported(source, tmp_path / "bundle")


def test_defaults_of_gemma_checkpoints(tmp_path) -> None:
    sparse = {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {},
    }
    write_json(tmp_path / "config.json", sparse)
    config = read_config(tmp_path)
    assert (config.vocab_size, config.heads, config.kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.activation == GELU_TANH
    assert config.tied_head
    assert config.attention_scale == 1 / 16
    assert config.embedding_scale == pytest.approx(2560**0.5)
    assert [layer.window for layer in config.attention[:7]] == [1024] * 5 + [None, 1024]
    local, whole = config.attention[0].rope, config.attention[5].rope
    assert (local.base, whole.base) == (10_000.0, 1_000_000.0)
    assert local.factor != whole.factor


def test_a_null_soft_cap_means_none(tmp_path) -> None:
    nulls = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert config_of(tmp_path, "gemma2", **nulls).attention_softcap == 50.0
    write_json(tmp_path / "config.json", {**tiny_config("gemma2"), **nulls})
    config = read_config(tmp_path)
    assert config.attention_softcap is None
    assert config.logits_softcap is None


def test_sliding_window_layers_of_each_family(tmp_path) -> None:
    def windows(family: str, **overrides: Any) -> list[int | None]:
        return [layer.window for layer in config_of(tmp_path, family, num_hidden_layers=4, **overrides).attention]

    windowed = {"use_sliding_window": True, "sliding_window": 9}
    listed = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}
    assert windows("llama") == [None] * 4
    assert windows("qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=3) == [None, None, None, 9]
    assert windows("qwen2", sliding_window=9, max_window_layers=0) == [None] * 4
    assert windows("qwen3", sliding_window=9, **listed) == [None, 9, 9, None]
    assert windows("mistral", sliding_window=9) == [9] * 4
    assert windows("mistral", sliding_window=None) == [4096] * 4
    assert windows("gemma2") == [12, None, 12, None]
    assert windows("gemma2", **listed) == [None, 12, 12, None]
    assert windows("gemma3_text") == [12, 12, None, 12]
    assert windows("smollm3", no_rope_layers=None) == [None] * 4
    assert windows("smollm3", no_rope_layers=None, **windowed) == [None, None, None, 9]
    assert windows("smollm3", no_rope_layers=[0, 1, 0, 1], **windowed) == [9, None, 9, None]


def test_longrope_context_defaults_to_the_original_one(tmp_path) -> None:
    overrides = {"original_max_position_embeddings": 64, "rope_scaling": LONGROPE}
    default = write_bundle(tmp_path / "default", "phi3", **overrides)
    assert open_bundle(default).manifest.architecture.context == 64
    same = write_bundle(tmp_path / "same", "phi3", weights=ExportRecipe(FP32, context=64), **overrides)
    longer = write_bundle(tmp_path / "longer", "phi3", weights=ExportRecipe(FP32, context=65), **overrides)
    np.testing.assert_array_equal(logits_of(default), logits_of(same))
    assert np.abs(logits_of(default) - logits_of(longer)).max() > 1e-2


def test_early_names_of_longrope(tmp_path) -> None:
    kinds = ("su", "yarn", "longrope")
    configs = (config_of(tmp_path, "phi3", rope_scaling={**LONGROPE, "type": kind}) for kind in kinds)
    assert len({config.attention[0].rope for config in configs}) == 1


def test_layers_share_window_masks_and_rotary_tables(tmp_path) -> None:
    bundle = write_bundle(tmp_path, "gemma3_text", num_hidden_layers=6)
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    local = ("rope.cos", "rope.sin", "position_ids", "window.12.bias")
    whole = ("rope.1.cos", "rope.1.sin", "position_ids", "attention_bias")
    assert [tuple(node.input[7:11]) for node in attention] == [local, local, whole] * 2
    assert [node.op_type for node in graph.node].count("Where") == 1
