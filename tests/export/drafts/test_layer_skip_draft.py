"""Layer-skip drafts: their graph, their agreement, and the skipped sub-layers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun import InputError
from edgerun.export import INT4
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.check.contract_session import ContractSession
from edgerun.export.drafts.head_size import TARGET_WIDTHS, tokens_per_second
from edgerun.export.drafts.layer_skip_draft import adopt_layer_skip_draft, search_skips, step_seconds
from edgerun.export.drafts.skipped_layers import (
    SkipAgreement,
    SubLayer,
    SubLayerKind,
    external_bytes,
    inner_sub_layers,
    without,
)
from edgerun.export.recipe import DraftTokens
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import Architecture
from edgerun.models.progress import silent
from edgerun.runtime.measure.bundle_timing import BundleTimer
from edgerun.runtime.text.turn_markers import TokenArray
from support.tiny_models import exported, tiny_config, tiny_weights, write_bundle, write_checkpoint, write_weights

SKIPPED = (
    SubLayer(1, SubLayerKind.FEED_FORWARD),
    SubLayer(2, SubLayerKind.ATTENTION),
    SubLayer(2, SubLayerKind.FEED_FORWARD),
)
TARGET = {width: 0.01 * (1 + 0.1 * (width - 1)) for width in TARGET_WIDTHS}


def texts(count: int = 4, length: int = 40, seed: int = 0) -> list[TokenArray]:
    random = np.random.default_rng(seed)
    return [random.integers(5, 300, length + number) for number in range(count)]


TEXT = CalibrationText(tuple(texts()), tuple(texts()), "random")


def architecture(bundle: Path) -> Architecture:
    manifest = open_bundle(bundle).manifest
    return manifest.architecture


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3_text", "olmo2", "qwen3_moe", "granite"])
def test_a_skipped_sub_layer_is_one_without_output(family: str, tmp_path: Path) -> None:
    """A checkpoint with zero matrices at the end of these sub-layers computes the same."""
    layers = 4
    bundle = write_bundle(tmp_path / "whole", family, num_hidden_layers=layers)
    config = tiny_config(family, num_hidden_layers=layers)
    weights = tiny_weights(config)
    ends = {SubLayerKind.ATTENTION: (".self_attn.o_proj.",), SubLayerKind.FEED_FORWARD: (".down_proj.",)}
    for name, value in weights.items():
        if any(f"layers.{part.layer}." in name and end in name for part in SKIPPED for end in ends[part.kind]):
            value[...] = 0
    source = write_checkpoint(tmp_path / "zero", family, num_hidden_layers=layers)
    write_weights(source, weights)
    expected = exported(source, tmp_path / "bundle")
    tokens = texts(1, 12)[0]
    reference = ContractSession(expected, 12).forward(tokens, np.arange(12))
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    left = without(model, SKIPPED)
    assert not [tensor.name for tensor in left.graph.initializer if "layers.2.qkv" in tensor.name]
    assert external_bytes(left) < external_bytes(model)
    names = {value.name for value in left.graph.input}
    assert "past_key_values.1.key" in names
    assert "past_key_values.2.key" not in names
    session = ContractSession(bundle, 12, left)
    session.buffers = [each for each in session.buffers if each[0] in names]
    np.testing.assert_allclose(session.forward(tokens, np.arange(12)), reference, atol=1e-4)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("measured"), weights=INT4, num_hidden_layers=5)


def test_a_choice_is_measured_after_slots_of_the_target(bundle: Path) -> None:
    given_texts, starts = texts(), [1, 0, 30, 5]
    numbers = architecture(bundle)
    measured = SkipAgreement(bundle, numbers, given_texts, starts, 1000)
    assert measured.agreement(()) == 1
    assert measured.sub_layers == inner_sub_layers(5)
    found = np.concatenate(list(measured.logits(SKIPPED)))
    model = without(onnx.load(bundle / "model.onnx", load_external_data=False), SKIPPED)
    names = {value.name for value in model.graph.input}
    at = 0
    for text, start in zip(given_texts, starts, strict=True):
        target = ContractSession(bundle, len(text))
        draft = ContractSession(bundle, len(text), model)
        draft.buffers = [each for each in target.buffers if each[0] in names]
        wanted = target.forward(text, np.arange(len(text))).argmax(axis=1)
        for place in range(max(start - 1, 1), len(text) - 1):
            assert measured.preferred[at] == wanted[place]
            kept = [buffer.copy() for _, _, buffer in target.buffers]
            draft.length = place
            logits = draft.forward(text[place : place + 1], np.zeros(1, np.int64))[0]
            for (_, _, buffer), rows in zip(target.buffers, kept, strict=True):
                buffer[...] = rows
            assert np.corrcoef(logits, found[at])[0, 1] > 0.99  # 8-bit activations
            at += 1
    assert at == measured.preferred.size
    assert 0 < measured.agreement(SKIPPED) < 1


class Toy:
    """An agreement that falls by a factor for each sub-layer, and a little more for one pair."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.parts = inner_sub_layers(2 + len(shares) // 2)
        self.shares = dict(zip(self.parts, shares, strict=True))
        self.saved = {part: 0.009 / len(self.parts) for part in self.parts}
        self.measured: list[frozenset[SubLayer]] = []

    def agreement(self, skipped: Collection[SubLayer]) -> float:
        self.measured.append(frozenset(skipped))
        pair = 0.97 if {self.parts[0], self.parts[1]} <= set(skipped) else 1.0
        return float(np.prod([self.shares[part] for part in skipped]) * pair)

    def search(self, **settings: float) -> frozenset[SubLayer]:
        return search_skips(self.agreement, TARGET, self.saved, **settings)

    def speed(self, skipped: Collection[SubLayer]) -> float:
        return tokens_per_second(self.agreement(skipped), step_seconds(TARGET, self.saved, skipped), TARGET)

    def best(self) -> float:
        counts = range(1, len(self.parts) + 1)
        return max(self.speed(each) for count in counts for each in itertools.combinations(self.parts, count))


