"""Draft models on real sessions: the probabilities of one pass over the whole sequence, at the cost announced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.errors import EdgeError
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.model_metadata import ModelMetadata
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.kv import layer_states
from edgerun.runtime.kv.layer_states import LayerStates
from edgerun.runtime.kv.prefix_cache import PrefixCache
from edgerun.runtime.speculation.drafters.draft_model import DraftModel, TopTokens
from edgerun.runtime.speculation.pass_cost import PassCost
from edgerun.runtime.speculation.tree import Source
from support.adversarial_drafters import FixedCost
from support.hybrid_graphs import with_end_states
from support.nightly import examples
from support.tiny_models import HYBRID_FAMILIES, write_bundle

VOCABULARY = 300
SECONDS = {0: {1: 0.001, 2: 0.0015, 4: 0.002, 128: 0.05}}
LIMIT = 64
KEPT = np.sort(np.random.default_rng(8).permutation(VOCABULARY)[:120]).astype(np.int32)
"""The tokens that a trimmed head keeps."""
TEXTS = st.lists(st.integers(20, 24), min_size=1, max_size=20)
"""Few tokens, so that sequences and draft tokens often agree."""
PATHS = st.lists(st.integers(20, 24), max_size=4).map(tuple)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def trees(untied: Path) -> GraphSession:
    return session(untied / "model.onnx")


def without_positions(model) -> None:
    """Remove the mask and the positions from a graph, which then runs chains only."""
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            del node.input[9:]
    kept = [port for port in model.graph.input if port.name not in ("attention_bias", "position_ids")]
    del model.graph.input[:]
    model.graph.input.extend(kept)


@pytest.fixture(scope="module", params=["trees", "chains", *HYBRID_FAMILIES, "end states"])
def graph(request: pytest.FixtureRequest, untied: Path, trees: GraphSession, tmp_path_factory) -> GraphSession:
    """Graphs with trees, without, with states, and with states that are known after a pass's last token alone."""
    if request.param == "trees":
        return trees
    if request.param == "chains":
        return session(changed(untied, "chains.onnx", without_positions))
    folder, alone = tmp_path_factory.mktemp("hybrid"), request.param == "end states"
    path = write_bundle(folder, "lfm2" if alone else request.param, max_position_embeddings=512) / "model.onnx"
    return session(with_end_states(path.parent, folder / "edited", (0, 1, 3)) if alone else path)


@pytest.fixture(scope="module")
def hybrid(graph: GraphSession) -> GraphSession:
    if not graph.graph_io.states:
        pytest.skip("the model keeps no states")
    return graph


@pytest.fixture(scope="module")
def trimmed(untied: Path) -> Path:
    """The same model with a head for the kept tokens only."""
    return changed(untied, "trimmed.onnx", lambda model: keep_tokens(model, "head.weight"))


@pytest.fixture(scope="module")
def trimmed_throughout(untied: Path) -> Path:
    """The same model with head and embedding for the kept tokens only."""
    return changed(untied, "throughout.onnx", lambda model: keep_tokens(model, "head.weight", "embedding.weight"))


def changed(bundle: Path, name: str, change: Callable) -> Path:
    import onnx

    model = onnx.load(bundle / "model.onnx")
    change(model)
    onnx.save(model, bundle / name)
    return bundle / name


def keep_tokens(model, *weights: str) -> None:
    from onnx import numpy_helper

    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[KEPT], tensor.name))
    logits = next(port for port in model.graph.output if port.name == "logits")
    logits.type.tensor_type.shape.dim[1].dim_value = KEPT.size


def session(graph: Path, input_vocab: int | None = None) -> GraphSession:
    return GraphSession(graph, SessionConfig(choose_device("cpu"), 1), ModelMetadata(input_vocab=input_vocab))


def draft(graph: GraphSession, limit: int = LIMIT, target_vocab: int = VOCABULARY, **options: Any) -> DraftModel:
    return DraftModel(graph.bind(graph.arena(limit)), FixedCost(SECONDS), target_vocab, **options)


def states_of(model: DraftModel) -> LayerStates:
    return model._arena.states


