"""EAGLE-3 heads: their logits are the reference's wherever the sequence goes, and the text stays the target's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun import Engine, GenerateOptions
from edgerun.export import FP32, INT4, ExportRecipe, ExportRequest, HeadRequest, export_checkpoint
from edgerun.export.check.head_reference import HeadOutputs, embedding_rows, reference_head
from edgerun.export.check.reference import reference_states
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.drafts.head_checkpoint import open_eagle_head
from edgerun.models.bundle import open_bundle
from edgerun.models.draft_heads import HeadKind
from edgerun.models.pairing import find_draft
from edgerun.runtime.graph.session import GraphSession
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.draft_loading import load_head
from edgerun.runtime.speculation.drafters.hidden_state_head import HiddenStateHead
from edgerun.runtime.speculation.sampled_speculator import DraftSampling
from edgerun.runtime.speculation.tree import Source
from support.draft_heads import CPU, WrongHead, bind_with_features, engine_with_eager_head, run_missing
from support.tiny_heads import write_eagle_head
from support.tiny_models import tiny_config, write_checkpoint

CONTEXT = 600
EAGLE = Speculation.of(Source.EAGLE)
GREEDY = GenerateOptions(max_tokens=30)
SAMPLED = GenerateOptions(max_tokens=30, temperature=0.8, top_k=40, top_p=0.95, repeat_penalty=1.1, seed=3)
TOKENS = st.lists(st.integers(20, 24), min_size=1, max_size=10)
PATHS = st.lists(st.integers(20, 24), max_size=3).map(tuple)
TARGET: dict[str, Any] = {"num_hidden_layers": 6, "max_position_embeddings": CONTEXT}


def export_with_head(folder: Path, recipe: ExportRecipe, family: str = "llama", **head: Any) -> Path:
    """A bundle of a random target with a random head."""
    own = dict(TARGET) if family == "llama" else {"max_position_embeddings": CONTEXT}
    source = write_checkpoint(folder / "target", family, **own)
    config = tiny_config(family, **own)
    written = write_eagle_head(folder / "head", config, **head)
    request = HeadRequest(written, HeadKind.EAGLE)
    recipe = ExportRecipe(recipe.body, draft_head=request)
    return export_checkpoint(ExportRequest(source, folder / "bundle", recipe)).bundle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a head, and the bundle of both in float32."""
    folder = tmp_path_factory.mktemp("eagle")
    export_with_head(folder, ExportRecipe(FP32))
    return folder


class Oracle:
    """The target's features and the head's outputs, from the checkpoints in float64."""

    def __init__(self, folder: Path) -> None:
        self._target = Checkpoint(folder / "target")
        self._config = json.loads((folder / "target" / "config.json").read_text(encoding="utf-8"))
        self._head = open_eagle_head(folder / "head", read_config(folder / "target"))

    def features(self, tokens: list[int]) -> npt.NDArray[np.float64]:
        """The concatenated residual stream entering the layers that the head reads."""
        states = reference_states(self._target, self._config, np.array(tokens), CONTEXT)
        return np.concatenate([states[layer] for layer in self._head.features.layers], axis=-1)

    def run(self, tokens: list[int], path: tuple[int, ...], first: int = 0) -> HeadOutputs:
        """The head over a sequence from its token `first` on, and then a path of draft tokens."""
        features = self.features(tokens[:-1])[first:]
        embeddings = embedding_rows(self._target, np.array([*tokens[first + 1 :], *path]))
        return reference_head(self._head.checkpoint, self._head.settings, embeddings, features, CONTEXT)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def target(folder: Path) -> GraphSession:
    return GraphSession(folder / "bundle" / "model.onnx", CPU)


def head_of(folder: Path, target: GraphSession) -> HiddenStateHead:
    bundle = open_bundle(folder / "bundle")
    pair = find_draft(bundle)
    assert pair is not None
    assert pair.head is HeadKind.EAGLE
    return load_head(pair, CPU, bundle, target.graph_io, CONTEXT, cache=False)()


def test_the_target_gives_the_residual_stream_entering_three_layers(target: GraphSession, oracle: Oracle) -> None:
    tokens = np.random.default_rng(1).integers(5, 300, 40).tolist()
    bound = bind_with_features(target, CONTEXT)
    for start, stop in ((0, 17), (17, 18), (18, 30), (30, 40)):
        bound.forward(tokens[start:stop], logits_for=(stop - start - 1,))
        bound.arena.commit(stop - start)
    assert bound.arena.features is not None
    np.testing.assert_allclose(bound.arena.features.read(0, 40), oracle.features(tokens), atol=2e-4)


