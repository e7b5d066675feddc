"""The size of a draft's LM head: agreement, times, best size, and the ranking of the tokens that it keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun import InputError
from edgerun.export import FP32
from edgerun.export.check.contract_session import ContractSession
from edgerun.export.drafts.head_size import (
    TARGET_WIDTHS,
    TokenRanking,
    agreement_by_size,
    best_size,
    count_agreement,
    rank_tokens,
    tokens_per_second,
)
from support.tiny_models import write_bundle


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 14))
def test_agreement_is_what_trimming_would_give(seed: int, vocabulary: int, target_vocabulary: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.standard_normal((5, vocabulary)).astype(np.float32)
    preferred = random.integers(0, target_vocabulary, 5)
    order = random.permutation(vocabulary)
    found = count_agreement([(preferred, logits)], TokenRanking(order, 1))
    for size in range(1, vocabulary + 1):
        kept = order[:size]
        assert found[size] == pytest.approx(np.mean(kept[logits[:, kept].argmax(axis=1)] == preferred))


def test_agreement_of_two_models(tmp_path: Path) -> None:
    target, draft = (write_bundle(tmp_path / str(seed), weights=FP32, seed=seed) for seed in (0, 1))
    random = np.random.default_rng(0)
    texts = [random.integers(0, 300, length) for length in (70, 2, 33)]
    starts = [40, 0, 20]
    ranking = rank_tokens(texts, 300, {0})
    reported: list[float] = []
    found = agreement_by_size(target, draft, ranking, texts, starts, reported.append)
    assert reported == pytest.approx([1 / 3, 2 / 3, 1])

    def logits(bundle: Path) -> np.ndarray:
        """Logits at the positions before a token that the draft predicts."""
        rows = []
        for text, start in zip(texts, starts, strict=True):
            session = ContractSession(bundle, len(text))
            rows.append(session.forward(text[:-1], np.arange(len(text) - 1))[max(0, start - 1) :])
        return np.concatenate(rows)

    preferred, predicted = logits(target).argmax(axis=1), logits(draft)
    assert len(preferred) == 30 + 1 + 13
    for size in (1, 10, 150, 300):
        kept = ranking.order[:size]
        assert found[size] == pytest.approx(np.mean(kept[predicted[:, kept].argmax(axis=1)] == preferred))
    assert found.shape == (301,)


def vocabulary(tokens: int, min_tokens: int = 1) -> TokenRanking:
    return TokenRanking(np.arange(tokens), min_tokens)


FLAT = dict.fromkeys(TARGET_WIDTHS, 1.0)
HALF = np.full(1001, 0.5)


@pytest.mark.parametrize(
    ("agreement", "least", "seconds", "expected"),
    [
        (np.linspace(0, 0.8, 1001), 1, (0.1, 0.1), 1000),  # rows cost nothing
        (HALF, 7, (0.9, 0.1), 7),  # rows gain nothing
        (HALF, 1, (0.1, 0.099), 1000),  # a gain within the noise is ignored
        (HALF, 1, (0.3, 0.1), 1),
        (HALF, 1, (0.1, 0.2), 1000),  # noise: a larger head is never faster
    ],
)
def test_rows_are_kept_where_they_pay(agreement, least: int, seconds: tuple[float, float], expected: int) -> None:
    assert best_size(vocabulary(1000, least), agreement, FLAT, *seconds) == expected


def test_the_gain_is_weighed_against_the_cost() -> None:
    agreement = 0.8 * (1 - np.exp(-np.arange(1001) / 100))
    chosen = [best_size(vocabulary(1000), agreement, FLAT, whole, 0.05) for whole in (0.06, 0.3, 3.0)]
    assert 1000 >= chosen[0] > chosen[1] > chosen[2] > 1


def test_the_best_chain_length_is_used() -> None:
    assert tokens_per_second(1.0, 0.0, FLAT) == 8.0
    assert tokens_per_second(0.5, 0.25, {1: 1.0, **{rows: 1.0 + rows for rows in range(2, 9)}}) == pytest.approx(
        1.5 / 3.25
    )


def texts(*ids: list[int]) -> list[np.ndarray]:
    return [np.array(each, np.int64) for each in ids]


def test_order_is_forced_tokens_then_frequent_ones_then_the_others() -> None:
    ranking = rank_tokens(texts([6, 4, 4], [5, 5, 5, 4, 6]), 8, {7})
    assert ranking.order.tolist() == [7, 4, 5, 6, 0, 1, 2, 3]
    assert ranking.min_tokens == 1
    assert ranking.kept(3).tolist() == [4, 5, 7]


def test_a_common_prefix_is_kept_but_a_single_text_has_no_template() -> None:
    ranking = rank_tokens(texts([2, 3, 1, 1], [2, 3, 4, 1], [2, 3]), 6, ())
    assert (ranking.order[:2].tolist(), ranking.min_tokens) == ([2, 3], 2)
    assert rank_tokens(texts([2, 3]), 6, {5}).min_tokens == 1


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=20), min_size=1, max_size=6).filter(any),
    st.sets(st.integers(0, 50), max_size=5),
    st.integers(1, 45),
)
def test_every_token_is_ranked_once(lists: list[list[int]], always: set[int], vocabulary: int) -> None:
    ranking = rank_tokens(texts(*lists), vocabulary, always)
    assert sorted(ranking.order.tolist()) == list(range(vocabulary))
    assert {token for token in always if token < vocabulary} <= set(ranking.kept(ranking.min_tokens).tolist())
    counts = np.bincount(np.concatenate(texts(*lists)), minlength=51)
    free = counts[ranking.order[ranking.min_tokens :]]
    assert (np.diff(free) <= 0).all()
    for size in range(ranking.min_tokens, vocabulary + 1):
        kept = ranking.kept(size)
        assert kept.size == size
        assert (np.diff(kept) > 0).all()


def test_too_few_or_too_many_tokens_and_no_text_are_refused() -> None:
    ranking = rank_tokens(texts([1, 2, 3]), 8, {6, 7})
    for tokens in (0, 1, 9):
        with pytest.raises(InputError) as caught:
            ranking.kept(tokens)
        assert str(caught.value) == (f"a draft's head cannot have {tokens} tokens; give 2 to 8: 2 are always kept")
    with pytest.raises(InputError, match="no text to count tokens in; give a text"):
        rank_tokens(texts([], []), 8, ())
