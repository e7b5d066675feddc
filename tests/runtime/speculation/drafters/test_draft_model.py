"""The draft model on real sessions: always the probabilities of one pass over the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.model_metadata import ModelMetadata
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.speculation.drafters.draft_model import DraftModel, TopTokens
from edgerun.runtime.speculation.pass_cost import PassCost
from support.tiny_models import write_bundle

VOCABULARY = 300
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
def graph(untied: Path) -> GraphSession:
    return session(untied / "model.onnx")


@pytest.fixture(scope="module")
def chains_only(untied: Path) -> GraphSession:
    """The same model as a graph without mask and positions."""

    def change(model) -> None:
        for node in model.graph.node:
            if node.op_type == "GroupQueryAttention":
                del node.input[9:]
        kept = [port for port in model.graph.input if port.name not in ("attention_bias", "position_ids")]
        del model.graph.input[:]
        model.graph.input.extend(kept)

    return session(changed(untied, "chains.onnx", change))


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


def draft(graph: GraphSession, limit: int = LIMIT, target_vocab: int = VOCABULARY, target_ids=None) -> DraftModel:
    cost = PassCost({0: {1: 0.001, 2: 0.0015, 4: 0.002}})
    return DraftModel(graph.bind(graph.arena(limit)), cost, target_vocab, target_ids)


def plain(graph: GraphSession, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities after the tokens, float64 `[V]`, and the cache slots of all, from one pass over an empty cache."""
    bound = graph.bind(graph.arena(600))
    logits = bound.forward(tokens, logits_for=(len(tokens) - 1,))[0].astype(np.float64)
    bound.arena.commit(len(tokens))
    weights = np.exp(logits - logits.max())
    return weights / weights.sum(), bound.arena.snapshot()[0]


def assert_as_plain(graph: GraphSession, tokens: list[int], likely: TopTokens) -> None:
    expected = plain(graph, tokens)[0]
    np.testing.assert_allclose(likely.probabilities, expected[list(likely.tokens)], atol=2e-5)
    np.testing.assert_allclose(likely.probabilities, np.sort(expected)[::-1][: len(likely.tokens)], atol=2e-5)
    assert len(set(likely.tokens)) == len(likely.tokens)


def assert_slots_are_the_sequences(graph: GraphSession, model: DraftModel, text: list[int]) -> None:
    arena = model._arena
    assert arena.length <= len(text)
    if arena.length:
        np.testing.assert_allclose(arena.snapshot()[0], plain(graph, text[: arena.length])[1], atol=2e-4)


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
def test_probabilities_are_those_of_a_fresh_pass(
    graph: GraphSession, chains_only: GraphSession, trees: bool, data: st.DataObject
) -> None:
    model = draft(graph if trees else chains_only)
    text = data.draw(TEXTS)
    model.reset(text)
    for _ in range(data.draw(st.integers(1, 6))):
        match data.draw(st.sampled_from(["run", "run", "append", "append", "reset"])):
            case "run":
                path = data.draw(PATHS)
                expected = model.seconds(path)
                passes = model.passes
                likely = model.top_tokens(path, 3)
                assert (model.passes - passes, expected == 0) in ((1, False), (0, True))
                assert_as_plain(graph, [*text, *path], likely)
                assert model.seconds(path) == model.pending == 0
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
        assert_slots_are_the_sequences(graph, model, text)


@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
def test_a_fully_accepted_chain_costs_no_further_pass(
    graph: GraphSession, chains_only: GraphSession, trees: bool
) -> None:
    model = draft(graph if trees else chains_only)
    text = [20, 30, 40]
    model.reset(text)
    for done in range(5):
        # After the first round: the last draft token and the token after it, which have not run.
        assert model.pending == (2 if done else 3)
        assert_as_plain(graph, text, model.top_tokens((), 3))
        chain: list[int] = []
        for _ in range(4):
            chain.append(model.top_tokens(tuple(chain), 1).tokens[0])
        assert model.passes == 4 * (done + 1)
        for token in (*chain, 50):
            model.append(token)
        text += [*chain, 50]
    model.top_tokens((), 1)
    assert_slots_are_the_sequences(graph, model, text)


def test_an_accepted_branch_is_not_run_again(graph: GraphSession) -> None:
    model = draft(graph)
    model.reset([20, 30, 40])
    first, second = model.top_tokens((), 2).tokens
    for path in ((first,), (second,), (first, 60), (second, 61)):
        model.top_tokens(path, 1)
    assert model.passes == 5
    model.append(second)
    model.append(61)
    assert (model.pending, model.seconds(())) == (0, 0)
    assert_as_plain(graph, [20, 30, 40, second, 61], model.top_tokens((), 3))
    assert model.passes == 5