def test_trees_leave_the_features_of_the_accepted_path(target: GraphSession, oracle: Oracle) -> None:
    bound = bind_with_features(target, CONTEXT)
    bound.forward([20, 21, 22])
    bound.arena.commit(3)
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], np.bool_)
    bound.forward([23, 30, 31, 32], positions=[3, 4, 4, 5], tree_mask=mask)
    bound.arena.compact(3, [0, 2, 3])
    assert bound.arena.features is not None
    np.testing.assert_allclose(bound.arena.features.read(0, 6), oracle.features([20, 21, 22, 23, 31, 32]), atol=2e-4)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_wherever_the_sequence_goes_the_logits_are_those_of_the_reference(
    folder: Path, target: GraphSession, oracle: Oracle, data: st.DataObject
) -> None:
    bound, head = bind_with_features(target, CONTEXT), head_of(folder, target)
    head.attach(bound.arena)
    tokens: list[int] = data.draw(TOKENS)
    run_missing(bound, tokens)
    head.reset(tokens)
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(("ask", "append", "replace", "another arena"))):
            case "append":
                for token in data.draw(TOKENS):
                    tokens.append(token)
                    head.append(token)
                run_missing(bound, tokens)
            case "another arena":
                bound = bind_with_features(target, CONTEXT)
                run_missing(bound, tokens)
                head.attach(bound.arena)
            case "replace":
                tokens = [*tokens[: data.draw(st.integers(0, len(tokens)))], *data.draw(TOKENS)]
                bound.arena.rewind_to(0)
                run_missing(bound, tokens)
                head.reset(tokens)
            case _:
                pass
        path = data.draw(PATHS)
        logits = head.logits(path)
        if len(tokens) < 2:
            assert logits is None
            continue
        known = oracle.run(tokens, path)
        assert logits is not None
        np.testing.assert_allclose(logits, known.logits[-1], atol=1e-3)


def test_where_features_are_unknown_the_head_begins_later(folder: Path, target: GraphSession, oracle: Oracle) -> None:
    tokens = np.random.default_rng(2).integers(5, 300, 30).tolist()
    bound, head = bind_with_features(target, CONTEXT), head_of(folder, target)
    run_missing(bound, tokens[:20])
    restored = bind_with_features(target, CONTEXT)
    restored.arena.restore(bound.arena.snapshot())
    head.attach(restored.arena)
    head.reset(tokens[:20])
    assert head.logits(()) is None
    for token in tokens[20:]:
        head.append(token)
    run_missing(restored, tokens)
    logits = head.logits((21, 22))
    assert logits is not None
    np.testing.assert_allclose(logits, oracle.run(tokens, (21, 22), first=19).logits[-1], atol=1e-3)


def test_a_head_without_features_proposes_nothing(folder: Path, target: GraphSession) -> None:
    head = head_of(folder, target)
    head.attach(target.arena(CONTEXT))
    head.reset([20, 21, 22])
    assert head.top_tokens((), 3).tokens == ()


def test_drafts_have_the_ids_of_the_target(folder: Path, target: GraphSession, oracle: Oracle) -> None:
    bound, head = bind_with_features(target, CONTEXT), head_of(folder, target)
    tokens = [20, 21, 22, 30, 40]
    run_missing(bound, tokens)
    head.attach(bound.arena)
    head.reset(tokens)
    ids = np.load(folder / "bundle" / "d2t.npy")
    expected = oracle.run(tokens, ()).logits[-1].argsort()[::-1][:3]
    assert ids.size == 200
    assert head.top_tokens((), 3).tokens == tuple(ids[expected].tolist())


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with engine_with_eager_head(folder / "bundle") as engine:
        yield engine


@pytest.mark.parametrize("choice", [Speculation.AUTO, EAGLE], ids=str)
@pytest.mark.parametrize(
    "options", [GREEDY, GREEDY.changed({"exact": True}), SAMPLED], ids=["greedy", "exact", "sampled"]
)
def test_the_text_is_that_of_plain_decoding(engine: Engine, choice: Speculation, options: GenerateOptions) -> None:
    drafted = 0
    for prompt in ("the other thing", "in the in the in the", "a"):
        plain = engine.generate(prompt, options, speculation=Speculation.OFF)
        reply = engine.generate(prompt, options, speculation=choice)
        assert (reply.text, reply.finish_reason) == (plain.text, plain.finish_reason)
        if "eagle" in reply.stats.by_source:
            drafted += reply.stats.by_source["eagle"].drafted
    assert drafted > 0


@pytest.mark.parametrize("draft_sampling", [DraftSampling.CHAIN, DraftSampling.TREE])
def test_draft_tokens_can_be_sampled_from_it(engine: Engine, draft_sampling: DraftSampling) -> None:
    reply = engine.generate("the other thing", SAMPLED, draft_sampling=draft_sampling)
    assert reply.stats.by_source["eagle"].drafted > 0


