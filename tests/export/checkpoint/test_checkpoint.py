"""Reading checkpoints, and one-line errors for damaged and unsupported ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from edgerun.errors import CheckpointError
from edgerun.export import FP32, INT4, ExportRecipe, export_checkpoint
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.checkpoint.source import RowRange
from support.tiny_models import LLAMA3, exported, tiny_config, tiny_weights, write_checkpoint, write_json, write_weights


@settings(max_examples=30)
@given(
    st.integers(1, 70),
    st.integers(1, 40),
    st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    st.data(),
)
def test_rows_equal_those_of_the_safetensors_library(tmp_path_factory, rows: int, columns: int, dtype, data) -> None:
    folder = tmp_path_factory.mktemp("weights")
    value = np.random.default_rng(rows * columns).standard_normal((rows, columns)).astype(dtype)
    write_weights(folder, {"model.first": value[:1], "model.second": value})
    expected = load_file(folder / "model.safetensors")["model.second"].astype(np.float32)
    checkpoint = Checkpoint(folder)
    assert checkpoint.shape("model.second") == (rows, columns)
    read = checkpoint.read("model.second")
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, expected)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    np.testing.assert_array_equal(checkpoint.read_rows(RowRange("model.second", start, stop)), expected[start:stop])


@pytest.mark.parametrize(
    ("rows", "columns", "count"),
    [(5, 600_000, 5), (5, 400_000, 3), pytest.param(7, 3_000_000, 7, marks=pytest.mark.nightly), (9, 2, 1)],
)
def test_chunks_cover_the_matrix_in_order(tmp_path, rows: int, columns: int, count: int) -> None:
    value = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    write_weights(tmp_path, {"model.wide": value})
    chunks = list(Checkpoint(tmp_path).chunks("model.wide"))
    assert len(chunks) == count
    np.testing.assert_array_equal(np.concatenate(chunks), value)


Damage = Callable[[Path], None]


def edit_config(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_json(folder / "config.json", {**config, **changes})

    return damage


def edit_generation(**changes: object) -> Damage:
    return lambda folder: write_json(folder / "generation_config.json", changes)


def edit_weights(edit: Callable[[dict[str, np.ndarray]], object]) -> Damage:
    def damage(folder: Path) -> None:
        weights = tiny_weights(tiny_config())
        edit(weights)
        write_weights(folder, weights)

    return damage


def set_weight(value: float) -> Damage:
    return edit_weights(lambda weights: weights["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 5), value))


def set_norm(value: np.ndarray) -> Damage:
    return edit_weights(lambda weights: weights.update({"model.norm.weight": value}))


def write(name: str, data: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())  # type: ignore[return-value]


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def cut(name: str, size: int) -> Damage:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: size if size >= 0 else len(data) + size])

    return damage


def only_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_weights(folder, tiny_weights(tiny_config()), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()


def index_of(text: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    return damage


def header_of(text: str) -> Damage:
    data = text.encode()
    return write("model.safetensors", len(data).to_bytes(8, "little") + data)


def entry_of(shape: object, offsets: object, dtype: object = "F32") -> Damage:
    return header_of(json.dumps({"model.x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}))


DEEP = "[" * 100_000
ROPE = {"rope_type": "spiral", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
DAMAGED = [
    (remove("config.json"), r"does not contain config\.json; give the folder of a Hugging Face checkpoint"),
    (write("config.json", "{not json"), r"config\.json is not valid JSON: .*; download"),
    (write("config.json", "[1]"), r"config\.json does not hold a JSON object"),
    (write("config.json", "{}"), r"config\.json has no model_type"),
    (
        edit_config(model_type="mixtral"),
        r"model_type 'mixtral' is not a supported architecture; supported are Dream, .*, gemma2, .*, smolvlm; "
        r'Optimum exports more: pip install "edge-run\[optimum\]"$',
    ),
    (edit_config(model_type="../llama"), r"'\.\./llama' is not a supported architecture"),
    (edit_config(hidden_size=None), r"hidden_size must be a positive integer, found None"),
    (edit_config(num_hidden_layers=-1), r"num_hidden_layers must be a positive integer, found -1"),
    (edit_config(num_attention_heads="four"), r"num_attention_heads must be .*'four'"),
    (edit_config(num_key_value_heads=3), r"num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    (edit_config(rms_norm_eps="small"), r"rms_norm_eps must be a number, at most 1e\+30, found 'small'"),
    (edit_config(head_dim=20), r"head_dim 20 is not a multiple of 8"),
    (edit_config(hidden_act="gelu"), r"hidden_act 'gelu' is not supported; supported are silu, gelu_pytorch_tanh$"),
    (edit_config(partial_rotary_factor=0.5), r"partial_rotary_factor 0\.5 is not supported; supported is 1\.0"),
    (edit_config(rope_scaling=ROPE), r"rope scaling 'spiral' is not supported; supported are default, linear,"),
    (edit_config(rope_scaling=[4.0]), r"rotary settings must be an object, found \[4\.0\]"),
    (edit_config(rope_scaling={"type": "linear"}), r"factor must be a positive number, found None"),
    (
        edit_config(rope_parameters={"full_attention": {"rope_theta": 1.0}}),
        r"rotary settings that differ between layers are not supported",
    ),
    (
        edit_config(layer_types=["full_attention", "sliding_attention"]),
        r"this llama checkpoint uses sliding-window attention; supported is full attention in every layer",
    ),
    (edit_config(layer_types=["full_attention"] * 3), r"layer_types must have 2 entries, found 3"),
    (
        edit_config(layer_types=["full_attention", "linear_attention"]),
        r"layer_types has 'linear_attention'; supported are full_attention and sliding_attention",
    ),
    (edit_config(use_bidirectional_attention=True), r"use_bidirectional_attention is not supported; only decoders"),
    (remove("model.safetensors"), r"does not contain model\.safetensors; give the folder"),
    (only_pickled_weights, r"only contains pickled weights.*; save the checkpoint as safetensors"),
    (without_a_shard, r"shard model-00002-of-00003\.safetensors is missing"),
    (index_of("{}"), r"index\.json has no weight_map"),
    (index_of('{"weight_map": {"model.norm.weight": 3}}'), r"index\.json has no weight_map"),
    (index_of("{"), r"index\.json is not valid JSON"),
    (cut("model.safetensors", 5), r"truncated or not a safetensors file"),
    (cut("model.safetensors", 500), r"truncated or not a safetensors file"),
    (cut("model.safetensors", -100), r"model\.safetensors is truncated: .* extends beyond its \d+ bytes; download"),
    (header_of("{oops"), r"has a damaged header"),
    (header_of('{"model.x": {"dtype": "F32"}}'), r"has a damaged header"),
    (entry_of([3], [0, 4]), r"has a damaged header: model\.x has bytes 0 to 4 for shape \[3\]"),
    (entry_of([1], [-4, 0]), r"has a damaged header: model\.x has the data_offsets \[-4, 0\]"),
    (
        edit_weights(lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight")),
        r"lacks the tensor model\.layers\.1\.self_attn\.k_proj\.weight; the checkpoint is incomplete",
    ),
    (edit_config(tie_word_embeddings=False), r"lacks the tensor lm_head\.weight"),
    (set_norm(np.ones(65, np.float32)), r"model\.norm\.weight has shape \[65\], but .* implies \[64\]"),
    (set_norm(np.ones(64, np.int32)), r"has type I32; supported are F32, F16 and BF16"),
    (set_weight(float("nan")), r"up_proj\.weight holds NaN or infinite weights"),
    (set_weight(float("inf")), r"up_proj\.weight holds NaN or infinite weights"),
    (remove("tokenizer.json"), r"does not contain tokenizer\.json; save one with AutoTokenizer"),
    (write("tokenizer.json", "{}"), r"tokenizer\.json cannot be read: .*Model missing"),
    (write("tokenizer.json", "not json"), r"tokenizer\.json cannot be read: .*expected ident"),
    (write("config.json", DEEP), r"config\.json is not valid JSON: it is nested too deeply"),
    (write("config.json", b'{"model_type": "\xff"}'), r"config\.json is not valid JSON: 'utf-8' codec"),
    (edit_config(rope_theta=10**400), r"rope_theta must be a number, at most 1e\+30, found 1000"),
    (edit_config(max_position_embeddings=10**400), r"max_position_embeddings must be .*, at most 2147483647, found 1"),
    (edit_config(rms_norm_eps=float("inf")), r"rms_norm_eps must be a number, .*found inf"),
    (edit_config(rms_norm_eps=True), r"rms_norm_eps must be a number, .*found True"),
    (edit_config(rope_theta=1), r"rope_theta must be greater than 1, found 1\.0"),
    (edit_config(rope_theta=1, rope_scaling={"type": "yarn", "factor": 2.0}), r"rope_theta must be greater than 1"),
    (edit_config(rope_scaling=LLAMA3), r"original_max_position_embeddings must be a positive .*found None"),
    (
        edit_config(rope_scaling={**LLAMA3, "low_freq_factor": 4.0, "original_max_position_embeddings": 64}),
        r"high_freq_factor 4\.0 must be greater than low_freq_factor 4\.0",
    ),
    (edit_config(max_position_embeddings=1), r"max_position_embeddings must be an integer of at least 2, found 1"),
    (edit_config(layer_types=5), r"layer_types must be a list, found 5"),
    (edit_config(num_hidden_layers=10**7), r"num_hidden_layers must be a positive integer, at most 10000, found 1"),
    (edit_config(num_hidden_layers=9999), r"lacks the tensor model\.layers\.2\.self_attn\.q_proj\.weight"),
    (header_of(DEEP), r"has a damaged header: it is not valid JSON: it is nested too deeply"),
    (header_of("[]"), r"has a damaged header: it does not hold a JSON object"),
    (header_of('{"model.x": 3}'), r"has a damaged header: model\.x is 3"),
    (entry_of([1.5], [0, 6]), r"has a damaged header: model\.x has the shape \[1\.5\]"),
    (entry_of([1], [0.0, 4.0]), r"has a damaged header: model\.x has the data_offsets \[0\.0, 4\.0\]"),
    (entry_of([-1, -1], [0, 4]), r"has a damaged header: model\.x has the shape \[-1, -1\]"),
    (entry_of([1], [4, 0], "I8"), r"has a damaged header: model\.x has bytes 4 to 0"),
    (entry_of([1], [0]), r"has a damaged header: model\.x has 1 dimensions and 1 offsets"),
    (entry_of([1] * 65, [0, 4]), r"has a damaged header: model\.x has 65 dimensions"),
    (entry_of([1], [0, 4], 7), r"has a damaged header: model\.x has the dtype 7"),
    (index_of('{"weight_map": {"a": "../other/model.safetensors"}}'), r"names a file outside the checkpoint: '\.\./"),
    (index_of('{"weight_map": {"a": "/etc/passwd"}}'), r"names a file outside the checkpoint"),
    (index_of('{"weight_map": {"a": "..\\\\model.safetensors"}}'), r"names a file outside the checkpoint"),
    (index_of(json.dumps({"weight_map": {"a": "x" * 5000}})), r"shard x+ is missing"),
    (edit_generation(eos_token_id=300), r"generation_config\.json: eos_token_id is 300; repair the file, or download"),
    (edit_generation(eos_token_id=[0, -1]), r"generation_config\.json: eos_token_id is \[0, -1\]"),
    (edit_generation(eos_token_id="<|end|>"), r"generation_config\.json: eos_token_id is '<\|end\|>'"),
    (edit_generation(temperature="hot"), r"generation_config\.json: temperature is 'hot'"),
    (write("generation_config.json", "{"), r"generation_config\.json is not valid JSON"),
    (write("tokenizer_config.json", "[]"), r"tokenizer_config\.json does not hold a JSON object"),
    (write("tokenizer_config.json", '{"eos_token": 3}'), r"config\.json: eos_token is 3"),
    (write("tokenizer_config.json", '{"chat_template": 3}'), r"chat_template in tokenizer_config\.json is not text"),
    (write("chat_template.jinja", b"\xff"), r"chat_template\.jinja cannot be read: 'utf-8' codec"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED, ids=[message[:40] for _, message in DAMAGED])
def test_damaged_checkpoints_are_refused_in_one_line(tmp_path, damage: Damage, message: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    damage(source)
    with pytest.raises(CheckpointError, match=message) as caught:
        exported(source, tmp_path / "bundle", INT4)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_end_of_text_token_of_config_json_without_generation_config(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", eos_token_id=300)
    exported(source, tmp_path / "bundle")
    (source / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"/config\.json: eos_token_id is 300"):
        exported(source, tmp_path / "other")


def test_null_settings_have_default_values(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    edit_config(rms_norm_eps=None, rope_theta=None)(source)
    config = read_config(source)
    assert (config.norm_epsilon, config.attention[0].rope.base) == (1e-6, 10_000.0)


def test_a_vocabulary_may_be_larger_than_the_tokenizer_but_not_smaller(tmp_path) -> None:
    source, larger = (write_checkpoint(tmp_path / str(size), vocab_size=size) for size in (300, 320))
    tokenizers = [(folder / "tokenizer.json").read_bytes() for folder in (source, larger)]
    (larger / "tokenizer.json").write_bytes(tokenizers[0])
    assert export_checkpoint(larger, tmp_path / "bundle", ExportRecipe(FP32)).parity.top1_agreement == 1.0
    (source / "tokenizer.json").write_bytes(tokenizers[1])
    with pytest.raises(CheckpointError, match=r"token ids up to 319, but the model's vocabulary has 300"):
        exported(source, tmp_path / "other")


INVALID_FAMILY_SETTINGS = [
    ("qwen2", {"use_sliding_window": True, "max_window_layers": "x"}, r"max_window_layers must be .* 0, found 'x'"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": [2]}, r"max_window_layers must be .* 0, found \[2\]"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 2}, r"sliding_window must be a positive integer, found None"),
    ("qwen3_moe", {"num_experts": 10**6}, r"num_experts must be a positive integer, at most 10000, found 1000000"),
    ("qwen3_moe", {"num_experts_per_tok": 6}, r"num_experts_per_tok must be .*, at most 5, found 6"),
    ("qwen3_moe", {"mlp_only_layers": 1}, r"mlp_only_layers must be a list, found 1"),
    ("qwen3_moe", {"moe_intermediate_size": None}, r"moe_intermediate_size must be .*, found None"),
    ("gpt_oss", {"swiglu_limit": 0}, r"swiglu_limit must be a positive number, found 0"),
    ("gpt_oss", {"num_local_experts": None}, r"num_local_experts must be a positive integer, found None"),
    ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, r"already quantized \(gptq\); export the original"),
    ("mistral", {"sliding_window": 0}, r"sliding_window must be a positive integer, found 0"),
    ("gemma2", {"sliding_window_pattern": 0}, r"sliding_window_pattern must be a positive integer, found 0"),
    ("gemma2", {"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar must be a positive number, found 0"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, r"attn_logit_softcapping must be a positive number, found -1\.0"),
    ("gemma2", {"final_logit_softcapping": "30"}, r"final_logit_softcapping must be a number, at most .*, found '30'"),
    ("gemma2", {"hidden_activation": "relu"}, r"hidden_activation 'relu' is not supported; supported are silu, gelu"),
    ("gemma3_text", {"rope_local_base_freq": "ten"}, r"rope_local_base_freq must be a number, .* found 'ten'"),
    (
        "gemma3_text",
        {"rope_parameters": {"full_attention": 1e6, "sliding_attention": {}}},
        r"rotary settings of full_attention must be an object, found 1000000\.0",
    ),
    ("gemma3_text", {"model_type": "gemma3"}, r"text_config must be an object, found None"),
    ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers must have 3 entries, found 2"),
    ("smollm3", {"no_rope_layers": [1, 0, "yes"]}, r"no_rope_layers must hold zeros and ones, found \[1, 0, 'yes'\]"),
    (
        "granite",
        {"embedding_multiplier": None, "logits_scaling": 0},
        r"logits_scaling must be a positive number, found",
    ),
    ("phi3", {"partial_rotary_factor": 0.1}, r"partial_rotary_factor 0\.1 rotates 3 of 32 channels; supported is an"),
    ("phi3", {"partial_rotary_factor": 2.0}, r"partial_rotary_factor 2\.0 rotates 64 of 32 channels"),
    ("phi3", {"partial_rotary_factor": "half"}, r"partial_rotary_factor must be a number, .* found 'half'"),
    ("phi3", {"rope_scaling": {"type": "longrope"}}, r"short_factor must be a list, found None"),
    ("phi3", {"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, r"long_factor must have 8 entries, found 1"),
    ("phi3", {"rope_scaling": {**LONGROPE, "long_factor": [0] * 8}}, r"long_factor must be a positive number, found 0"),
    (
        "phi3",
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1},
        r"original_max_position_embeddings must be an integer of at least 2, found 1",
    ),
]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    INVALID_FAMILY_SETTINGS,
    ids=[message[:40] for *_, message in INVALID_FAMILY_SETTINGS],
)
def test_invalid_settings_of_a_family_are_refused_in_one_line(tmp_path, family: str, changes, message: str) -> None:
    write_json(tmp_path / "config.json", {**tiny_config(family), **changes})
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_window_that_no_layer_uses_is_ignored(tmp_path) -> None:
    read_config(write_checkpoint(tmp_path, "qwen2", use_sliding_window=True, max_window_layers=2))