@settings(max_examples=25)
@given(shares=st.lists(st.floats(0.3, 1.0), min_size=6, max_size=6), seed=st.integers(0, 9))
def test_the_search_comes_near_the_best_choice(shares: list[float], seed: int) -> None:
    toy = Toy(shares)
    found = toy.search(seed=seed)
    assert len(toy.measured) == len(set(toy.measured))
    assert toy.search(seed=seed) == found
    assert toy.speed(found) >= 0.97 * toy.best()


def test_a_search_without_time_measures_one_sub_layer() -> None:
    toy = Toy([0.9, 0.8, 0.99, 0.7])
    assert toy.search(deadline=0) == {toy.parts[0]}
    assert toy.measured == [{toy.parts[0]}]


def time_by_bytes(
    _: BundleTimer, bundles: Sequence[Path], rows: Sequence[int], rounds: int
) -> list[Mapping[int, float]]:
    """Times in proportion to the bytes of the weights; each further token takes a tenth more."""
    times = []
    for bundle in bundles:
        open_bundle(bundle)
        model = onnx.load(bundle / "model.onnx", load_external_data=False)
        size = external_bytes(model) + sum(len(tensor.raw_data) for tensor in model.graph.initializer)
        times.append({each: 1e-8 * size * (1 + 0.1 * (each - 1)) for each in rows})
    assert rounds > 0
    return times


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BundleTimer, "time_passes", time_by_bytes)


@pytest.mark.usefixtures("known_times")
@pytest.mark.parametrize("vocabulary", [None, 120, "auto"])
def test_a_draft_is_chosen_measured_and_added_to_the_bundle(vocabulary: DraftTokens, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, weights=INT4, num_hidden_layers=5)
    before = {path.name: path.read_bytes() for path in bundle.iterdir() if path.name != "edge.json"}
    held_out = texts(seed=2)
    text = CalibrationText(tuple(texts(seed=1)), tuple(held_out), "random")
    skips, tokens = adopt_layer_skip_draft(bundle, vocabulary, text, silent, max_seconds=20)
    after = {path.name: path.read_bytes() for path in bundle.iterdir() if path.name != "edge.json"}
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"draft.onnx"} | ({"d2t.npy"} if tokens < 300 else set())
    opened = open_bundle(bundle)
    assert opened.manifest.draft.skips == skips
    assert 0 < len(skips) <= 6
    if vocabulary != "auto":
        assert tokens == (vocabulary or 300)


@pytest.mark.usefixtures("known_times")
def test_models_without_a_layer_skip_draft_are_refused(tmp_path: Path) -> None:
    small = write_bundle(tmp_path / "small")
    with pytest.raises(InputError, match="2 layers has none to skip"):
        adopt_layer_skip_draft(small, None, TEXT, silent)
    fit = write_bundle(tmp_path / "fit", num_hidden_layers=4)
    with pytest.raises(InputError, match="no text"):
        adopt_layer_skip_draft(fit, None, CalibrationText((), TEXT.held_out, ""), silent)
    with pytest.raises(InputError, match="head cannot have 301 tokens"):
        adopt_layer_skip_draft(fit, 301, TEXT, silent)
    assert not (fit / "draft.onnx").exists()
    with pytest.raises(InputError, match="no answer"):
        SkipAgreement(fit, architecture(fit), texts(1, 5), [5], 10)
    with pytest.raises(ValueError, match=r"no layers\.9\.mlp_norm"):
        without(onnx.load(fit / "model.onnx", load_external_data=False), [SubLayer(9, SubLayerKind.ATTENTION)])
