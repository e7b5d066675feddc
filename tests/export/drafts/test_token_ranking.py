"""The ranking of tokens that a draft's head keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun import InputError
from edgerun.export.drafts.head_size import rank_tokens


def texts(*ids: list[int]) -> list[np.ndarray]:
    return [np.array(each, np.int64) for each in ids]


def test_order_is_forced_tokens_then_frequent_ones_then_the_others() -> None:
    ranking = rank_tokens(texts([6, 4, 4], [5, 5, 5, 4, 6]), 8, {7})
    assert ranking.order.tolist() == [7, 4, 5, 6, 0, 1, 2, 3]
    assert ranking.min_tokens == 1
    assert ranking.kept(3).tolist() == [4, 5, 7]


def test_a_common_prefix_is_kept() -> None:
    ranking = rank_tokens(texts([2, 3, 1, 1], [2, 3, 4, 1], [2, 3]), 6, ())
    assert (ranking.order[:2].tolist(), ranking.min_tokens) == ([2, 3], 2)


def test_a_single_text_has_no_template() -> None:
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


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_too_few_or_too_many_tokens_are_refused(tokens: int) -> None:
    ranking = rank_tokens(texts([1, 2, 3]), 8, {6, 7})
    expected = f"a draft's head cannot have {tokens} tokens; give 2 to 8: 2 are always kept"
    with pytest.raises(InputError) as caught:
        ranking.kept(tokens)
    assert str(caught.value) == expected


def test_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="no text to count tokens in; give a text"):
        rank_tokens(texts([], []), 8, ())
