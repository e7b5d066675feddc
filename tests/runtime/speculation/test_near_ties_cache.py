"""Near ties: cache slots marked as plain equal those of plain decoding bit for bit, and near ties are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.speculator import Speculator
from edgerun.runtime.speculation.verification import NearTies
from support.adversarial_drafters import adversaries, eager, speculator_of

VOCABULARY = 300
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def graph(tiny_bundle_of: Callable[[str, str], Path]) -> GraphSession:
    """8-bit weights and activations, where wide passes differ from narrow ones."""
    return GraphSession(tiny_bundle_of("qwen3", "int8") / "model.onnx", SessionConfig(choose_device("cpu"), 1))


def turn(
    bound: BoundSession,
    prompt: list[int],
    speculator: Speculator | None,
    epsilon: float | None,
    check: Callable[[], None],
) -> list[int]:
    """The tokens of one answer; `check` is called after every round."""
    sampler = Sampler(GREEDY, VOCABULARY)
    near_ties = None if epsilon is None else NearTies(bound, sampler, epsilon, lambda: False)
    tokens: list[int] = []
    for step in decode(bound, prompt, sampler, DecodeLimits(16), speculator, near_ties):
        tokens += step.tokens
        check()
    return tokens


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1e9], ids=["none again", "some again", "all again"])
def test_slots_marked_as_plain_equal_plain_decodings(graph: GraphSession, epsilon: float) -> None:
    other_rows = False
    for seed in range(6):
        random = np.random.default_rng(seed)
        plain, fast = (graph.bind(graph.arena(256)) for _ in range(2))
        speculator = eager(SuffixDrafter(), RecyclingDrafter(RecycledTable(VOCABULARY)))
        text: list[int] = []
        for kept in (0, 3, 12):
            # The sequence up to somewhere in the last answer, and a few more tokens.
            same = max(0, len(text) - 16 + kept) if text else 0
            prompt = [*text[:same], *random.integers(5, VOCABULARY, 9).tolist()]
            for bound in (plain, fast):
                bound.arena.rewind_to(min(bound.arena.length, same))
            assert fast.arena.length == plain.arena.length
            text = [*prompt, *turn(plain, prompt, None, None, lambda: None)]
            (rows,) = plain.arena.snapshot()

            def check(fast: BoundSession = fast, rows: np.ndarray = rows, begun: int = len(prompt)) -> None:
                nonlocal other_rows
                arena = fast.arena
                assert begun <= arena.plain_length <= arena.length
                (own,) = arena.snapshot()
                np.testing.assert_array_equal(own[..., : arena.plain_length, :], rows[..., : arena.plain_length, :])
                other_rows |= not np.array_equal(own, rows[..., : arena.length, :])

            drafter = speculator if kept else speculator_of(adversaries(text, VOCABULARY, 0, seed)["nearly right"])
            assert [*prompt, *turn(fast, prompt, drafter, epsilon, check)] == text or epsilon == 0
            if epsilon == 0:
                break
    # Had all been the same anyway, this would show nothing.
    assert other_rows or epsilon > 1


@given(st.integers(0, 10_000), st.sampled_from([2, 3, 64, 127, 128, 191, 192, 300]), st.sampled_from([1.0, 1.5, 0.7]))
def test_the_margin_is_that_of_the_best_logit_over_the_second(seed: int, size: int, penalty: float) -> None:
    random = np.random.default_rng(seed)
    logits = (random.integers(-8, 9, size) / 4).astype(np.float32)
    sampler = Sampler(SamplingParams(repeat_penalty=penalty), size)
    seen = random.integers(0, size, 5)
    sampler.observe(seen)
    scores = logits.astype(np.float64)
    for token in set(seen.tolist()):
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    first, second = sorted(scores)[:-3:-1]
    assert sampler.top_two_margin(logits) == pytest.approx(first - second, abs=1e-6)
