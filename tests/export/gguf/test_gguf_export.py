"""A GGUF file exports to the same bundle as the checkpoint it was converted from, for every tensor type."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from edgerun.edge.cli.main import main
from edgerun.errors import CheckpointError
from edgerun.export import FP32, INT4, INT8, ExportRecipe, WeightFormat, export_checkpoint
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.json_fields import read_json
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.checkpoint.source import RowRange
from edgerun.export.gguf.gguf_model import open_gguf
from edgerun.export.quantization.codes import dequantized, nearest_rows
from edgerun.models.bundle import open_bundle
from support.gguf_files import NAMES, gguf_name, permuted, random_blocks, write_gguf
from support.tiny_models import LLAMA3, YARN, exported, require_same_files, write_checkpoint, write_weights

STORED = ExportRecipe()
"""Keeps the formats of the file."""
FAMILIES = ["llama", "qwen2", "qwen3"]
EXACT = {"Q4_0": INT4, "Q5_0": INT8, "Q8_0": INT8}
OFFSETS = WeightFormat(4, 32, offsets=True)
OTHER = {"Q4_1": OFFSETS, "Q5_1": INT8}
K_QUANTS = {"Q4_K": OFFSETS, "Q5_K": INT8, "Q6_K": INT8}
WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
"""K-quants have blocks of 256, which must divide the rows."""


def restored(name: str, stored: np.ndarray, config) -> np.ndarray:
    """Undo llama.cpp's row order."""
    order = permuted(name, np.arange(len(stored)), config)
    back = np.empty_like(stored)
    back[order] = stored
    return back


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float_weights_export_byte_for_byte_like_the_checkpoint(tmp_path, family: str, kind: str) -> None:
    dtype = np.float16 if kind == "F16" else np.float32
    source = write_checkpoint(tmp_path / "checkpoint", family, dtype=dtype, tie_word_embeddings=kind == "F32")
    if kind == "BF16":  # exactly representable: the upper halves
        tensors = {name: Checkpoint(source).read(name) for name in Checkpoint(source)._tensors}
        write_weights(source, {n: (v.view(np.uint32) & 0xFFFF0000).view(np.float32) for n, v in tensors.items()})
    file = write_gguf(tmp_path / "model.gguf", source, kind)
    expected = exported(source, tmp_path / "expected")
    bundle = exported(file, tmp_path / "bundle", STORED)
    require_same_files(bundle, expected)
    assert open_bundle(bundle).manifest.architecture == open_bundle(expected).manifest.architecture
    assert {path.name for path in bundle.iterdir()} >= {"tokenizer.json", "config.json", "chat_template.jinja"}


@pytest.mark.parametrize(
    ("overrides", "scaling"),
    [
        ({"attention_bias": True, "mlp_bias": True}, {}),
        ({"num_key_value_heads": 4}, {}),
        ({"head_dim": 24, "rms_norm_eps": 0.3, "rope_theta": 500000.0}, {}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {"type": "linear", "factor": 4.0}),
        ({"rope_scaling": YARN}, {"type": "yarn", "factor": 4.0, "original_context_length": 64}),
    ],
    ids=str,
)
def test_llama_variants_export_like_the_checkpoint(tmp_path, overrides, scaling) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", **overrides)
    metadata = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    file = write_gguf(tmp_path / "model.gguf", source, also=metadata)
    require_same_files(*(exported(each, tmp_path / f"{each.stem}-bundle", INT8) for each in (source, file)))


@pytest.mark.parametrize("kind", EXACT)
def test_codes_are_taken_over_exactly(tmp_path, kind: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=False)
    config = read_json(source / "config.json")
    weight_format = EXACT[kind]
    with open_gguf(write_gguf(tmp_path / "model.gguf", source, kind)) as model:
        for name in ("model.embed_tokens", "model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.k_proj"):
            whole = Checkpoint(source).read(f"{name}.weight")
            number = GGMLQuantizationType[kind]
            stored = gguf.quants.quantize(permuted(f"{name}.weight", whole, config), number)
            expected = restored(f"{name}.weight", gguf.quants.dequantize(stored, number), config)
            assert model.stored_format(f"{name}.weight") == weight_format
            rows = RowRange(f"{name}.weight", 5, len(whole) - 3)  # across heads
            np.testing.assert_array_equal(model.read_rows(rows), expected[5:-3])
            for wider in {weight_format, INT8}:
                quantized = model.quantized(rows, wider)
                assert quantized.offsets is None
                assert quantized.zero_points is None
                np.testing.assert_array_equal(dequantized(quantized, 64, wider), expected[5:-3])


