"""The target without some parts: what its graph computes, how often it agrees, and what of it is chosen."""

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
from edgerun.export import FP32, INT4, ExportRecipe, ExportRequest, export_checkpoint
from edgerun.export.check.contract_session import ContractSession
from edgerun.export.drafts.head_size import TARGET_WIDTHS, speed
from edgerun.export.drafts.layer_skip_draft import adopt_layer_skip_draft
from edgerun.export.drafts.separate_draft import FASTEST_SIZE
from edgerun.export.drafts.skip_agreement import SkipAgreement
from edgerun.export.drafts.skip_search import SkipSearch, SubLayerTimes
from edgerun.export.drafts.skipped_layers import SubLayer, SubLayerKind, external_bytes, inner_sub_layers, without
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import Architecture, GraphLayout
from edgerun.models.pairing import find_draft
from edgerun.models.progress import silent
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession as RuntimeSession
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.measure.bundle_timing import BundleTimer
from edgerun.runtime.measure.draft_benefit import count_agreement
from edgerun.runtime.speculation.draft_loading import load_layer_skip_draft
from edgerun.runtime.text.turn_markers import TokenArray
from support.tiny_models import tiny_config, tiny_weights, write_bundle, write_checkpoint, write_weights

SKIPPED = (
    SubLayer(1, SubLayerKind.FEED_FORWARD),
    SubLayer(2, SubLayerKind.ATTENTION),
    SubLayer(2, SubLayerKind.FEED_FORWARD),
)
TARGET = {rows: 0.01 * (1 + 0.1 * (rows - 1)) for rows in TARGET_WIDTHS}


def texts(count: int = 4, length: int = 40, seed: int = 0) -> list[TokenArray]:
    random = np.random.default_rng(seed)
    return [random.integers(5, 300, length + number) for number in range(count)]


def architecture(bundle: Path) -> Architecture:
    manifest = open_bundle(bundle).manifest
    assert manifest is not None
    return manifest.architecture


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3_text", "olmo2", "qwen3_moe", "granite"])
def test_leaving_a_part_out_is_a_part_that_gives_nothing(family: str, tmp_path: Path) -> None:
    """A checkpoint whose matrices at the end of these parts are zero says the same."""
    layers = 4
    bundle = write_bundle(tmp_path / "whole", family, num_hidden_layers=layers)
    config = tiny_config(family, num_hidden_layers=layers)
    weights = tiny_weights(config)
    ends = {SubLayerKind.ATTENTION: (".self_attn.o_proj.",), SubLayerKind.FEED_FORWARD: (".down_proj.",)}
    for name, value in weights.items():
        if any(f"layers.{part.layer}." in name and end in name for part in SKIPPED for end in ends[part.part]):
            value[...] = 0
    source = write_checkpoint(tmp_path / "zero", family, num_hidden_layers=layers)
    write_weights(source, weights)
    expected = export_checkpoint(ExportRequest(source, tmp_path / "bundle", ExportRecipe(FP32))).bundle
    tokens = texts(1, 12)[0]
    reference = ContractSession(expected, architecture(expected), 12).forward(tokens, np.arange(12))
    left = without(onnx.load(bundle / "model.onnx", load_external_data=False), SKIPPED)
    names = {port.name for port in left.graph.input}
    assert "past_key_values.1.key" in names
    assert "past_key_values.2.key" not in names
    session = ContractSession(bundle, architecture(bundle), 12, left)
    session.buffers = [each for each in session.buffers if each[0] in names]
    np.testing.assert_allclose(session.forward(tokens, np.arange(12)), reference, atol=1e-4)


def test_what_is_left_out_is_not_in_the_graph(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, num_hidden_layers=4)
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    left = without(model, SKIPPED)
    assert len(left.graph.node) < len(model.graph.node)
    assert not {name for name in (tensor.name for tensor in left.graph.initializer) if "layers.2.qkv" in name}
    assert external_bytes(left) < external_bytes(model)
    with pytest.raises(ValueError, match=r"no layers\.9\.mlp_norm"):
        without(model, [SubLayer(9, SubLayerKind.ATTENTION)])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("judged"), weights=INT4, num_hidden_layers=5)


def test_a_choice_is_judged_behind_rows_of_the_target(bundle: Path) -> None:
    given_texts, starts = texts(), [1, 0, 30, 5]
    numbers = architecture(bundle)
    judge = SkipAgreement(bundle, numbers, given_texts, starts, 1000)
    assert judge.agreement(()) == 1
    assert judge.parts == inner_sub_layers(5)
    found = np.concatenate(list(judge.logits(SKIPPED)))
    model = without(onnx.load(bundle / "model.onnx", load_external_data=False), SKIPPED)
    names = {port.name for port in model.graph.input}
    at = 0
    for text, start in zip(given_texts, starts, strict=True):
        target = ContractSession(bundle, numbers, len(text))
        draft = ContractSession(bundle, numbers, len(text), model)
        draft.buffers = [each for each in target.buffers if each[0] in names]
        wanted = target.forward(text, np.arange(len(text))).argmax(axis=1)
        for place in range(max(start - 1, 1), len(text) - 1):
            assert judge.preferred[at] == wanted[place]
            kept = [buffer.copy() for _, _, buffer in target.buffers]
            draft.length = place
            logits = draft.forward(text[place : place + 1], np.zeros(1, np.int64))[0]
            for (_, _, buffer), rows in zip(target.buffers, kept, strict=True):
                buffer[...] = rows
            assert np.corrcoef(logits, found[at])[0, 1] > 0.99  # 8-bit activations
            at += 1
    assert at == judge.rows
    assert 0 < judge.agreement(SKIPPED) < 1


