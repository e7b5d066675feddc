from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.speculation.drafters.interface import (
    EARLIER_CONVERSATIONS,
    SAME_CONVERSATION,
    Agreement,
    Candidate,
    bucket,
)
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter

EVERY_END = 1 << 20
TEXTS = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))
TOKENS = st.integers(0, 4)


def drafter(text: list[int], reach: int = EVERY_END) -> SuffixDrafter:
    made = SuffixDrafter(reach)
    made.reset(text)
    return made


def followers(text: list[int], pattern: list[int]) -> list[int]:
    """The tokens after each occurrence of the pattern, in order."""
    size = len(pattern)
    return [text[at + size] for at in range(len(text) - size) if text[at : at + size] == pattern]


def occurs(text: list[int], pattern: list[int]) -> bool:
    return any(text[at : at + len(pattern)] == pattern for at in range(len(text) - len(pattern) + 1))


def longest_repeated_end(text: list[int]) -> list[int]:
    """The longest suffix of the text that occurs earlier in it."""
    return next(text[at:] for at in range(1, len(text) + 2) if at >= len(text) or occurs(text[:-1], text[at:]))


def longest_known_end(text: list[int], pattern: list[int]) -> list[int]:
    return next(pattern[at:] for at in range(len(pattern) + 1) if occurs(text, pattern[at:]))


def scanned(text: list[int], match: list[int]) -> list[Candidate]:
    """The candidates after a match, found from every occurrence of each of its suffixes."""
    found: dict[int, Candidate] = {}
    for at in range(len(match)):
        after = followers(text, match[at:])
        if not after:
            continue
        counts = Counter(after)
        if len(counts) == 1:
            agreement = Agreement.ONCE if len(after) == 1 else Agreement.ALWAYS
        else:
            agreement = Agreement.MOSTLY if 2 * counts[after[-1]] > len(after) else Agreement.SPLIT
        for token in dict.fromkeys(reversed(after)):
            if token not in found and len(found) < 3:
                found[token] = Candidate(token, bucket(len(match) - at, agreement, len(found)))
    return list(found.values())


@given(TEXTS)
def test_candidates_are_those_that_a_scan_finds(text: list[int]) -> None:
    made = drafter(text)
    match = longest_repeated_end(text)
    assert made.state()[1] == len(match)
    assert made.candidates(made.state()) == scanned(text, match)


@given(TEXTS, st.lists(TOKENS, max_size=8))
def test_a_drafted_path_matches_its_longest_suffix_that_occurs(text: list[int], path: list[int]) -> None:
    made = drafter(text)
    state, match = made.state(), longest_repeated_end(text)
    for token in path:
        state = made.after(state, token)
        match = longest_known_end(text, [*match, token])
        assert state[1] == len(match)
        assert made.candidates(state) == scanned(text, match)
    assert made.candidates(made.state()) == scanned(text, longest_repeated_end(text))


@given(TEXTS, TOKENS)
def test_the_state_after_a_token_is_that_of_the_longer_sequence(text: list[int], token: int) -> None:
    made = drafter(text)
    ahead = made.after(made.state(), token)
    made.append(token)
    assert made.state()[1] == ahead[1]
    assert made.candidates(made.state()) == made.candidates(ahead)


@given(TEXTS, TEXTS)
def test_a_state_stays_valid_while_the_sequence_grows(text: list[int], more: list[int]) -> None:
    made = drafter(text)
    state, match = made.state(), longest_repeated_end(text)
    for token in more:
        made.append(token)
    assert made.candidates(state) == scanned(text + more, match)


@given(st.lists(st.tuples(st.integers(0, 60), TEXTS), max_size=6))
def test_reset_starts_again_with_another_sequence(changes: list[tuple[int, list[int]]]) -> None:
    made, text = SuffixDrafter(), list[int]()
    for kept, tail in changes:
        text = [*text[:kept], *tail]
        made.reset(text)
        fresh = drafter(text, 16)
        assert made.state() == fresh.state()
        state = made.state()
        for token in (0, 1, 2, 0):
            assert made.candidates(state) == fresh.candidates(state)
            assert made.after(state, token) == fresh.after(state, token)
            state = made.after(state, token)


@given(TEXTS, st.lists(TOKENS, max_size=4), st.integers(1, 3))
def test_with_a_short_reach_candidates_still_followed_the_match(text: list[int], path: list[int], reach: int) -> None:
    made = drafter(text, reach)
    state, match = made.state(), longest_repeated_end(text)
    assert state[1] == len(match)
    for token in path:
        state = made.after(state, token)
        match = [*match, token][len(match) + 1 - state[1] :] if state[1] else []
        assert occurs(text, match)
    tokens = [candidate.token for candidate in made.candidates(state)]
    assert len(set(tokens)) == len(tokens) <= 3
    assert all((match[-1], token) in set(pairwise(text)) for token in tokens)


@pytest.mark.parametrize("text", [[0] * 4000, [0, 1] * 2000, list(range(4000)), [n * n % 61 for n in range(4000)]])
def test_memory_is_bounded_by_the_length(text: list[int]) -> None:
    tracemalloc.start()
    try:
        made = drafter(text, 16)
        assert tracemalloc.get_traced_memory()[0] < 400 * len(text)
    finally:
        tracemalloc.stop()
    assert len(made.candidates(made.state())) <= 3


def test_every_kind_of_evidence_has_a_bucket_of_its_own() -> None:
    lengths = (1, 2, 3, 4, 5, 7, 10, 16, 32)
    kinds = [(agreement, rank) for agreement in Agreement for rank in (0, 1)[: 1 + (agreement >= Agreement.MOSTLY)]]
    buckets = [bucket(length, *kind) for kind in kinds for length in lengths]
    assert buckets == list(range(len(SAME_CONVERSATION))) == list(range(len(EARLIER_CONVERSATIONS)))
    assert bucket(6, Agreement.SPLIT, 2) == bucket(5, Agreement.SPLIT, 1)
    assert bucket(100_000, Agreement.SPLIT, 0) == bucket(32, Agreement.SPLIT, 0)


@pytest.mark.parametrize("prior", [SAME_CONVERSATION, EARLIER_CONVERSATIONS])
def test_longer_matches_have_higher_priors(prior: tuple[float, ...]) -> None:
    lengths = (1, 2, 3, 4, 5, 7, 10, 16, 32)
    for agreement in Agreement:
        shares = [prior[bucket(length, agreement, 0)] for length in lengths]
        assert shares == sorted(shares)
        if agreement >= Agreement.MOSTLY:
            assert all(prior[bucket(length, agreement, 1)] < prior[bucket(length, agreement, 0)] for length in lengths)