@pytest.mark.parametrize("kind", [*EXACT, *OTHER, *K_QUANTS])
def test_every_tensor_type_exports_its_decoded_weights(tmp_path, kind: str) -> None:
    """Float32 exports equal those of a checkpoint with the decoded weights; the nearest format stays close to them."""
    source = write_checkpoint(tmp_path / "checkpoint", **WHOLE_BLOCKS)
    config, number = read_json(source / "config.json"), GGMLQuantizationType[kind]
    tensors = {name: Checkpoint(source).read(name) for name in Checkpoint(source)._tensors}
    matrices = [name for name, value in tensors.items() if value.ndim == 2]
    raw = {}
    for seed, name in enumerate(matrices):
        whole = permuted(name, tensors[name], config)
        if kind in K_QUANTS:
            raw[gguf_name(name)] = random_blocks(kind, *whole.shape, float(whole.std()), seed)
        else:
            raw[gguf_name(name)] = gguf.quants.quantize(whole, number)
        tensors[name] = restored(name, gguf.quants.dequantize(raw[gguf_name(name)], number), config)
    write_weights(source, tensors)
    file = write_gguf(tmp_path / "model.gguf", source, kind, raw=raw)
    require_same_files(exported(file, tmp_path / "plain"), exported(source, tmp_path / "expected"))
    report = export_checkpoint(file, tmp_path / "bundle", STORED)
    weight_format = {**EXACT, **OTHER, **K_QUANTS}[kind]
    weights = open_bundle(report.bundle).manifest.weights
    assert {found for linear, found in weights.items() if linear.startswith("layers")} == {weight_format}
    assert weights["embedding"] == weights["head"] == (INT8 if weight_format == OFFSETS else weight_format)
    # The remaining error comes from 8-bit activations and from 8-bit offsets or weights.
    assert report.parity.mean_kl < 0.05


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_minima_become_offsets(tmp_path, kind: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "qwen2", **WHOLE_BLOCKS)
    number = GGMLQuantizationType[kind]
    whole = Checkpoint(source).read("model.layers.0.mlp.up_proj.weight")
    raw = random_blocks(kind, 256, 256, 0.1) if kind in K_QUANTS else gguf.quants.quantize(whole, number)
    name = "blk.0.ffn_up.weight"
    rows = RowRange("model.layers.0.mlp.up_proj.weight", 3, 250)
    with open_gguf(write_gguf(tmp_path / "model.gguf", source, {name: kind}, raw={name: raw})) as model:
        exact, quantized = model.read_rows(rows), model.quantized(rows, OFFSETS)
    ours = dequantized(quantized._replace(offsets=None), 256, OFFSETS) + np.repeat(quantized.offsets, 32, axis=1)
    np.testing.assert_allclose(ours, exact, atol=1e-6 * np.abs(exact).max())
    stored = dequantized(quantized, 256, OFFSETS)
    assert np.square(stored - exact).sum() < 1e-4 * np.square(exact).sum()


def test_types_with_and_without_minima_share_a_fused_linear(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "qwen2", num_hidden_layers=1)
    kinds = {"blk.0.attn_q.weight": "Q4_0", "blk.0.attn_k.weight": "Q4_1", "blk.0.attn_v.weight": "Q4_0"}
    report = export_checkpoint(write_gguf(tmp_path / "model.gguf", source, kinds), tmp_path / "bundle", STORED)
    assert open_bundle(report.bundle).manifest.weights["layers.0.qkv"] == OFFSETS
    assert report.parity.mean_kl < 0.02


