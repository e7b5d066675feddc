"""Layer-skip drafts over the target's cache: output, cache slots and weights stay the target's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgerun
from edgerun import BundleError
from edgerun.edge.cli.main import main
from edgerun.export.drafts.skipped_layers import SubLayer, SubLayerKind, write_layer_skip_draft
from edgerun.export.drafts.trimmed_head import trim_own_draft
from edgerun.models.bundle import holds_only_bundle_files, open_bundle
from edgerun.models.pairing import find_draft
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph import packed_files
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.draft_loading import DraftTarget, load_layer_skip_draft
from edgerun.runtime.speculation.drafters.target_drafts import LayerSkipDraft
from edgerun.runtime.speculation.tree import Source
from support.nightly import examples
from support.tiny_models import write_bundle

CONFIG = SessionConfig(choose_device("cpu"), 1)
SKIPPED = (
    SubLayer(2, SubLayerKind.ATTENTION),
    SubLayer(2, SubLayerKind.FEED_FORWARD),
    SubLayer(3, SubLayerKind.ATTENTION),
)
MODEL = Speculation.of(Source.MODEL)
TOKENS = st.lists(st.integers(20, 24), min_size=1, max_size=12)
PATHS = st.lists(st.integers(20, 24), max_size=3).map(tuple)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bundle(tmp_path_factory.mktemp("own"), num_hidden_layers=6, max_position_embeddings=600)
    write_layer_skip_draft(folder, SKIPPED)
    return folder


@pytest.fixture(scope="module")
def target(bundle: Path) -> GraphSession:
    return GraphSession(bundle / "model.onnx", CONFIG)


def own_draft(bundle: Path, target: GraphSession) -> LayerSkipDraft:
    opened = open_bundle(bundle)
    pair = find_draft(opened)
    assert pair.layer_skip
    return load_layer_skip_draft(pair, CONFIG, DraftTarget(opened, target.graph_io, 600, cache=False))()


def read(target: GraphSession, tokens: list[int]) -> BoundSession:
    """A session that has read these tokens."""
    bound = target.bind(target.arena(600))
    if tokens:
        bound.forward(tokens)
        bound.arena.commit(len(tokens))
    return bound


@pytest.fixture(scope="module")
def drafts(bundle: Path, target: GraphSession) -> tuple[LayerSkipDraft, LayerSkipDraft]:
    """One to test, and one to compute the expected logits."""
    return own_draft(bundle, target), own_draft(bundle, target)


@settings(max_examples=examples(40))
@given(first=TOKENS, grown=st.lists(st.tuples(TOKENS, st.lists(PATHS, max_size=4)), max_size=4))
def test_logits_are_those_of_its_graph_behind_the_targets_slots(
    target: GraphSession,
    drafts: tuple[LayerSkipDraft, LayerSkipDraft],
    first: list[int],
    grown: list[tuple[list[int], list[tuple[int, ...]]]],
) -> None:
    model, other = drafts
    text = [21, *first]
    bound = read(target, text[:-1])
    model.attach(bound.arena)
    model.reset(text)
    for more, paths in grown:
        for path in paths:
            np.testing.assert_allclose(model.logits(path), expected(other, target, text, path), atol=2e-4)
        for path in ((), *paths):
            model.top_tokens(path, 2)
        assert bound.arena.length == len(text) - 1
        bound.forward(text[-1:] + more)
        bound.arena.commit(len(more))
        text += more
        for token in more:
            model.append(token)
    np.testing.assert_allclose(model.logits(()), expected(other, target, text, ()), atol=2e-4)


def expected(draft: LayerSkipDraft, target: GraphSession, text: list[int], path: tuple[int, ...]) -> np.ndarray:
    """Logits of one pass of the draft's graph behind slots of the target's."""
    owner = read(target, text[:-1])
    draft.attach(owner.arena)
    return draft._bound.forward([text[-1], *path])[-1].copy()


def test_its_head_may_be_trimmed(bundle: Path, target: GraphSession, tmp_path: Path) -> None:
    folder, kept = Path(shutil.copytree(bundle, tmp_path / "trimmed")), np.arange(0, 300, 5)
    trim_own_draft(folder, kept)
    assert (folder / "model.onnx.data").read_bytes() == (bundle / "model.onnx.data").read_bytes()
    assert holds_only_bundle_files(folder)
    bound, logits = read(target, [20, 21, 22]), []
    for model in (own_draft(bundle, target), own_draft(folder, target)):
        model.attach(bound.arena)
        model.reset([20, 21, 22, 23])
        logits.append(np.stack([model.logits(path) for path in ((), (21,), (21, 7))]))
    np.testing.assert_allclose(logits[1], logits[0][:, kept], atol=1e-5)


def test_a_draft_of_an_arena_that_is_gone_has_no_logits(bundle: Path, target: GraphSession) -> None:
    model = own_draft(bundle, target)
    bound = read(target, [20, 21])
    model.attach(bound.arena)
    model.reset([20, 21, 22])
    del bound
    with pytest.raises(ValueError, match="no arena"):
        model.top_tokens((), 1)


def test_the_packed_weights_are_shared(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(packed_files, "_MIN_WEIGHT_BYTES", 0)
    with edgerun.load(bundle, threads=1) as engine:
        engine.generate("the", max_tokens=3, speculation=MODEL)
    (folder,) = (tmp_path / "prepacked").iterdir()
    (twin,) = folder.glob("draft-*.onnx")
    assert not list(folder.glob("draft-*.data"))
    logits = []
    for graph in (bundle / "draft.onnx", twin):
        session = GraphSession(graph, CONFIG)
        logits.append(session.bind(session.arena(9)).forward([20, 21, 22]).copy())
    np.testing.assert_array_equal(*logits)
    # A damaged twin is written again; one that cannot be made is done without.
    good = twin.read_bytes()
    twin.write_bytes(good[:100])
    assert packed_files.prepacked_draft_graph(bundle / "draft.onnx", folder / "model.onnx").read_bytes() == good
    shutil.copyfile(bundle / "tokenizer.json", folder / "model.onnx")
    assert packed_files.prepacked_draft_graph(bundle / "draft.onnx", folder / "model.onnx") == bundle / "draft.onnx"


def refusal(bundle: Path) -> str:
    with pytest.raises(BundleError) as caught, edgerun.load(bundle, threads=1, cache=False) as engine:
        engine.generate("the", max_tokens=3)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_or_foreign_graph_is_a_one_line_error(bundle: Path, tmp_path: Path) -> None:
    copied = tmp_path / "bundle"
    shutil.copytree(bundle, copied)
    (copied / "draft.onnx").unlink()
    assert "draft.onnx is missing" in refusal(copied)
    other = write_bundle(tmp_path / "other", num_hidden_layers=3, num_key_value_heads=1)
    shutil.copy(other / "model.onnx", copied / "draft.onnx")
    manifest = json.loads((copied / "edge.json").read_text(encoding="utf-8"))
    del manifest["files"]["draft.onnx"]
    (copied / "edge.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert refusal(copied) == (
        f"{copied / 'draft.onnx'} does not run on the cache of {copied / 'model.onnx'}; "
        "restore it or export the draft again"
    )
    with edgerun.load(copied, threads=1, cache=False, draft=None) as engine:
        assert engine.generate("the", max_tokens=3).stats.completion_tokens == 3


def test_inspect_and_bench_report_it(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle), "--json"]) == 0
    metadata = json.loads(capsys.readouterr().out)
    assert metadata["draft"] == {"name": "draft of its own", "skips": "2.attention, 2.feed-forward, 3.attention"}
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the other thing\n", encoding="utf-8")
    measured = ["bench", str(bundle), "--prompts", str(prompts), "--max-tokens", "6", "--no-cache", "--json"]
    assert main([*measured, "--spec", "model"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"] == "draft of its own"
