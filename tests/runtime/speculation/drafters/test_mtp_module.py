"""Multi-token-prediction modules: they compute what the reference does, and the text stays the model's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnx", reason="needs the export extra")

from edgerun import Engine, GenerateOptions
from edgerun.errors import InputError
from edgerun.export import FP32, INT4, ExportRecipe, ExportRequest, HeadRequest, WeightFormat, export_checkpoint
from edgerun.export.check.head_reference import HeadOutputs
from edgerun.export.check.mtp_reference import TargetWeights, reference_mtp
from edgerun.export.check.reference import reference_states
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.drafts.mtp_checkpoint import open_mtp_module
from edgerun.models.bundle import open_bundle
from edgerun.models.draft_heads import HeadKind
from edgerun.models.pairing import find_draft
from edgerun.runtime.graph.session import GraphSession
from edgerun.runtime.kv.hybrid_arena import HybridArena
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.draft_loading import load_head
from edgerun.runtime.speculation.drafters.hidden_state_head import HiddenStateHead
from edgerun.runtime.speculation.tree import Source
from support.draft_heads import CPU, WrongHead, bind_with_features, engine_with_eager_head, run_missing
from support.tiny_heads import write_mtp_checkpoint

CONTEXT = 600
MTP = Speculation.of(Source.MTP)
GREEDY = GenerateOptions(max_tokens=30, ignore_eos=True)
SAMPLED = GenerateOptions(max_tokens=30, ignore_eos=True, temperature=0.8, top_k=40, repeat_penalty=1.1, seed=3)
TOKENS = st.lists(st.integers(20, 24), min_size=1, max_size=10)
PATHS = st.lists(st.integers(20, 24), max_size=3).map(tuple)
PROMPTS = ("the other thing", "in the in the in the", "a")


def export_with_module(folder: Path, weights: WeightFormat = FP32, **overrides: object) -> Path:
    """A bundle of a random Qwen3.5 with its random module; the checkpoint lies beside it."""
    source = write_mtp_checkpoint(folder / "target", max_position_embeddings=CONTEXT, **overrides)
    recipe = ExportRecipe(weights, draft_head=HeadRequest(None, HeadKind.MTP))
    return export_checkpoint(ExportRequest(source, folder / "bundle", recipe)).bundle


@pytest.fixture(scope="module", params=[True, False], ids=["tied head", "separate head"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    export_with_module(folder, tie_word_embeddings=request.param)
    return folder


class Oracle:
    """The target's features and the module's outputs, from the checkpoint in float64."""

    def __init__(self, folder: Path) -> None:
        self._source = Checkpoint(folder)
        self._config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._module = open_mtp_module(folder, read_config(folder))

    def features(self, tokens: list[int]) -> npt.NDArray[np.float64]:
        """The residual stream after the last layer."""
        return reference_states(self._source, self._config, np.array(tokens), CONTEXT)[-1]

    def run(self, tokens: list[int], path: tuple[int, ...]) -> HeadOutputs:
        """The module over a sequence, and then a path of draft tokens."""
        target = TargetWeights(self._source, self._source)
        following = np.array([*tokens[1:], *path])
        features = self.features(tokens[:-1])
        return reference_mtp(self._module.checkpoint, target, self._config, following, features, CONTEXT)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder / "target")


@pytest.fixture(scope="module")
def target(folder: Path) -> GraphSession:
    return GraphSession(folder / "bundle" / "model.onnx", CPU)


def module_of(folder: Path, target: GraphSession) -> HiddenStateHead:
    bundle = open_bundle(folder / "bundle")
    pair = find_draft(bundle)
    assert pair is not None
    assert pair.head is HeadKind.MTP
    return load_head(pair, CPU, bundle, target.graph_io, CONTEXT, cache=False)()


def test_the_target_gives_the_output_of_its_last_layer_of_all_tokens(target: GraphSession, oracle: Oracle) -> None:
    tokens = np.random.default_rng(1).integers(5, 300, 40).tolist()
    bound = bind_with_features(target, CONTEXT)
    for start, stop in ((0, 17), (17, 18), (18, 30), (30, 40)):
        bound.forward(tokens[start:stop], logits_for=(stop - start - 1,))
        bound.arena.commit(stop - start)
    assert bound.arena.features is not None
    np.testing.assert_allclose(bound.arena.features.read(0, 40), oracle.features(tokens), atol=2e-4)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_wherever_the_sequence_goes_the_logits_are_those_of_the_reference(
    folder: Path, target: GraphSession, oracle: Oracle, data: st.DataObject
) -> None:
    bound, head = bind_with_features(target, CONTEXT), module_of(folder, target)
    head.attach(bound.arena)
    tokens: list[int] = data.draw(TOKENS)
    run_missing(bound, tokens)
    head.reset(tokens)
    for _ in range(data.draw(st.integers(1, 6))):
        match data.draw(st.sampled_from(("ask", "append", "replace", "rewind"))):
            case "append":
                for token in data.draw(TOKENS):
                    tokens.append(token)
                    head.append(token)
            case "replace":
                tokens = [*tokens[: data.draw(st.integers(0, len(tokens)))], *data.draw(TOKENS)]
                bound.arena.rewind_to(0)
                head.reset(tokens)
            case "rewind":  # the states of the target's linear attention are computed again
                kept = data.draw(st.integers(0, bound.arena.length))
                bound.arena.rewind_to(kept)
                tokens = [*tokens[:kept], *data.draw(TOKENS)]
                head.reset(tokens)
            case _:
                pass
        run_missing(bound, tokens)
        path = data.draw(PATHS)
        logits = head.logits(path)
        if len(tokens) < 2:
            assert logits is None
            continue
        assert logits is not None
        np.testing.assert_allclose(logits, oracle.run(tokens, path).logits[-1], atol=1e-3)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with engine_with_eager_head(folder / "bundle") as engine:
        yield engine


@pytest.mark.parametrize("choice", [Speculation.AUTO, MTP], ids=str)
@pytest.mark.parametrize(
    "options", [GREEDY, GREEDY.changed({"exact": True}), SAMPLED], ids=["greedy", "exact", "sampled"]
)
def test_the_text_is_that_of_plain_decoding(engine: Engine, choice: Speculation, options: GenerateOptions) -> None:
    drafted = 0
    for prompt in PROMPTS:
        plain = engine.generate(prompt, options, speculation=Speculation.OFF)
        reply = engine.generate(prompt, options, speculation=choice)
        assert (reply.text, reply.finish_reason) == (plain.text, plain.finish_reason)
        if "mtp" in reply.stats.by_source:
            drafted += reply.stats.by_source["mtp"].drafted
    assert drafted > 0
    assert not engine.model.graph_io.supports_trees


def test_edited_prompts_and_kept_prefixes_stay_the_targets(engine: Engine) -> None:
    for length in range(3, 12):
        prompt = "the other thing in the other"[: 2 * length]
        for options in (GREEDY, SAMPLED):
            plain = engine.generate(prompt, options, speculation=Speculation.OFF)
            assert engine.generate(prompt, options, speculation=MTP).text == plain.text


def test_a_saved_session_continues_with_the_same_text(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "session.kv"
    chosen = GenerateOptions(max_tokens=20, ignore_eos=True)
    with engine_with_eager_head(folder / "bundle") as engine, engine.session() as chat:
        chat.send("in the", chosen, speculation=MTP)
        chat.save(path)
        expected = chat.send("and of", chosen, speculation=Speculation.OFF)
    with engine_with_eager_head(folder / "bundle") as engine, engine.session(resume=path) as resumed:
        reply = resumed.send("and of", chosen, speculation=MTP)
    assert reply.text == expected.text
    assert reply.stats.by_source["mtp"].drafted > 0


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_wrong_module_changes_nothing(folder: Path, options: GenerateOptions) -> None:
    with engine_with_eager_head(folder / "bundle") as engine:
        draft = engine.model.drafters.draft_model()
        assert draft is not None
        draft.__class__ = WrongHead
        plain = engine.generate("the other thing", options, speculation=Speculation.OFF)
        reply = engine.generate("the other thing", options, speculation=MTP)
        counts = reply.stats.by_source["mtp"]
    assert reply.text == plain.text
    assert counts.drafted > 10 * max(counts.accepted, 1)


class Right(HiddenStateHead):
    """A module that knows the answer."""

    text: list[int]

    def logits(self, path: tuple[int, ...]) -> npt.NDArray[np.float32] | None:
        """The logits, with the next token of the answer far above all others."""
        found = super().logits(path)
        sequence = [*self._token_ids, *path]
        if found is None or self.text[: len(sequence)] != sequence or len(sequence) == len(self.text):
            return found
        return np.where(np.arange(found.size) == self.text[len(sequence)], found.max() + 9, found)


def test_accepted_tokens_are_counted_and_run_again_with_the_targets_features(folder: Path, oracle: Oracle) -> None:
    with engine_with_eager_head(folder / "bundle") as engine:
        options = GREEDY.changed({"max_tokens": 60})
        plain = engine.generate("in the other thing", options, speculation=Speculation.OFF)
        head = engine.model.drafters.draft_model()
        assert isinstance(head, HiddenStateHead)
        head.__class__ = Right
        kept = engine.model.prefixes._kept[-1]
        head.text = [*kept.token_ids.tolist(), -1]  # type: ignore[attr-defined]
        reply = engine.generate("in the other thing", options, speculation=MTP)
        counts = reply.stats.by_source["mtp"]
        assert reply.text == plain.text
        assert counts.accepted > 30
        assert reply.stats.decode_passes + counts.accepted == 59
        known = oracle.run(head._token_ids, (21,))
        found = HiddenStateHead.logits(head, (21,))
    assert found is not None
    np.testing.assert_allclose(found, known.logits[-1], atol=1e-3)


def test_features_survive_tokens_that_run_once_more(target: GraphSession, oracle: Oracle) -> None:
    tokens = np.random.default_rng(3).integers(5, 300, 50).tolist()
    bound = bind_with_features(target, CONTEXT)
    arena = bound.arena
    assert isinstance(arena, HybridArena)
    for start in range(0, 40, 4):  # of every chain of four draft tokens, two are accepted
        bound.forward([*tokens[arena.length : arena.length + 2], 7, 8])
        arena.compact(arena.length, [0, 1])
        assert arena.length == start // 2 + 2
    arena.rewind_to(13)  # where no states are known
    bound.forward(tokens[13:20])
    arena.commit(7)
    assert arena.replayed > 0
    assert arena.features is not None
    np.testing.assert_allclose(arena.features.read(0, 20), oracle.features(tokens[:20]), atol=2e-4)


def test_int4_exports_draft_from_the_outside(tmp_path: Path) -> None:
    bundle = export_with_module(tmp_path, INT4)
    with engine_with_eager_head(bundle) as engine:
        plain = engine.generate("in the in the", GREEDY, speculation=Speculation.OFF)
        reply = engine.generate("in the in the", GREEDY, speculation=MTP)
    assert reply.text == plain.text
    assert reply.stats.by_source["mtp"].drafted > 0


def test_a_model_without_the_module_says_how_to_get_it(tmp_path: Path) -> None:
    import edgerun
    from support.tiny_models import write_bundle

    with (
        edgerun.load(write_bundle(tmp_path), cache=False) as engine,
        pytest.raises(InputError, match="multi-token-prediction"),
    ):
        engine.generate("the", GREEDY, speculation=MTP)