def test_tokens_of_other_drafters_run_with_the_sequence_in_one_pass(graph: GraphSession) -> None:
    model = draft(graph)
    text = list(range(20, 50))
    model.reset(text)
    spread = (30 - 2) / 128 * model.cost.seconds(128, 0) / 32
    assert model.seconds((7, 8)) == pytest.approx(model.cost.seconds(2 + 2, 0) + spread)
    assert_as_plain(graph, [*text, 7, 8], model.top_tokens((7, 8), 3))
    assert model.passes == 1
    # The last token and 7 have slots, but their logits are not known: they run again, alone.
    assert_as_plain(graph, [*text, 7], model.top_tokens((7,), 3))
    assert_as_plain(graph, [*text, 7, 8, 9], model.top_tokens((7, 8, 9), 3))
    # When they are accepted, it does not matter which of a token's slots is kept.
    for token in (7, 8):
        model.append(token)
    assert_as_plain(graph, [*text, 7, 8, 9], model.top_tokens((9,), 3))
    # Nothing runs again: the logits after 9 are known, and those of the sequence are.
    assert model.passes == 3
    assert_as_plain(graph, [*text, 7, 8], model.top_tokens((), 3))
    assert_slots_are_the_sequences(graph, model, [*text, 7, 8])


def test_the_last_token_runs_again_if_only_a_draft_path_was_run(graph: GraphSession) -> None:
    model = draft(graph)
    model.reset([20, 30, 40])
    model.top_tokens((7,), 3)
    assert_as_plain(graph, [20, 30, 40], model.top_tokens((), 3))
    assert_as_plain(graph, [20, 30, 40, 7], model.top_tokens((7,), 3))
    assert model.passes == 3


def test_a_long_sequence_is_prefilled_in_chunks(tmp_path: Path) -> None:
    graph = session(write_bundle(tmp_path, max_position_embeddings=600) / "model.onnx")
    model = draft(graph, limit=600)
    text = np.random.default_rng(4).integers(5, VOCABULARY, 300).tolist()
    model.reset(text)
    assert model.pending == 300
    # All but a usual catch-up is spread over the rounds it serves.
    spread = (300 - 2) / 128 * model.cost.seconds(128, 0) / 32
    assert model.seconds(()) == pytest.approx(model.cost.seconds(2, 0) + spread)
    assert_as_plain(graph, text, model.top_tokens((), 3))
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
    assert_as_plain(graph, [*text, 6, 7, 8], model.top_tokens((), 3))
    assert_slots_are_the_sequences(graph, model, [*text, 6, 7, 8])
    assert (model.passes, model.pending) == (passes, 0)


def test_a_sequence_beyond_the_context_has_no_candidates(graph: GraphSession) -> None:
    model = draft(graph, limit=10)
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
    assert_as_plain(graph, [20, 21], model.top_tokens((), 2))


def test_padding_is_never_proposed(graph: GraphSession) -> None:
    full, target = draft(graph), 250
    model = draft(graph, target_vocab=target)
    for text in ([20, 21], [30, 40, 50], [7]):
        full.reset(text)
        model.reset(text)
        everything = full.top_tokens((), VOCABULARY)
        inside = [(token, p) for token, p in zip(*everything, strict=True) if token < target]
        likely = model.top_tokens((), VOCABULARY)
        assert likely.tokens == tuple(token for token, _ in inside)
        total = sum(p for _, p in inside)
        np.testing.assert_allclose(likely.probabilities, [p / total for _, p in inside], rtol=1e-4)


def test_a_lower_temperature_sharpens_the_distribution(graph: GraphSession) -> None:
    model = draft(graph)
    model.reset([20, 21, 22])
    plainly, sharper = model.top_tokens((), 300), model.top_tokens((), 300, 0.5)
    assert model.passes == 1
    squares = np.square(plainly.probabilities)
    np.testing.assert_allclose(sharper.probabilities, squares / squares.sum(), rtol=1e-3, atol=1e-9)
    assert plainly.tokens == sharper.tokens


def test_a_trimmed_head_has_the_logits_of_the_whole_one(graph: GraphSession, trimmed: Path) -> None:
    whole, model = draft(graph), draft(session(trimmed, VOCABULARY), target_ids=KEPT)
    text = [int(token) for token in range(5, 40)]
    assert set(text) - set(KEPT.tolist())
    for each in (whole, model):
        each.reset(text)
    for path in ((), (3,), (int(KEPT[0]), 299)):
        of_all = zip(*whole.top_tokens(path, VOCABULARY), strict=True)
        kept = [(token, p) for token, p in of_all if token in set(KEPT.tolist())]
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


def test_seconds_spent_are_counted(graph: GraphSession) -> None:
    model = draft(graph)
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


def test_an_empty_sequence_is_refused(graph: GraphSession) -> None:
    with pytest.raises(ValueError, match="an empty sequence has no next token"):
        draft(graph).top_tokens((), 1)