def assert_as_fresh(graph: GraphSession, tokens: list[int], likely: TopTokens, model: DraftModel | None = None) -> None:
    """The probabilities, and the slots of a model, are those of a pass over an empty cache."""
    bound = graph.bind(graph.arena(600))
    logits = bound.forward(tokens, logits_for=(len(tokens) - 1,))[0].astype(np.float64)
    weights = np.exp(logits - logits.max())
    expected = weights / weights.sum()
    np.testing.assert_allclose(likely.probabilities, expected[list(likely.tokens)], atol=2e-5)
    np.testing.assert_allclose(likely.probabilities, np.sort(expected)[::-1][: len(likely.tokens)], atol=2e-5)
    assert len(set(likely.tokens)) == len(likely.tokens)
    if model is not None:
        bound.arena.commit(len(tokens))
        slots = bound.arena.snapshot()[0][..., : model._arena.length, :]
        np.testing.assert_allclose(model._arena.snapshot()[0], slots, atol=2e-4)


def width_of_pass(model: DraftModel, path: tuple[int, ...]) -> tuple[int, TopTokens]:
    """Run the model after a path; returns how many tokens ran for it, those included that ran once more."""
    widths: list[int] = []
    forward = model._bound.forward

    def counting(tokens: Any, **options: Any) -> Any:
        before = model._arena.replayed
        logits = forward(tokens, **options)
        widths.append(np.size(tokens) + model._arena.replayed - before)
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model._bound, "forward", counting)
        likely = model.top_tokens(path, 3)
    return sum(widths), likely


@settings(max_examples=examples(50))
@given(data=st.data(), most_held=st.sampled_from([1, 2, 100]))
def test_probabilities_are_those_of_a_fresh_pass(graph: GraphSession, most_held: int, data: st.DataObject) -> None:
    model, text = draft(graph), data.draw(TEXTS)
    states = model._arena.states
    if states is not None:
        states._most_held = most_held
    model.reset(text)
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["run", "run", "run", "append", "append", "reset"])):
            case "run":
                path = data.draw(st.one_of(PATHS, st.sampled_from([*model._scratch, ()]).map(lambda each: (*each, 22))))
                known, announced, passes = model.has_logits(path), model.width(path), model.passes
                assert (model.seconds(path) == 0) == known
                runs_last_again = not path and not known and len(text) == model._arena.length
                width, likely = width_of_pass(model, path)
                assert_as_fresh(graph, [*text, *path], likely, model if states is None else None)
                assert model.seconds(path) == model.pending == 0
                assert model.passes - passes == (not known)
                if states is not None:
                    if not runs_last_again:  # which may need states from before it
                        assert width == (0 if known else announced)
                    assert states.token_ids == text
                    assert len(states._held) <= most_held
            case "append":
                # Often draft tokens, with or without another token after them.
                drafted = st.sampled_from(model._scratch) if model._scratch else PATHS
                for token in data.draw(st.one_of(PATHS, drafted, drafted.map(lambda path: (*path, 22)))):
                    model.append(token)
                    text = [*text, token]
            case "reset":
                text = text[: data.draw(st.integers(0, len(text)))] + data.draw(TEXTS)[: LIMIT - 30]
                text = text[: LIMIT - 20]
                model.reset(text)
        text = text[: LIMIT - 12]
        if len(model._token_ids) > len(text):
            model.reset(text)


def rejected_after(model: DraftModel, graph: GraphSession, text: list[int], length: int, accepted: int) -> list[int]:
    """Draft a chain of which the target accepts some tokens, then continues with one of its own."""
    chain: list[int] = []
    for _ in range(length):
        chain.append(model.top_tokens(tuple(chain), 1).tokens[0])
    own = next(token for token in range(20, 30) if token not in chain[accepted : accepted + 1])
    for token in (*chain[:accepted], own):
        model.append(token)
    text = [*text, *chain[:accepted], own]
    assert_as_fresh(graph, text, model.top_tokens((), 3))
    return text