def test_requantizing_to_four_bits_beats_round_to_nearest(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", **WHOLE_BLOCKS)
    raw = {"blk.0.ffn_up.weight": random_blocks("Q4_K", 256, 256, 0.1)}
    file = write_gguf(tmp_path / "model.gguf", source, {"blk.0.ffn_up.weight": "Q4_K"}, raw=raw)
    rows = RowRange("model.layers.0.mlp.up_proj.weight", 0, 256)
    with open_gguf(file) as model:
        exact = model.read_rows(rows)
        for weight_format in (INT4, WeightFormat(4, 128)):
            ours = dequantized(model.quantized(rows, weight_format), 256, weight_format) - exact
            plain = dequantized(nearest_rows(exact, weight_format), 256, weight_format) - exact
            assert np.square(ours).sum() < 0.95 * np.square(plain).sum()
            assert np.square(ours).sum() < 0.02 * np.square(exact).sum()


def test_fused_linears_take_the_widest_format_of_their_matrices(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=2, tie_word_embeddings=False)
    kinds = {f"blk.{layer}.{name}.weight": "Q4_0" for layer in range(2) for name in NAMES.values()}
    kinds |= {"blk.1.attn_v.weight": "Q8_0", "blk.1.ffn_up.weight": "F16", "token_embd.weight": "Q5_0"}
    bundle = exported(write_gguf(tmp_path / "model.gguf", source, kinds), tmp_path / "bundle", STORED)
    assert open_bundle(bundle).manifest.weights == {
        "embedding": INT8,
        "layers.0.qkv": INT4,
        "layers.0.o": INT4,
        "layers.0.gate_up": INT4,
        "layers.0.down": INT4,
        "layers.1.qkv": INT8,
        "layers.1.o": INT4,
        "layers.1.gate_up": FP32,
        "layers.1.down": INT4,
        "head": FP32,
    }


def test_requested_formats_override_those_of_the_file(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    file = write_gguf(tmp_path / "model.gguf", source, "Q8_0")
    recipe = ExportRecipe(WeightFormat(4, 64), head=INT8)
    weights = open_bundle(exported(file, tmp_path / "bundle", recipe)).manifest.weights
    assert weights["head"] == weights["embedding"] == INT8
    assert weights["layers.0.qkv"] == WeightFormat(4, 64)
    head = open_bundle(export_checkpoint(file, tmp_path / "other", ExportRecipe(None, head=FP32)).bundle)
    assert head.manifest.weights["head"] == FP32
    assert head.manifest.weights["layers.0.qkv"] == INT8


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_split_model_exports_like_a_single_file(tmp_path, kind: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    whole = exported(write_gguf(tmp_path / "one.gguf", source, kind), tmp_path / "whole", STORED)
    first = write_gguf(tmp_path / "many.gguf", source, kind, parts=3)
    require_same_files(exported(first, tmp_path / "bundle", STORED), whole)
    second = first.with_name("many-00002-of-00003.gguf")
    with pytest.raises(CheckpointError, match="is one of 3 parts; give the first one, named NAME-00001-of-0000N.gguf"):
        exported(second, tmp_path / "bundle", STORED)
    third = first.with_name("many-00003-of-00003.gguf")
    third.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match="many-00003-of-00003.gguf is not part 3 of many-00001-of-00003.gguf"):
        exported(first, tmp_path / "bundle", STORED)
    third.unlink()
    with pytest.raises(CheckpointError, match="many-00003-of-00003.gguf is missing"):
        exported(first, tmp_path / "bundle", STORED)


def llama3_divisors(base: float, dim: int, scaling) -> np.ndarray:
    """Frequency divisors as llama.cpp's converter computes them."""
    divisors, original = [], scaling["original_max_position_embeddings"]
    for frequency in 1.0 / base ** (np.arange(0, dim, 2, dtype=np.float32) / dim):
        wavelength, low, high = 2 * np.pi / frequency, scaling["low_freq_factor"], scaling["high_freq_factor"]
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(scaling["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    "numbers",
    [
        {"original_max_position_embeddings": 8192},
        {"factor": 32.0, "original_max_position_embeddings": 8192},
        {"original_max_position_embeddings": 64, "low_freq_factor": 0.5, "high_freq_factor": 3.0},
    ],
    ids=["llama-3.1", "llama-3.2", "other numbers"],
)
def test_frequency_divisors_rotate_like_llama3_scaling(tmp_path, numbers) -> None:
    scaling = {**LLAMA3, **numbers}
    overrides = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_theta": 500000.0}
    source = write_checkpoint(tmp_path / "checkpoint", rope_scaling=scaling, **overrides)
    divisors = llama3_divisors(500000.0, 64, scaling)
    file = write_gguf(tmp_path / "model.gguf", source, tensors={"rope_freqs.weight": divisors})
    with open_gguf(file) as model:
        read, expected = (read_config(each) for each in (model.folder, source))
    frequencies = (each.attention[0].rope.frequencies(64, 256) for each in (read, expected))
    np.testing.assert_allclose(*frequencies, rtol=1e-6)
    assert (read.default_positions, read.attention[0].rope.attention_factor) == (expected.default_positions, 1.0)


@pytest.mark.parametrize(
    ("divisors", "also", "message"),
    [
        (np.full(7, 2.0), {}, "rope_freqs.weight does not hold 8 positive divisors"),
        (np.full(8, 0.0), {}, "rope_freqs.weight does not hold 8 positive divisors"),
        (
            np.full(8, 2.0),
            {"llama.rope.scaling.type": "yarn"},
            "has both rope_freqs.weight and llama.rope.scaling.type",
        ),
        (np.ones(8), {"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' with factor None"),
        (np.ones(8), {"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8, but a head has 16 channels"),
    ],
)
def test_unsupported_rope_scalings_are_refused(tmp_path, divisors, also, message: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    tensors = {"rope_freqs.weight": divisors.astype(np.float32)}
    file = write_gguf(tmp_path / "model.gguf", source, also=also, tensors=tensors)
    with pytest.raises(CheckpointError, match=message), open_gguf(file):
        pass


def test_settings_equal_those_of_the_checkpoint(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", rms_norm_eps=1e-5)
    with open_gguf(write_gguf(tmp_path / "model.gguf", source, "Q8_0")) as model:
        names = ("config", "generation_config", "tokenizer_config")
        settings, generation, tokenizer = (read_json(model.folder / f"{name}.json") for name in names)
        template = (model.folder / "chat_template.jinja").read_text(encoding="utf-8")
    expected, original = (read_json(source / f"{name}.json") for name in ("config", "tokenizer_config"))
    shared = {name for name, value in expected.items() if value is not None}
    assert {name: settings[name] for name in shared} == {name: expected[name] for name in shared}
    assert generation == {"eos_token_id": 0, "pad_token_id": 0}
    assert template == original["chat_template"]
    assert all(tokenizer[name] == original[name] for name in ("eos_token", "pad_token", "unk_token"))
    assert tokenizer["add_bos_token"] is False


def test_the_command_keeps_the_formats_of_a_file(tmp_path, capsys) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    file = write_gguf(tmp_path / "model.gguf", source, "Q4_0")
    assert main(["export", str(file), str(tmp_path / "bundle")]) == 0
    assert "bits per weight" in capsys.readouterr().out
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert set(manifest.weights.values()) == {INT4}
    assert manifest.command == "edge-run export model.gguf bundle"
    assert main(["export", str(file), str(tmp_path / "int8"), "--weights", "int8"]) == 0
    assert set(open_bundle(tmp_path / "int8").manifest.weights.values()) == {INT8}
    assert main(["export", str(file), str(tmp_path / "no"), "--block", "64"]) == 2
    assert "--block 64 has no effect without --weights or --head" in capsys.readouterr().err
    assert main(["export", str(file), str(tmp_path / "no"), "--zero-points"]) == 2
    assert "--zero-points is not supported for a GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_the_error_names_a_missing_package(tmp_path, monkeypatch, capsys) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    file = write_gguf(tmp_path / "model.gguf", source)
    monkeypatch.setitem(__import__("sys").modules, "gguf.quants", None)
    assert main(["export", str(file), str(tmp_path / "bundle")]) == 2
    assert 'pip install "edge-run[gguf]"' in capsys.readouterr().err


def test_running_a_gguf_file_suggests_exporting_it(tmp_path, capsys) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert main([str(tmp_path / "model.gguf"), "-p", "hello"]) == 2
    assert "is not an .onnx file; edge-run export model.gguf OUT makes a model folder of it" in capsys.readouterr().err