def test_there_has_to_be_something_to_guess(bundle: Path) -> None:
    with pytest.raises(InputError, match="no answer"):
        SkipAgreement(bundle, architecture(bundle), texts(1, 5), [5], 10)


class Toy:
    """Agreement that every part costs a share of, and two together a little more."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.parts = inner_sub_layers(2 + len(shares) // 2)
        self.shares = dict(zip(self.parts, shares, strict=True))
        self.asked: list[frozenset[SubLayer]] = []

    def agreement(self, skipped: Collection[SubLayer]) -> float:
        self.asked.append(frozenset(skipped))
        pair = 0.97 if {self.parts[0], self.parts[1]} <= set(skipped) else 1.0
        return float(np.prod([self.shares[part] for part in skipped]) * pair)

    def times(self) -> SubLayerTimes:
        return SubLayerTimes(TARGET, {part: 0.009 / len(self.parts) for part in self.parts})

    def best(self) -> float:
        choices = [c for n in range(1, len(self.parts) + 1) for c in itertools.combinations(self.parts, n)]
        return max(speed(self.agreement(c), self.times().step(c), TARGET) for c in choices)


@settings(max_examples=25)
@given(shares=st.lists(st.floats(0.3, 1.0), min_size=6, max_size=6), seed=st.integers(0, 9))
def test_the_search_comes_near_the_best_choice(shares: list[float], seed: int) -> None:
    toy = Toy(shares)
    search = SkipSearch(toy.agreement, toy.times(), seed=seed)
    found = search.best()
    assert len(toy.asked) == len(set(toy.asked)) == search.judged
    assert found.skipped
    assert found.speed == speed(toy.agreement(found.skipped), toy.times().step(found.skipped), TARGET)
    again = SkipSearch(toy.agreement, toy.times(), seed=seed).best()
    assert again == found
    assert found.speed >= 0.97 * toy.best()


def test_a_search_without_time_judges_the_parts_alone_and_no_more() -> None:
    toy = Toy([0.9, 0.8, 0.99, 0.7])
    found = SkipSearch(toy.agreement, toy.times(), deadline=0).best()
    assert found.skipped == {toy.parts[0]}
    assert toy.asked == [{toy.parts[0]}]


def time_by_bytes(
    _: BundleTimer, bundles: Sequence[Path], rows: Sequence[int], rounds: int
) -> list[Mapping[int, float]]:
    """Times in proportion to the bytes of the weights; a row more is a tenth more."""
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
@pytest.mark.parametrize("vocabulary", [None, 120, FASTEST_SIZE])
def test_a_draft_is_chosen_measured_and_put_into_the_bundle(vocabulary: int | None, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, weights=INT4, num_hidden_layers=5)
    before = {path.name: path.read_bytes() for path in bundle.iterdir() if path.name != "edge.json"}
    counted, held_out = texts(seed=1), texts(seed=2)
    report = adopt_layer_skip_draft(bundle, vocabulary, counted, held_out, silent, seconds=20)
    after = {path.name: path.read_bytes() for path in bundle.iterdir() if path.name != "edge.json"}
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"draft.onnx"} | ({"d2t.npy"} if report.tokens < 300 else set())
    opened = open_bundle(bundle)
    assert opened.manifest is not None
    assert opened.manifest.draft is not None
    assert opened.manifest.draft.skips == report.skips
    assert 0 < len(report.skips) <= report.parts == 6
    assert report.step_ms < report.target_ms
    assert report.pays == (report.tokens_per_second > report.plain_tokens_per_second)
    if vocabulary is None:
        assert report.tokens == 300
    elif vocabulary != FASTEST_SIZE:
        assert report.tokens == vocabulary
    # What it says of itself is what the runtime finds.
    config = SessionConfig(choose_device("cpu"), 1)
    target = RuntimeSession(bundle / "model.onnx", config)
    pair = find_draft(opened)
    assert pair is not None
    draft = load_layer_skip_draft(pair, config, opened, target.graph_io, 100, cache=False)
    bound = target.bind(target.arena(100))
    same = sum(count_agreement(bound, draft, text[:-1].tolist(), 1) for text in held_out)
    assert same / sum(len(text) - 2 for text in held_out) == pytest.approx(report.agreement, abs=0.08)


@pytest.mark.usefixtures("known_times")
def test_too_few_layers_another_layout_or_no_text_are_one_line(tmp_path: Path) -> None:
    small = write_bundle(tmp_path / "small")
    with pytest.raises(InputError, match="2 layers has none to do without"):
        adopt_layer_skip_draft(small, None, texts(), texts(), silent)
    other = write_bundle(tmp_path / "other", weights=ExportRecipe(FP32, layout=GraphLayout.GENAI), num_hidden_layers=4)
    with pytest.raises(InputError, match="own layout only"):
        adopt_layer_skip_draft(other, None, texts(), texts(), silent)
    fit = write_bundle(tmp_path / "fit", num_hidden_layers=4)
    with pytest.raises(InputError, match="no text"):
        adopt_layer_skip_draft(fit, None, [], texts(), silent)
    with pytest.raises(InputError, match="a head of 301 tokens"):
        adopt_layer_skip_draft(fit, 301, texts(), texts(), silent)
    assert not (fit / "draft.onnx").exists()
