"""The pointer into a text that is being rewritten: it resumes after changes, and says nothing elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.speculation.drafters.edit import EditDrafter
from edgerun.runtime.speculation.drafters.interface import Drafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.learned_rates import Mixer

SOURCE = list(range(100, 180))
"""A text whose tokens are all different."""
START, END = 1, 2
TEXTS = st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=90))
EDITS = st.lists(st.tuples(st.sampled_from(["replace", "insert", "delete"]), st.integers(0, 79)), max_size=6)


def drafter(answer: list[int], prompt: list[int] | None = None) -> EditDrafter:
    """A drafter that has seen a prompt, by default `SOURCE`, and the beginning of an answer."""
    made = EditDrafter()
    made.reset([START, *SOURCE, END] if prompt is None else prompt)
    for token in answer:
        made.append(token)
    return made


def proposed(made: EditDrafter) -> int | None:
    candidates = made.candidates(made.state())
    assert len(candidates) <= 1
    return candidates[0].token if candidates else None


def path(made: EditDrafter, length: int) -> list[int]:
    """The chain that the drafter proposes."""
    state, tokens = made.state(), list[int]()
    for _ in range(length):
        candidates = made.candidates(state)
        if not candidates:
            break
        tokens.append(candidates[0].token)
        state = made.after(state, tokens[-1])
    return tokens


@pytest.mark.parametrize(
    ("change", "resumed"),
    [
        ([999, SOURCE[41]], SOURCE[42:]),  # one token replaced
        ([999, 998, 997, SOURCE[41]], SOURCE[42:]),  # one token replaced by several
        ([999, SOURCE[45]], SOURCE[46:]),  # several replaced by one
        ([999, SOURCE[40]], SOURCE[41:]),  # one inserted
        ([999, 998, 997, 996, SOURCE[40]], SOURCE[41:]),  # several inserted
        ([SOURCE[41]], SOURCE[42:]),  # one left out
        ([SOURCE[50]], SOURCE[51:]),  # several left out
        ([SOURCE[40], SOURCE[40], SOURCE[41]], SOURCE[42:]),  # one repeated
    ],
)
def test_one_token_of_the_source_resumes_the_copy(change: list[int], resumed: list[int]) -> None:
    made = drafter([*SOURCE[:40], *change])
    assert path(made, 12) == resumed[:12]
    # A suffix drafter alone has a match of one token here, in which it trusts less than half as much.
    suffix = SuffixDrafter()
    suffix.reset([START, *SOURCE, END, *SOURCE[:40], *change])
    rate = Mixer({each.source: each.prior for each in (made, suffix)}).acceptance_rate
    (edit_candidate,) = made.candidates(made.state())
    assert rate(made.source, edit_candidate.bucket) > 0.5
    assert rate(suffix.source, suffix.candidates(suffix.state())[0].bucket) < 0.5


def test_certainty_grows_with_the_tokens_that_match_again() -> None:
    made, rates = drafter([*SOURCE[:40], 999]), list[float]()
    for token in SOURCE[41:70]:
        made.append(token)
        (candidate,) = made.candidates(made.state())
        rates.append(made.prior[candidate.bucket])
    assert rates == sorted(rates)
    assert rates[0] < 0.7 < 0.9 < rates[-1]


def test_a_block_that_moved_is_followed_to_its_place() -> None:
    made = drafter([*SOURCE[:25], *SOURCE[60:80], *SOURCE[25:28]])
    made.append(SOURCE[28])
    assert proposed(made) is None or proposed(made) == SOURCE[29]
    for token in SOURCE[29:50]:
        made.append(token)
    assert proposed(made) == SOURCE[50]


def test_a_long_insertion_ends_the_proposals_and_three_tokens_resume_the_copy() -> None:
    made = drafter([*SOURCE[:40], *range(500, 560)])
    assert proposed(made) is None
    for token in SOURCE[40:43]:
        assert proposed(made) is None
        made.append(token)
    assert proposed(made) == SOURCE[43]


def test_the_latest_version_of_a_text_is_the_source() -> None:
    changed = [*SOURCE[:30], 999, *SOURCE[31:]]
    made = drafter(SOURCE[:29], [START, *SOURCE, END, *changed, END])
    assert path(made, 3) == [SOURCE[29], 999, SOURCE[31]]


def test_an_answer_may_rewrite_its_own_beginning() -> None:
    made = drafter([*SOURCE, 7, *SOURCE[:30]], [START])
    assert proposed(made) == SOURCE[30]


@pytest.mark.parametrize("answer", [[], SOURCE[:3], SOURCE[:19], list(range(300, 400)), [5, 6, 7] * 3])
def test_nothing_is_proposed_where_nothing_is_rewritten(answer: list[int]) -> None:
    made: Drafter = drafter(answer)
    assert made.state() is None
    assert not made.candidates(made.state())


def test_many_divergences_end_the_proposals() -> None:
    made = drafter(SOURCE[:40])
    for at in range(40, 60, 2):
        made.append(900 + at)
        made.append(SOURCE[at + 1])
    assert proposed(made) is None


@given(EDITS)
def test_an_edited_copy_is_found_again_behind_each_edit(edits: list[tuple[str, int]]) -> None:
    """Whatever was changed: the next tokens are proposed once four unchanged ones have followed the change."""
    kept = {at for _, at in edits}
    answer: list[tuple[int, bool]] = []
    changes = {at: kind for kind, at in edits}
    for at, token in enumerate(SOURCE):
        kind = changes.get(at)
        if kind == "insert":
            answer.append((900 + at, False))
        if kind == "replace":
            answer.append((900 + at, False))
        elif kind != "delete":
            answer.append((token, True))
    made, since, copied = drafter([]), 0, 0
    for index, (token, unchanged) in enumerate(answer[:-1]):
        made.append(token)
        near = unchanged and (not index or token == answer[index - 1][0] + 1)
        since = since + 1 if near else 1 if unchanged else 0
        copied = copied + 1 if near else copied // 2
        if since >= 4 and copied > 60 and token + 1 in SOURCE and token + 1 - SOURCE[0] not in kept:
            assert proposed(made) == token + 1


@given(TEXTS, TEXTS, st.lists(st.integers(0, 4), max_size=8))
def test_states_and_candidates_are_valid_for_any_text(prompt: list[int], answer: list[int], ahead: list[int]) -> None:
    made, text = drafter([], prompt), list(prompt)
    for token in answer:
        made.append(token)
        text.append(token)
        state = made.state()
        for next_token in ahead:
            candidates = made.candidates(state)
            assert all(candidate.token in text and 0 <= candidate.bucket < len(made.prior) for candidate in candidates)
            assert len(candidates) <= 1
            state = made.after(state, next_token)
    # What was drafted has not changed the drafter.
    again = drafter(answer, prompt)
    assert (again.state(), again.candidates(again.state())) == (made.state(), made.candidates(made.state()))


@given(TEXTS, TEXTS)
def test_a_path_of_candidates_is_what_appending_them_gives(prompt: list[int], answer: list[int]) -> None:
    made = drafter(answer, prompt)
    ahead, tokens = made.state(), path(made, 5)
    for token in tokens:
        ahead = made.after(ahead, token)
        made.append(token)
        state = made.state()
        if ahead is not None:
            assert state[:2] == ahead[:2]
            assert made.candidates(state) == made.candidates(ahead)


@given(st.lists(st.tuples(st.integers(0, 60), TEXTS), max_size=5))
def test_reset_starts_again_with_another_sequence(changes: list[tuple[int, list[int]]]) -> None:
    made, text = EditDrafter(), list[int]()
    for kept, tail in changes:
        text = [*text[:kept], *tail]
        made.reset(text)
        fresh = drafter([], text)
        for token in (0, 1, 2, 0, 1, 2, *text[:30]):
            assert made.state() == fresh.state()
            made.append(token)
            fresh.append(token)
        made.reset(text)
