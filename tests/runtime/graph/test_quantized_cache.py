"""A quantized KV cache holds the rounded slots of a float cache, whatever wrote them, and costs little quality."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgerun
from edgerun import BundleError, DeviceError
from edgerun.models.bundle import Bundle, open_bundle
from edgerun.models.manifest import DeviceKind
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph import packed_files
from edgerun.runtime.graph.attention_edits import Rotation
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.open_graph import open_graph
from edgerun.runtime.graph.quantized_cache import envelope, key_rotations
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.kv.cache_scales import CacheScales, KVFormat
from edgerun.runtime.measure.cache_calibration import (
    CACHE_SCALES,
    calibrated_scales,
    with_quantized_kv,
)
from edgerun.runtime.measure.logit_quality import measure_quality
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.tree import Source, Tree
from support.shared_data import data_path
from support.tiny_models import HYBRID_FAMILIES

CPU = SessionConfig(choose_device("cpu"), 1)
TEXT = list(range(20, 60)) + list(range(100, 40, -3))


def bound_to(bundle: Path, scales: CacheScales | None = None) -> BoundSession:
    session = GraphSession(bundle / "model.onnx", replace(CPU, kv_scales=scales))
    return session.bind(session.arena(128))


def scales_of(bundle: Path, texts: Sequence[Sequence[int]] = (TEXT,)) -> CacheScales:
    pairs = key_rotations(bundle / "model.onnx")
    return calibrated_scales(bound_to(bundle), pairs, [np.array(text) for text in texts])


def written(bound: BoundSession, tokens: Sequence[int], widths: Sequence[int]) -> list[np.ndarray]:
    """The cache tensors `[kv_heads, slots, head_dim]` after passes of these widths, taken in turn."""
    bound.arena.rewind_to(0)
    number = 0
    while bound.arena.length < len(tokens):
        part = tokens[bound.arena.length : bound.arena.length + widths[number % len(widths)]]
        bound.forward(part)
        bound.arena.commit(len(part))
        number += 1
    return [tensor[0, :, : len(tokens)].copy() for tensor in bound.arena.buffers.arrays]


@pytest.fixture(scope="module", params=[KVFormat.INT8, KVFormat.INT4])
def scales(request: pytest.FixtureRequest, tiny_bundle: Path) -> CacheScales:
    return scales_of(tiny_bundle).of_format(request.param)


def codes_in(bound: BoundSession, *arguments: Sequence[int]) -> list[np.ndarray]:
    """What `written` returns of a quantized cache, as codes: two of 4 bits in a byte, the low half first."""
    found = written(bound, *arguments)
    if found[0].dtype == np.int8:
        return [each.astype(int) for each in found]
    halves = [np.stack([each % 16, each // 16], axis=-1).astype(int) - 8 for each in found]
    return [each.reshape(*each.shape[:-2], -1) for each in halves]


def test_the_operator_stores_rounded_multiples_of_the_scales(tiny_bundle: Path, scales: CacheScales) -> None:
    bound, quantized = bound_to(tiny_bundle), bound_to(tiny_bundle, scales)
    values, codes = written(bound, TEXT, [64]), written(quantized, TEXT, [64])
    assert {code.dtype for code in codes} == {scales.kv.dtype}
    assert {8 * code[0, 0].nbytes // value[0, 0].size for code, value in zip(codes, values, strict=True)} == {
        scales.kv.bits
    }
    whole = codes_in(quantized, TEXT, [64])
    # The first layer has the same inputs with both caches.
    names = [tensor.past for tensor in bound.graph_io.cache]
    for index in (index for index, name in enumerate(names) if ".0." in name):
        reach = 2 ** (scales.kv.bits - 1) - 1
        plain = np.clip(np.rint(values[index] / scales.tensors[names[index]][:, None]), -reach - 1, reach)
        np.testing.assert_array_equal(whole[index], plain)
        assert np.abs(plain).max() > 0.7 * reach


def test_values_out_of_range_saturate(tiny_bundle: Path, scales: CacheScales) -> None:
    small = CacheScales({name: values / 1000 for name, values in scales.tensors.items()}, scales.kv)
    values, codes = written(bound_to(tiny_bundle), TEXT, [64]), codes_in(bound_to(tiny_bundle, small), TEXT, [7])
    reach = 2 ** (scales.kv.bits - 1)
    names = [tensor.past for tensor in bound_to(tiny_bundle).graph_io.cache]
    for index in (index for index, name in enumerate(names) if ".0." in name):
        far = np.abs(values[index]) > reach * small.tensors[names[index]][:, None]
        assert far.mean() > 0.9
        np.testing.assert_array_equal(codes[index][far], np.where(values[index][far] > 0, reach - 1, -reach))


def test_passes_of_every_width_write_the_same_slots(tiny_bundle: Path, scales: CacheScales) -> None:
    bound = bound_to(tiny_bundle, scales)
    one_by_one = codes_in(bound, TEXT, [1])
    for widths in ([len(TEXT)], [2], [3, 8, 1, 5], [16]):
        differences = [
            np.abs(found - expected) for found, expected in zip(codes_in(bound, TEXT, widths), one_by_one, strict=True)
        ]
        # Another order of summation may move a value across the boundary between two codes.
        assert max(each.max() for each in differences) <= 1
        assert np.mean([(each > 0).mean() for each in differences]) < 1e-3


def test_an_accepted_tree_path_leaves_the_slots_of_sequential_decoding(tiny_bundle: Path, scales: CacheScales) -> None:
    bound = bound_to(tiny_bundle, scales)
    text = TEXT[:13]
    expected = written(bound, text, [1])
    written(bound, text[:9], [3])
    # The path 0, 2, 3, 6 of the tree is the rest of the text.
    tokens = [text[9], 200, text[10], text[11], 201, 202, text[12]]
    tree = Tree(tokens, [-1, 0, 0, 2, 2, 3, 3], [1.0] * 7, [Source.OTHER] * 7)
    bound.forward(tokens, positions=9 + tree.depths, tree_mask=tree.mask)
    bound.arena.compact(9, [0, 2, 3, 6])
    for found, each in zip(bound.arena.buffers.arrays, expected, strict=True):
        # Another order of summation may move a value across the boundary between two codes.
        assert np.mean(found[0, :, :13] != each) < 1e-3


@pytest.mark.parametrize("kv", [KVFormat.INT8, KVFormat.INT4])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma2", "gpt_oss", "smollm3", *HYBRID_FAMILIES])
def test_logits_differ_little_from_those_with_a_float_cache(
    family: str, kv: KVFormat, tiny_bundle_of: Callable[[str, str], Path]
) -> None:
    bundle = tiny_bundle_of(family, "fp32")
    bound = bound_to(bundle, scales_of(bundle, [TEXT]).of_format(kv))
    assert {each.dtype for each in bound.graph_io.tensor_types} == {kv.dtype}
    assert {each.dtype for each in bound.graph_io.state_types} <= {np.dtype(np.float32)}
    quality = measure_quality(bound, bound_to(bundle), [TEXT, TEXT[::-1]])
    assert quality.positions == 2 * len(TEXT)
    largest, least = {KVFormat.INT8: (0.02, 0.9), KVFormat.INT4: (1.0, 0.4)}[kv]
    assert 0 < quality.mean_kl < largest
    assert quality.top1_agreement > least


def test_keys_stay_within_the_scales_at_every_position() -> None:
    random = np.random.default_rng(0)
    keys = random.standard_normal((2, 5, 10)).astype(np.float32)
    angles = random.uniform(0, 7, (200, 1, 1, 4))
    for interleaved, first, second in ((False, slice(0, 4), slice(4, 8)), (True, slice(0, 8, 2), slice(1, 8, 2))):
        largest = envelope(keys, Rotation((), 8, interleaved))
        turned = np.broadcast_to(keys, (200, *keys.shape)).copy()
        before = turned[..., first].copy(), turned[..., second].copy()
        turned[..., first] = before[0] * np.cos(angles) - before[1] * np.sin(angles)
        turned[..., second] = before[1] * np.cos(angles) + before[0] * np.sin(angles)
        reached = np.abs(turned).max(axis=(0, 2))
        assert (reached <= largest + 1e-5).all()
        assert (reached[:, :8] > 0.95 * largest[:, :8]).all()
        np.testing.assert_array_equal(largest[:, 8:], np.abs(keys[..., 8:]).max(axis=1))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {16}),
        ("phi3", {16}),
        ("qwen3_5_text", {16}),  # half of the channels of a head
        ("granitemoehybrid", {0}),
        ("qwen3", {32}),
        ("smollm3", {16, 0}),
    ],
)
def test_rotated_channels_are_read_from_the_graph(
    family: str, expected: set[int], tiny_bundle_of: Callable[[str, str], Path]
) -> None:
    rotations = key_rotations(tiny_bundle_of(family, "fp32") / "model.onnx").values()
    assert {0 if each is None else each.channels for each in rotations} == expected


@given(st.integers(0, 2**32 - 1))
def test_scales_survive_json(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.standard_exponential((2, 3)).astype(np.float32) * random.integers(0, 2, (2, 3), dtype=np.int64)
    scales = CacheScales.of_largest({"past": sizes.astype(np.float32)})
    again = CacheScales.from_json(scales.to_json())
    np.testing.assert_array_equal(again.tensors["past"], scales.tensors["past"])
    assert (scales.tensors["past"] > 0).all()
    assert (sizes <= scales.tensors["past"] * 127.001).all()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"scales": {}},
        {"scales": {"a": []}},
        {"scales": {"a": [[1.0], [1.0, 2.0]]}},
        {"scales": {"a": [[0.0]]}},
        {"scales": {"a": [[1e39]]}},
        {"scales": {"a": [["1"]]}},
    ],
)
def test_damaged_scales_are_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="scales"):
        CacheScales.from_json(data)


@pytest.mark.parametrize(("kv", "share"), [("int8", 4), ("int4", 8)])
def test_scales_are_measured_once(tiny_bundle: Path, cache: Path, kv: str, share: int) -> None:
    stages: list[str] = []
    texts = []
    for _ in range(2):
        with edgerun.load(tiny_bundle, kv=kv, progress=lambda stage, _: stages.append(stage)) as engine:
            assert engine.graph_io.cache_bytes_per_token * share == bound_to(tiny_bundle).graph_io.cache_bytes_per_token
            texts.append(engine.generate("the other", max_tokens=20, speculation=Speculation.OFF).text)
    assert texts[0] == texts[1]
    assert stages.count("measuring the scales of the KV cache") > 1
    assert len(list((cache / CACHE_SCALES.kind).iterdir())) == 1
    stages.clear()
    # Both formats have one measurement.
    with edgerun.load(
        tiny_bundle, kv="int8" if kv == "int4" else "int4", progress=lambda stage, _: stages.append(stage)
    ):
        assert "measuring the scales of the KV cache" not in stages


def test_prepacked_weights_are_used_with_an_int8_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tiny_bundle_of: Callable[[str, str], Path]
) -> None:
    monkeypatch.setattr(packed_files, "_MIN_WEIGHT_BYTES", 0)
    bundle = open_bundle(tiny_bundle_of("llama", "int4"))
    config = with_quantized_kv(bundle, CPU, KVFormat.INT8, None, cache=False)
    logits = []
    for packed in (False, True):
        session = open_graph(bundle, config, cache=packed)
        logits.append(session.bind(session.arena(64)).forward(TEXT).copy())
    assert (cache / "prepacked").is_dir()
    np.testing.assert_array_equal(*logits)


def test_graphs_and_devices_without_such_a_cache_are_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    gpu = SessionConfig(replace(CPU.device, provider="WebGpuExecutionProvider", kind=DeviceKind.GPU))
    with pytest.raises(DeviceError, match="an int8 KV cache works on the CPU alone, not on WebGpu"):
        with_quantized_kv(open_bundle(tiny_bundle), gpu, KVFormat.INT8, None, cache=False)
    with pytest.raises(BundleError, match=r"scales of the quantized KV cache lack past_key_values\.0\.key"):
        bound_to(tiny_bundle, CacheScales({"other": np.ones((1, 1), np.float32)}))


def test_a_model_without_the_operator_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(data_path("onnx/tiny-random-gpt2-fp32"), tmp_path / "gpt2")
    graph = next(folder.glob("*.onnx"))
    with pytest.raises(BundleError, match="has no GroupQueryAttention, which a quantized KV cache needs"):
        with_quantized_kv(Bundle(folder, graph, None), CPU, KVFormat.INT8, 64, cache=False)