def test_a_rejection_anywhere_in_a_chain_runs_nothing_again(
    graph: GraphSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = draft(graph, 256), [20, 30, 40]
    copies: list[int] = []
    if (states := model._arena.states) is not None:
        states.spacing = 1 << 12  # of linear attention, which is that large
        monkeypatch.setattr(states, "_copy_at", copies.append)
    model.reset(text)
    passes = 0
    for length, accepted in [(4, 0), (4, 1), (4, 2), (4, 3), (4, 4), (1, 0), (6, 5), (3, 3), (2, 1)]:
        text = rejected_after(model, graph, text, length, accepted)
        passes += length
        assert model.passes == passes + 1  # one for the target's own token, which begins the next chain
    assert model._arena.replayed == 0
    assert copies == ([] if states is None else [3])  # the end of the prompt, for a later one


def test_an_accepted_branch_is_not_run_again(trees: GraphSession) -> None:
    model = draft(trees)
    model.reset([20, 30, 40])
    first, second = model.top_tokens((), 2).tokens
    for path in ((first,), (second,), (first, 60), (second, 61)):
        model.top_tokens(path, 1)
    assert model.passes == 5
    model.append(second)
    model.append(61)
    assert (model.pending, model.seconds(())) == (0, 0)
    assert_as_fresh(trees, [20, 30, 40, second, 61], model.top_tokens((), 3))
    assert model.passes == 5


def test_tokens_of_other_drafters_run_with_the_sequence_in_one_pass(trees: GraphSession) -> None:
    model = draft(trees)
    text = list(range(20, 50))
    model.reset(text)
    spread = (30 - 2) / 128 * model.cost.seconds(128, 0) / 32
    assert model.seconds((7, 8)) == pytest.approx(model.cost.seconds(2 + 2, 0) + spread)
    assert_as_fresh(trees, [*text, 7, 8], model.top_tokens((7, 8), 3))
    assert model.passes == 1
    # The last token and 7 have slots, but their logits are not known: they run again, alone.
    assert_as_fresh(trees, [*text, 7], model.top_tokens((7,), 3))
    assert_as_fresh(trees, [*text, 7, 8, 9], model.top_tokens((7, 8, 9), 3))
    # When they are accepted, it does not matter which of a token's slots is kept.
    for token in (7, 8):
        model.append(token)
    assert_as_fresh(trees, [*text, 7, 8, 9], model.top_tokens((9,), 3))
    # Nothing runs again: the logits after 9 are known, and those of the sequence are.
    assert model.passes == 3
    assert_as_fresh(trees, [*text, 7, 8], model.top_tokens((), 3))


def test_a_long_sequence_is_prefilled_in_chunks(tmp_path: Path) -> None:
    graph = session(write_bundle(tmp_path, max_position_embeddings=600) / "model.onnx")
    model = draft(graph, limit=600)
    text = np.random.default_rng(4).integers(5, VOCABULARY, 300).tolist()
    model.reset(text)
    assert model.pending == 300
    # All but a usual catch-up is spread over the rounds it serves.
    spread = (300 - 2) / 128 * model.cost.seconds(128, 0) / 32
    assert model.seconds(()) == pytest.approx(model.cost.seconds(2, 0) + spread)
    assert_as_fresh(graph, text, model.top_tokens((), 3))
    assert (model.passes, model.pending) == (3, 0)


def test_scratch_slots_survive_the_growth_of_the_arena(tmp_path: Path) -> None:
    graph = session(write_bundle(tmp_path, max_position_embeddings=600) / "model.onnx")
    model = draft(graph, limit=600)
    text = np.random.default_rng(5).integers(5, VOCABULARY, 254).tolist()
    model.reset(text)
    model.top_tokens((), 1)
    generation = model._arena.generation
    for path in ((6,), (9,), (6, 7), (6, 7, 8)):
        model.top_tokens(path, 1)
    assert model._arena.generation > generation
    for token in (6, 7, 8):
        model.append(token)
    passes = model.passes
    assert_as_fresh(graph, [*text, 6, 7, 8], model.top_tokens((), 3))
    assert (model.passes, model.pending) == (passes, 0)


def test_a_sequence_beyond_the_context_has_no_candidates(trees: GraphSession) -> None:
    model = draft(trees, limit=10)
    model.reset(range(20, 29))
    assert len(model.top_tokens((), 2).tokens) == 2
    assert len(model.top_tokens((7,), 2).tokens) == 2
    assert model.top_tokens((7, 8), 2) == TopTokens((), ())
    assert model.top_tokens((9,), 2) == TopTokens((), ())
    for token in (7, 8):
        model.append(token)
    assert model.top_tokens((), 2) == TopTokens((), ())
    assert model.passes == 2
    model.reset([20, 21])
    assert_as_fresh(trees, [20, 21], model.top_tokens((), 2))


def test_a_lower_temperature_sharpens_the_distribution(trees: GraphSession) -> None:
    model = draft(trees)
    model.reset([20, 21, 22])
    plainly, sharper = model.top_tokens((), 300), model.top_tokens((), 300, 0.5)
    assert model.passes == 1
    squares = np.square(plainly.probabilities)
    np.testing.assert_allclose(sharper.probabilities, squares / squares.sum(), rtol=1e-3, atol=1e-9)
    assert plainly.tokens == sharper.tokens


@pytest.mark.parametrize("padded", [True, False], ids=["padding", "trimmed head"])
def test_the_tokens_of_a_smaller_head_share_the_probability(trees: GraphSession, trimmed: Path, padded: bool) -> None:
    whole = draft(trees)
    model = draft(trees, target_vocab=250) if padded else draft(session(trimmed, VOCABULARY), target_ids=KEPT)
    head = set(range(250)) if padded else set(KEPT.tolist())
    for each in (whole, model):
        each.reset(range(5, 40))
    for path in ((), (3,), (int(KEPT[0]), 249)):  # tokens that a trimmed head lacks are read all the same
        of_all = zip(*whole.top_tokens(path, VOCABULARY), strict=True)
        kept = [(token, p) for token, p in of_all if token in head]
        likely = model.top_tokens(path, VOCABULARY)
        assert likely.tokens == tuple(token for token, _ in kept)
        total = sum(p for _, p in kept)
        np.testing.assert_allclose(likely.probabilities, [p / total for _, p in kept], rtol=1e-4)


def test_a_model_with_trimmed_embedding_reads_only_its_tokens(trimmed: Path, trimmed_throughout: Path) -> None:
    head, model = (
        draft(session(trimmed, VOCABULARY), target_ids=KEPT),
        draft(session(trimmed_throughout), target_ids=KEPT),
    )
    text = KEPT[[3, 50, 119, 0]].tolist()
    for each in (head, model):
        each.reset(text)
    for path in ((), (int(KEPT[7]), int(KEPT[8]))):
        expected, likely = head.top_tokens(path, 5), model.top_tokens(path, 5)
        assert likely.tokens == expected.tokens
        np.testing.assert_allclose(likely.probabilities, expected.probabilities, rtol=1e-5)
    other = next(token for token in range(VOCABULARY) if token not in set(KEPT.tolist()))
    assert model.top_tokens((other,), 5) == TopTokens((), ())
    model.append(other)
    passes = model.passes
    assert model.top_tokens((), 5) == model.top_tokens((int(KEPT[0]),), 5) == TopTokens((), ())
    assert model.passes == passes


def test_seconds_spent_are_counted(trees: GraphSession) -> None:
    model = DraftModel(trees.bind(trees.arena(LIMIT)), PassCost(SECONDS), VOCABULARY)
    model.reset([20, 21])
    assert model.take_seconds_spent() == 0
    model.top_tokens((), 1)
    assert model.take_seconds_spent() > 0
    assert model.take_seconds_spent() == 0
    observed = model.cost.observed
    for token in range(5, 9):
        model.top_tokens((token,), 1)
    assert model.cost.observed == observed
    model.take_seconds_spent()
    # One pass in four refines the cost.
    assert (model.cost.observed, model.passes) == (observed + 1, 5)


def test_candidates_are_the_models_with_buckets_of_their_probability(trees: GraphSession) -> None:
    drafter = draft(trees)
    assert drafter.source is Source.MODEL
    half = len(drafter.prior) // 2
    for text in ([20, 21], [30, 40, 50], [7], [200, 100]):
        drafter.reset(text)
        for state in (drafter.state(), drafter.after(drafter.state(), 9)):
            candidates = drafter.candidates(state)
            likely = drafter.top_tokens(state, 3)
            shown = [(token, p) for token, p in zip(*likely, strict=True) if p >= 0.02]
            assert [candidate.token for candidate in candidates] == [token for token, _ in shown]
            for rank, (candidate, (_, p)) in enumerate(zip(candidates, shown, strict=True)):
                assert (candidate.bucket >= half) == (rank > 0)
                # The prior of a class is its middle, which is at most half the widest class off.
                assert drafter.prior[candidate.bucket % half] == pytest.approx(p, abs=0.051)
    for part in (drafter.prior[:half], drafter.prior[half:]):
        assert min(part) > 0
        assert max(part) < 1
        assert list(part) == sorted(part)
    warm = drafter.candidates(())
    drafter.temperature = 0.2
    cold = drafter.candidates(())
    assert cold[0].token == warm[0].token
    assert cold[0].bucket > warm[0].bucket


def test_tokens_behind_the_last_held_states_run_once_more_and_are_charged(hybrid: GraphSession) -> None:
    model, text = draft(hybrid, 256), [20, 30, 40]
    states_of(model)._most_held = 2
    model.reset(text)
    chain: list[int] = []
    for _ in range(6):
        chain.append(model.top_tokens(tuple(chain), 1).tokens[0])
    for token in (*chain[:3], 50):
        model.append(token)
    # Held are the states after the text and after the first draft token; two accepted ones follow.
    assert model.width(()) == 1 + 2
    assert model.seconds(()) == model.cost.seconds(3, 0)
    width, likely = width_of_pass(model, ())
    assert (width, model._arena.replayed) == (3, 2)
    assert_as_fresh(hybrid, [*text, *chain[:3], 50], likely)


def test_buffers_are_reused_and_released(hybrid: GraphSession) -> None:
    prefixes = PrefixCache(lambda: hybrid.arena(256), 1 << 28)
    model, text = draft(hybrid, 256, exchange=prefixes.exchange), list(range(20, 50))
    model.reset(text)
    sizes = []
    for _ in range(8):
        text = rejected_after(model, hybrid, text, 5, 2)
        sizes.append(sum(each.nbytes for each in states_of(model).buffers))
    assert len(set(sizes[2:])) == 1
    arena = model._arena
    model.reset([5, 6, 7])
    assert not arena.states._held
    assert sum(each.nbytes for each in arena.states.buffers) < sizes[-1]
    assert_as_fresh(hybrid, [5, 6, 7], model.top_tokens((), 3))
    # The first sequence is taken from the cache again.
    model.reset([*text[:40], 9])
    assert model._arena is arena
    assert_as_fresh(hybrid, [*text[:40], 9], model.top_tokens((), 3))


def test_a_new_prompt_that_continues_the_last_one_begins_at_its_last_prefill(hybrid: GraphSession) -> None:
    model, prompt = draft(hybrid, 512), np.random.default_rng(2).integers(20, 290, 300).tolist()
    states_of(model).spacing = 1 << 12  # of linear attention, which is that large
    model.reset(prompt)
    text = rejected_after(model, hybrid, prompt, 4, 2)
    model.reset([*text[:-2], 7, 8])
    assert_as_fresh(hybrid, [*text[:-2], 7, 8], model.top_tokens((), 3))
    assert model._arena.replayed <= 300 - 256 + 3


def test_a_failed_pass_costs_the_draft_alone(hybrid: GraphSession, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = draft(hybrid, 256), [20, 30, 40]
    model.reset(text)
    for path in ((), (21,), (21, 22)):
        model.top_tokens(path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(model._bound, "_run_session", _fail)
        for path in ((21, 22, 23), (21, 9)):
            with pytest.raises(EdgeError, match="failed to run"):
                model.top_tokens(path, 1)
    for path in ((21, 22, 23), (21, 9), ()):
        assert_as_fresh(hybrid, [*text, *path], model.top_tokens(path, 3))
    for token in (21, 22, 50):
        model.append(token)
    assert_as_fresh(hybrid, [*text, 21, 22, 50], model.top_tokens((), 3))


def _fail() -> None:
    raise RuntimeError


def test_states_that_are_held_have_a_limit(hybrid: GraphSession, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = sum(each.nbytes for each in hybrid.arena(64).states.types)
    monkeypatch.setattr(layer_states, "_HELD_BYTES", 3 * nbytes)
    model = draft(hybrid)
    model.reset([20, 21])
    for depth in range(6):
        model.top_tokens(tuple(range(30, 30 + depth)), 1)
    assert len(states_of(model)._held) == 3
