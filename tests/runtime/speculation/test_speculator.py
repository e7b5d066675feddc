"""Rounds of speculation over a toy target: statistics, what is learned, and when drafting is disabled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.drafters.interface import Candidate, Drafter
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.learned_rates import DraftingBalance
from edgerun.runtime.speculation.pass_cost import PassCost
from edgerun.runtime.speculation.replay import OracleDrafter
from edgerun.runtime.speculation.rounds import Round
from edgerun.runtime.speculation.speculator import Speculator
from edgerun.runtime.speculation.tree import Source
from edgerun.runtime.speculation.verification import VerifyResult, verify_tree
from support.adversarial_drafters import NEARLY_FREE, FixedCost, eager

VOCABULARY = 6
NOBODY = frozenset[int]()


def toy_logits(text: Sequence[int]) -> np.ndarray:
    """float32 `[V]` after a sequence: depends on its last two tokens only, so that it repeats itself."""
    return np.random.default_rng([7, *text[-2:]]).standard_normal(VOCABULARY).astype(np.float32)


def verify(text: Sequence[int], draft: Round, most: int) -> tuple[VerifyResult, np.ndarray]:
    """Verify a draft behind `text`, whose last token is the anchor, with the toy target."""
    tree = draft.tree
    logits = np.stack(
        [toy_logits([*text[:-1], *tree.tokens[list(tree.path_to(node))].tolist()]) for node in range(len(tree))]
    )
    return verify_tree(tree, logits, Sampler(SamplingParams(), VOCABULARY), len(text), NOBODY, most), logits


def write(speculator: Speculator, text: list[int], count: int, room: int = 10_000) -> list[Round | None]:
    """Append `count` tokens to `text`; returns every round, None for one with drafting disabled."""
    speculator.reset(text)
    rounds: list[Round | None] = []
    end = len(text) + count
    while len(text) < end:
        if speculator.disabled:
            text.append(int(toy_logits(text).argmax()))
            speculator.skip_round(text[-1], 0.25)
            rounds.append(None)
            continue
        most = end - len(text)
        draft = speculator.propose(len(text) - 1, most, room)
        if draft.growth is not None:
            synced = [each._token_ids for each in speculator.drafters if isinstance(each, SuffixDrafter)]
            assert all(token_ids == text for token_ids in synced)
        result, logits = verify(text, draft, most)
        speculator.observe(draft, result, logits, len(text) - 1, 0.25)
        check(draft, result, most, room)
        text += result.emitted(draft.tree)
        rounds.append(draft)
    return rounds


def check(one: Round, result: VerifyResult, most: int, room: int) -> None:
    tree = one.tree
    assert one.width == len(tree) == 1 + sum(one.drafted) <= min(16, room)
    assert tree.depths.max() < most
    assert one.emitted == len(result.accepted_path) == 1 + sum(one.accepted) <= most
    assert len(one.candidates) == len(one.drafted) == len(one.accepted) == len(Source)
    for accepted, drafted, grown in zip(one.accepted, one.drafted, one.candidates, strict=True):
        assert 0 <= accepted <= drafted <= grown
    assert one.drafted[Source.ANCHOR] == one.candidates[Source.ANCHOR] == 0
    assert one.drafted_by_depth == tuple(np.bincount(tree.depths)[1:])
    assert sum(one.accepted) <= len(one.drafted_by_depth) <= sum(one.drafted)
    assert one.expected_tokens == (pytest.approx(tree.path_prob.sum(), rel=1e-4) if len(tree) > 1 else 1.0)
    assert one.target_s == 0.25
    assert one.host_s > 0
    assert (one.draft_passes, one.draft_s, one.note) == (0, 0.0, "")


def plain(text: list[int], count: int) -> list[int]:
    text = list(text)
    for _ in range(count):
        text.append(int(toy_logits(text).argmax()))
    return text


@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
@pytest.mark.parametrize("room", [1, 2, 3, 7, 10_000])
def test_statistics_add_up_and_the_output_is_the_targets(trees: bool, room: int) -> None:
    speculator = eager(SuffixDrafter(), RecyclingDrafter(RecycledTable(VOCABULARY)), trees=trees)
    accepted = 0
    for start in range(5):
        text = [start, 1]
        expected = plain(text, 80)
        rounds = write(speculator, text, 80, room)
        assert text == expected
        assert trees or all(one.tree.is_chain for one in rounds if one is not None)
        accepted += sum(one.emitted - 1 for one in rounds if one is not None)
    assert (accepted > 0) == (room > 1)


def test_one_token_left_or_one_free_slot_is_a_plain_step() -> None:
    speculator = eager(OracleDrafter([1] * 50, 2))
    speculator.reset([0, 1])
    for most, room in ((1, 9), (9, 1), (1, 1)):
        draft = speculator.propose(1, most, room)
        assert (draft.tree.tokens.tolist(), draft.growth, draft.expected_tokens) == ([1], None, 1.0)
    assert len(speculator.propose(1, 3, 9).tree) == 3
    assert len(speculator.propose(1, 9, 3).tree) == 3


def test_the_rate_is_that_of_emitted_tokens_and_at_least_that_of_plain_steps() -> None:
    text = [1] * 600
    speculator = eager(OracleDrafter(text, 0))
    speculator.reset(text[:2])
    zeros = np.zeros((16, VOCABULARY), np.float32)
    for taken in (True, False):
        for _ in range(400):
            draft = speculator.propose(1, 7, 50)
            path = tuple(range(len(draft.tree))) if taken else (0,)
            speculator.observe(draft, VerifyResult(path, 1), zeros, 1, 1.0)
            speculator.reset(text[:2])
        assert speculator.rate == pytest.approx(7.0 if taken else 1.0, rel=0.1)


class Priced(Drafter):
    """A draft model with given seconds per pass."""

    source = Source.MODEL
    prior = (0.9,)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def reset(self, token_ids: Sequence[int]) -> None:
        pass

    def append(self, token: int) -> None:
        pass

    def state(self) -> int:
        return 0

    def after(self, state: int, token: int) -> int:
        return state + 1

    def candidates(self, state: int) -> list[Candidate]:
        return [Candidate(1, 0)]

    def seconds(self, state: int) -> float:
        return self._seconds

    def settle(self, gained: float) -> None:
        self.gained = gained

    def take_seconds_spent(self) -> float:
        return 0.125


@pytest.mark.parametrize(
    ("seconds", "recompute_s", "note"), [(9.0, 0.0, "draft model not run"), (0.0, 0.0, ""), (0.0, 0.5, "near tie")]
)
def test_a_round_notes_why_nothing_was_drafted(seconds: float, recompute_s: float, note: str) -> None:
    speculator = Speculator([], FixedCost(NEARLY_FREE), model=Priced(seconds))
    speculator.reset([0, 1])
    draft = speculator.propose(1, 9, 9)
    logits = np.zeros((len(draft.tree), VOCABULARY), np.float32)
    speculator.observe(draft, VerifyResult((0,), 1), logits, 1, 0.25, recompute_s, 0.0625)
    assert draft.note.startswith(note)
    assert bool(draft.note) == bool(note)
    assert (draft.draft_passes > 0) == (seconds == 0)
    assert draft.draft_s == 0.125
    assert draft.target_s == 0.25 + recompute_s
    if seconds:
        assert "for the time of 9.0" in draft.note


def spells(drafting: DraftingBalance, balance: Callable[[], float], rounds: int) -> list[tuple[int, int]]:
    """(rounds of drafting, rounds of the wait after them) in turn, over that many rounds of drafting."""
    found, drafted = [], 0
    for _ in range(rounds):
        assert drafting.backoff.left == 0
        drafted += 1
        drafting.observe(balance())
        if drafting.backoff.left:
            found.append((drafted, drafting.backoff.left))
            drafting.backoff.left = 0
            drafted = 0
    return found


@pytest.mark.parametrize(
    ("balance", "rounds", "first"), [(-0.01, 8, 32), (-0.5, 3, 256)], ids=["that does not pay", "hopeless"]
)
def test_drafting_is_disabled_for_waits_that_double_up_to_a_limit(balance: float, rounds: int, first: int) -> None:
    waits = [min(first * 2**turn, 4096) for turn in range(10)]
    assert spells(DraftingBalance(), lambda: balance, 10 * rounds) == [(rounds, wait) for wait in waits]


def test_drafting_that_pays_is_never_disabled_and_resets_the_waits() -> None:
    balances = iter([*[0.2] * 30, -3.0, *[0.2] * 30])  # one bad round among good ones
    assert spells(DraftingBalance(), lambda: next(balances), 61) == []
    drafting = DraftingBalance()
    assert spells(drafting, lambda: 0.0, 500) == spells(drafting, lambda: 0.3, 500) == []
    drafting = DraftingBalance()
    assert [wait for _, wait in spells(drafting, lambda: -0.05, 24)] == [32, 64, 128]
    assert spells(drafting, lambda: 0.1, 40) == []
    assert spells(drafting, lambda: -0.05, 200)[0][1] == 32


def test_a_disabled_speculator_drafts_again_after_its_wait() -> None:
    speculator = eager(OracleDrafter(plain([0, 1], 60)[2:], 2))
    speculator.balance.backoff.left = 10
    text = [0, 1]
    rounds = write(speculator, text, 60)
    assert text == plain([0, 1], 60)
    assert [one is None for one in rounds[:12]] == [True] * 10 + [False] * 2
    # The drafter was given the tokens of the plain rounds.
    assert rounds[10].emitted == 16


@pytest.mark.parametrize(("pass_s", "resumes"), [(1.0, True), (1e-5, False)], ids=["light", "heavy"])
def test_a_disabled_speculator_resumes_at_repetitions_if_lookups_are_cheap(pass_s: float, resumes: bool) -> None:
    cost = FixedCost({128: {1: pass_s, 2: 2 * pass_s}})
    speculator = Speculator([SuffixDrafter()], cost)
    speculator.reset(list(range(40)))
    draft = speculator.propose(39, 10, 10)
    speculator.observe(draft, VerifyResult((0,), 40), np.zeros((1, 60), np.float32), 39, pass_s)
    speculator.balance.backoff.left = 1000
    for token in (50, 3, 4, 5):
        speculator.skip_round(token, pass_s)
        assert speculator.disabled
    speculator.skip_round(6, pass_s)
    assert speculator.disabled is not resumes


def test_the_rate_follows_when_the_cost_of_a_long_context_becomes_known() -> None:
    speculator = Speculator((SuffixDrafter(),), PassCost({128: {1: 0.001, 2: 0.0012}}))
    speculator.reset([1])
    for token in range(20):
        draft = speculator.propose(9000 + token, 100, 100)
        if token > 1:
            assert 15 < speculator.rate < 25
        speculator.observe(draft, VerifyResult((0,), token), np.zeros((1, 60), np.float32), 9000 + token, 0.05)
