"""A draft model that keeps states: the probabilities of one pass over the whole sequence, at the cost it announced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.errors import EdgeError
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.kv import layer_states
from edgerun.runtime.kv.layer_states import LayerStates, StateCheckpoints
from edgerun.runtime.kv.prefix_cache import PrefixCache
from edgerun.runtime.speculation.drafters.draft_model import DraftModel, TopTokens
from support.adversarial_drafters import FixedCost
from support.hybrid_graphs import with_end_states
from support.tiny_models import HYBRID_FAMILIES, write_bundle

VOCABULARY = 300
LIMIT = 64
TEXTS = st.lists(st.integers(20, 24), min_size=1, max_size=20)
"""Few tokens, so that sequences and draft tokens often agree."""
PATHS = st.lists(st.integers(20, 24), max_size=4).map(tuple)


@pytest.fixture(scope="module", params=[*HYBRID_FAMILIES, "end states"])
def graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GraphSession:
    """Convolutions, linear attention, and convolutions whose state is known after the last token of a pass alone."""
    folder, alone = tmp_path_factory.mktemp("hybrid"), request.param == "end states"
    path = write_bundle(folder, "lfm2" if alone else request.param, max_position_embeddings=512) / "model.onnx"
    if alone:
        path = with_end_states(path.parent, folder / "edited", (0, 1, 3))
    return GraphSession(path, SessionConfig(choose_device("cpu"), 1))


def draft(graph: GraphSession, limit: int = LIMIT, prefixes: PrefixCache | None = None) -> DraftModel:
    cost = FixedCost({0: {1: 0.001, 2: 0.0015, 4: 0.002, 128: 0.05}})
    return DraftModel(graph.bind(graph.arena(limit)), cost, VOCABULARY, prefixes=prefixes)


def states_of(model: DraftModel) -> LayerStates:
    states = model._arena.states
    assert states is not None
    return states


def assert_as_fresh(graph: GraphSession, tokens: list[int], likely: TopTokens) -> None:
    """The probabilities are those of a pass over an empty cache."""
    bound = graph.bind(graph.arena(600))
    logits = bound.forward(tokens, logits_for=(len(tokens) - 1,))[0].astype(np.float64)
    weights = np.exp(logits - logits.max())
    expected = weights / weights.sum()
    np.testing.assert_allclose(likely.probabilities, expected[list(likely.tokens)], atol=2e-5)
    np.testing.assert_allclose(likely.probabilities, np.sort(expected)[::-1][: len(likely.tokens)], atol=2e-5)


def width_of_pass(model: DraftModel, path: tuple[int, ...]) -> tuple[int, TopTokens]:
    """Run the model after a path; returns how many tokens ran for it, those included that ran once more."""
    widths: list[int] = []
    forward = model._bound.forward

    def counting(tokens: Any, **options: Any) -> Any:
        before = model._arena.replayed
        logits = forward(tokens, **options)
        widths.append(np.size(tokens) + model._arena.replayed - before)
        return logits

    model._bound.forward = counting  # type: ignore[method-assign]
    try:
        likely = model.top_tokens(path, 3)
    finally:
        model._bound.forward = forward  # type: ignore[method-assign]
    return sum(widths), likely


@settings(max_examples=40)
@given(data=st.data(), most_held=st.sampled_from([1, 2, 100]))
def test_probabilities_are_those_of_a_fresh_pass(graph: GraphSession, most_held: int, data: st.DataObject) -> None:
    model = draft(graph)
    states_of(model)._most_held = most_held
    text = data.draw(TEXTS)
    model.reset(text)
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["run", "run", "run", "append", "append", "reset"])):
            case "run":
                path = data.draw(st.one_of(PATHS, st.sampled_from([*model._scratch, ()]).map(lambda each: (*each, 22))))
                known = model.has_logits(path)
                announced = model.width(path)
                runs_last_again = not path and not known and len(text) == model._arena.length
                width, likely = width_of_pass(model, path)
                assert_as_fresh(graph, [*text, *path], likely)
                if not runs_last_again:  # which may need states from before it
                    assert width == (0 if known else announced)
                assert states_of(model).token_ids == text
                assert len(states_of(model)._held) <= most_held
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
    states_of(model).checkpoints = StateCheckpoints(1 << 12)  # of linear attention, which is that large
    copies: list[int] = []
    monkeypatch.setattr(states_of(model), "_copy_at", copies.append)
    model.reset(text)
    passes = 0
    for length, accepted in [(4, 0), (4, 1), (4, 2), (4, 3), (4, 4), (1, 0), (6, 5), (3, 3), (2, 1)]:
        text = rejected_after(model, graph, text, length, accepted)
        passes += length
        assert model.passes == passes + 1  # one for the target's own token, which begins the next chain
    assert model._arena.replayed == 0
    assert copies == [3]  # the end of the prompt, for a later one


def test_tokens_behind_the_last_held_states_run_once_more_and_are_charged(graph: GraphSession) -> None:
    model, text = draft(graph, 256), [20, 30, 40]
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
    assert_as_fresh(graph, [*text, *chain[:3], 50], likely)


def test_what_replays_cost_is_learned_by_the_width_of_the_pass(graph: GraphSession) -> None:
    model = draft(graph, 256)
    model.reset([20, 30, 40])
    states_of(model)._most_held = 1
    for path in ((), (21,), (21, 22), (21, 22, 23), (21, 22, 23, 24)):
        model.top_tokens(path, 1)
    model._timings.clear()
    model.passes = 8  # one pass in four refines the cost
    for token in (21, 22, 9):
        model.append(token)
    model.top_tokens((), 1)
    assert model._arena.replayed == 2
    assert [timing[0] for timing in model._timings] == [1 + 2]


def test_buffers_are_reused_and_released(graph: GraphSession) -> None:
    prefixes = PrefixCache(lambda: graph.arena(256), 1 << 28)
    model, text = draft(graph, 256, prefixes), list(range(20, 50))
    model.reset(text)
    sizes = []
    for _ in range(8):
        text = rejected_after(model, graph, text, 5, 2)
        sizes.append(sum(each.nbytes for each in states_of(model).buffers))
    assert len(set(sizes[2:])) == 1
    arena = model._arena
    model.reset([5, 6, 7])
    assert not arena.states._held
    assert sum(each.nbytes for each in arena.states.buffers) < sizes[-1]
    assert_as_fresh(graph, [5, 6, 7], model.top_tokens((), 3))
    # The first sequence is taken from the cache again.
    model.reset([*text[:40], 9])
    assert model._arena is arena
    assert_as_fresh(graph, [*text[:40], 9], model.top_tokens((), 3))


def test_a_new_prompt_that_continues_the_last_one_begins_at_its_last_prefill(graph: GraphSession) -> None:
    model, prompt = draft(graph, 512), np.random.default_rng(2).integers(20, 290, 300).tolist()
    states_of(model).checkpoints = StateCheckpoints(1 << 12)  # of linear attention, which is that large
    model.reset(prompt)
    text = rejected_after(model, graph, prompt, 4, 2)
    model.reset([*text[:-2], 7, 8])
    assert_as_fresh(graph, [*text[:-2], 7, 8], model.top_tokens((), 3))
    assert model._arena.replayed <= 300 - 256 + 3


def test_a_failed_pass_costs_the_draft_alone(graph: GraphSession, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = draft(graph, 256), [20, 30, 40]
    model.reset(text)
    for path in ((), (21,), (21, 22)):
        model.top_tokens(path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(model._bound, "_run_session", _fail)
        for path in ((21, 22, 23), (21, 9)):
            with pytest.raises(EdgeError, match="failed to run"):
                model.top_tokens(path, 1)
    for path in ((21, 22, 23), (21, 9), ()):
        assert_as_fresh(graph, [*text, *path], model.top_tokens(path, 3))
    for token in (21, 22, 50):
        model.append(token)
    assert_as_fresh(graph, [*text, 21, 22, 50], model.top_tokens((), 3))


def _fail() -> None:
    raise RuntimeError


def test_states_that_are_held_have_a_limit(graph: GraphSession, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = sum(each.nbytes for each in graph.arena(64).states.types)
    monkeypatch.setattr(layer_states, "_HELD_BYTES", 3 * nbytes)
    model = draft(graph)
    model.reset([20, 21])
    for depth in range(6):
        model.top_tokens(tuple(range(30, 30 + depth)), 1)
    assert len(states_of(model)._held) == 3
