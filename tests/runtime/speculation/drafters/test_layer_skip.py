"""Layer-skip drafts over the target's cache: output, cache slots and weights stay the target's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgerun
from edgerun import BundleError, Engine, GenerateOptions
from edgerun.edge.cli.main import main
from edgerun.export.drafts.skipped_layers import SubLayer, SubLayerKind, write_layer_skip_draft
from edgerun.models.bundle import open_bundle
from edgerun.models.pairing import find_draft
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph import packed_files
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.speculation.choice import DraftSampling, Speculation
from edgerun.runtime.speculation.draft_loading import DraftTarget, load_layer_skip_draft
from edgerun.runtime.speculation.drafters.target_drafts import LayerSkipDraft
from edgerun.runtime.speculation.tree import Source
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.tiny_models import write_bundle

CONFIG = SessionConfig(choose_device("cpu"), 1)
SKIPPED = (
    SubLayer(2, SubLayerKind.ATTENTION),
    SubLayer(2, SubLayerKind.FEED_FORWARD),
    SubLayer(3, SubLayerKind.ATTENTION),
)
MODEL = Speculation.of(Source.MODEL)
GREEDY = GenerateOptions(max_tokens=24)
SAMPLED = GenerateOptions(max_tokens=24, temperature=0.8, top_k=40, top_p=0.95, repeat_penalty=1.1, seed=3)
TOKENS = st.lists(st.integers(20, 24), min_size=1, max_size=12)
PATHS = st.lists(st.integers(20, 24), max_size=3).map(tuple)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bundle(tmp_path_factory.mktemp("own"), num_hidden_layers=6, max_position_embeddings=600)
    write_layer_skip_draft(folder, SKIPPED)
    return folder


def loaded(bundle: Path, **options: object) -> Engine:
    """An engine for which every draft token pays."""
    engine = edgerun.load(bundle, threads=1, cache=False, **options)
    drafter_pool = engine.model.drafters
    drafter_pool._pass_cost = FixedCost(NEARLY_FREE)
    draft = drafter_pool.draft_model()
    assert draft is not None
    draft.cost = FixedCost({128: {1: 1e-6, 16: 1.1e-6}})
    return engine


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with loaded(bundle) as engine:
        yield engine


@pytest.fixture(scope="module")
def target(bundle: Path) -> GraphSession:
    return GraphSession(bundle / "model.onnx", CONFIG)


def own_draft(bundle: Path, target: GraphSession) -> LayerSkipDraft:
    opened = open_bundle(bundle)
    pair = find_draft(opened)
    assert pair is not None
    assert pair.layer_skip
    return load_layer_skip_draft(pair, CONFIG, DraftTarget(opened, target.graph_io, 600, cache=False))()


def read(target: GraphSession, tokens: list[int]) -> BoundSession:
    """A session that has read these tokens."""
    bound = target.bind(target.arena(600))
    if tokens:
        bound.forward(tokens)
        bound.arena.commit(len(tokens))
    return bound


@pytest.mark.parametrize("choice", [Speculation.AUTO, MODEL], ids=str)
@pytest.mark.parametrize(
    "options",
    [GREEDY, GREEDY.changed({"exact": True}), SAMPLED],
    ids=["greedy", "exact", "sampled"],
)
def test_the_output_is_that_of_plain_decoding(engine: Engine, choice: Speculation, options: GenerateOptions) -> None:
    drafted = 0
    for prompt in ("the other thing", "in the in the in the", "a"):
        plain = engine.generate(prompt, options, speculation=Speculation.OFF)
        reply = engine.generate(prompt, options, speculation=choice)
        assert (reply.text, reply.finish_reason) == (plain.text, plain.finish_reason)
        if "model" in reply.stats.by_source:
            drafted += reply.stats.by_source["model"].drafted
    assert drafted > 0


@pytest.mark.parametrize("draft_sampling", [DraftSampling.CHAIN, DraftSampling.TREE])
def test_draft_tokens_can_be_sampled_from_it(engine: Engine, draft_sampling: DraftSampling) -> None:
    reply = engine.generate("the other thing", SAMPLED, draft_sampling=draft_sampling)
    assert reply.stats.by_source["model"].drafted > 0
    assert_slots_are_the_targets(engine)


def test_it_runs_on_an_int8_cache(bundle: Path) -> None:
    with loaded(bundle, kv="int8") as engine:
        expected = engine.generate("the", max_tokens=24, speculation=Speculation.OFF).text
        reply = engine.generate("the", max_tokens=24, speculation=MODEL)
        assert reply.text == expected
        assert reply.stats.by_source["model"].drafted > 0


def assert_slots_are_the_targets(engine: Engine) -> None:
    """The cache slots of the last answer are those of the target alone."""
    kept = engine.model.prefixes._kept[-1]
    arena = kept.arena
    alone = engine.model.new_sequence().bound
    alone.forward(kept.token_ids)
    alone.arena.commit(arena.length)
    for found, expected in zip(arena.snapshot(), alone.arena.snapshot(), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-4)


def test_after_every_round_the_slots_are_the_targets(engine: Engine) -> None:
    for max_tokens in range(1, 14):
        reply = engine.generate("in the in", max_tokens=max_tokens, speculation=MODEL)
        assert_slots_are_the_targets(engine)
    assert reply.stats.by_source["model"].accepted > 0


def test_a_long_answer_grows_the_cache_under_the_draft(engine: Engine) -> None:
    prompt = "in the other thing " * 20
    plain = engine.generate(prompt, max_tokens=100, speculation=Speculation.OFF)
    assert engine.generate(prompt, max_tokens=100, speculation=MODEL).text == plain.text
    assert engine.model.prefixes._kept[-1].arena.capacity > 256
    assert_slots_are_the_targets(engine)


def test_alternating_conversations_use_their_own_caches(engine: Engine, tmp_path: Path) -> None:
    said = ["the", "and then", "of it"]

    def talk(choice: Speculation, *, put_aside: bool) -> list[str]:
        sessions = [engine.session(), engine.session(system="be brief")]
        answers = []
        for text in said:
            for number, session in enumerate(sessions):
                answers.append(session.send(text, max_tokens=12, speculation=choice).text)
                if put_aside:
                    session.save(tmp_path / f"{number}.session")
                    session.close()
                    sessions[number] = engine.session(resume=tmp_path / f"{number}.session")
        return answers

    plain = talk(Speculation.OFF, put_aside=False)
    assert talk(MODEL, put_aside=False) == plain
    assert talk(MODEL, put_aside=True) == plain


def test_a_cancelled_answer_leaves_a_valid_cache(engine: Engine) -> None:
    plain, drafted = engine.session(), engine.session()
    for session, choice in ((plain, Speculation.OFF), (drafted, MODEL)):
        stream = session.stream("the other", max_tokens=30, speculation=choice)
        next(iter(stream))
        stream.close()
        session.messages.clear()
    answers = [
        session.send("and", max_tokens=30, speculation=choice).text
        for session, choice in ((plain, Speculation.OFF), (drafted, MODEL))
    ]
    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def drafts(bundle: Path, target: GraphSession) -> tuple[LayerSkipDraft, LayerSkipDraft]:
    """One to test, and one to compute the expected logits."""
    return own_draft(bundle, target), own_draft(bundle, target)


@settings(max_examples=40)
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