def test_sessions_and_edited_prompts_stay_the_targets(engine: Engine) -> None:
    for length in range(3, 12):
        prompt = "the other thing in the other"[: 2 * length]
        for options in (GREEDY, SAMPLED):
            plain = engine.generate(prompt, options, speculation=Speculation.OFF)
            assert engine.generate(prompt, options, speculation=EAGLE).text == plain.text


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_wrong_head_changes_nothing(folder: Path, options: GenerateOptions) -> None:
    with engine_with_eager_head(folder / "bundle") as engine:
        draft = engine.model.drafters.draft_model()
        assert draft is not None
        draft.__class__ = WrongHead
        plain = engine.generate("the other thing", options, speculation=Speculation.OFF)
        reply = engine.generate("the other thing", options, speculation=EAGLE)
        counts = reply.stats.by_source["eagle"]
    assert reply.text == plain.text
    assert counts.drafted > 10 * max(counts.accepted, 1)


class Informed(HiddenStateHead):
    """A head that knows the answer, as far as its vocabulary has it, and is wrong at every fifth token."""

    text: list[int]

    def logits(self, path: tuple[int, ...]) -> npt.NDArray[np.float32] | None:
        """The logits, with the next token of the answer, or another one, far above all others."""
        found = super().logits(path)
        sequence = [*self._token_ids, *path]
        assert self.target_ids is not None
        if found is None or self.text[: len(sequence)] != sequence or len(sequence) == len(self.text):
            return found
        is_next = self.target_ids == self.text[len(sequence)]
        if len(sequence) % 5 == 0:
            is_next = np.roll(is_next, 1)
        return np.where(is_next, found.max() + 2, found)


@pytest.mark.parametrize("kind", ["llama, trees", "llama, chains", "lfm2", "qwen3_5_text"])
def test_accepted_tokens_run_again_with_the_targets_features(
    folder: Path, tmp_path: Path, kind: str, oracle: Oracle
) -> None:
    if not kind.startswith("llama"):
        folder = tmp_path
        export_with_head(tmp_path, ExportRecipe(FP32), kind, num_key_value_heads=2)
        oracle = Oracle(tmp_path)
    with engine_with_eager_head(folder / "bundle", trees=kind != "llama, chains") as engine:
        prompt = "in the other thing"
        options = GREEDY.changed({"max_tokens": 60, "ignore_eos": True})
        plain = engine.generate(prompt, options, speculation=Speculation.OFF)
        head = engine.model.drafters.draft_model()
        assert isinstance(head, HiddenStateHead)
        head.__class__ = Informed
        head.text = [*engine.model.prefixes._kept[-1].token_ids.tolist(), -1]  # type: ignore[attr-defined]
        reply = engine.generate(prompt, options, speculation=EAGLE)
        counts = reply.stats.by_source["eagle"]
        assert reply.text == plain.text
        assert counts.drafted > counts.accepted > 10
        assert reply.stats.decode_passes + counts.accepted == 59
        known = oracle.run(head._token_ids, (21,))
        found = HiddenStateHead.logits(head, (21,))
    assert found is not None
    np.testing.assert_allclose(found, known.logits[-1], atol=2e-3)


@pytest.mark.parametrize("choice", [Speculation.AUTO, EAGLE], ids=str)
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_a_hybrid_target_drafts_chains(tmp_path: Path, family: str, choice: Speculation) -> None:
    bundle = export_with_head(tmp_path, ExportRecipe(INT4), family, num_key_value_heads=2)
    with engine_with_eager_head(bundle) as engine:
        plain = engine.generate("in the in the", GREEDY, speculation=Speculation.OFF)
        reply = engine.generate("in the in the", GREEDY, speculation=choice)
        assert not engine.model.graph_io.supports_trees
    assert reply.text == plain.text
    assert reply.stats.by_source["eagle"].drafted > 0


def test_the_int8_prompt_graph_gives_features_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    bundle = export_with_head(tmp_path, ExportRecipe(INT4))
    with edgerun.load(bundle, threads=1, learned=False, prefill="int8") as engine:
        reply = engine.generate("the other thing " * 60, max_tokens=4, raw=True, speculation=EAGLE)
        arena = engine.model.prefixes._kept[-1].arena
    assert reply.stats.prompt_readers["int8"] > 100
    assert arena.features is not None
    assert (arena.features.start, arena.features.end >= arena.length) == (0, True)


def test_a_head_works_beside_an_int8_cache(folder: Path) -> None:
    with engine_with_eager_head(folder / "bundle", kv="int8") as engine:
        plain = engine.generate("in the in the", GREEDY, speculation=Speculation.OFF)
        reply = engine.generate("in the in the", GREEDY, speculation=EAGLE)
    assert reply.text == plain.text
    assert reply.stats.by_source["eagle"].drafted > 0


def test_a_saved_session_continues(folder: Path, tmp_path: Path) -> None:
    with engine_with_eager_head(folder / "bundle") as engine:
        session = engine.session()
        session.send("the other", GREEDY, speculation=EAGLE)
        session.save(tmp_path / "session")
        expected = session.send("thing", GREEDY, speculation=Speculation.OFF).text
        again = engine.session(resume=tmp_path / "session")
        reply = again.send("thing", GREEDY, speculation=EAGLE)
    assert reply.text == expected
    assert reply.stats.by_source["eagle"].drafted > 0
