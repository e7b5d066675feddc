"""Candidates from repetitions within the sequence: a suffix automaton that grows with it.

The automaton (Blumer et al. 1985; for drafting: SAM-Decoding, Hu et al. 2024) has a state for every set of substrings
that end at the same places. The link of a state leads to its longest suffix that also ends elsewhere. So the link of
the whole sequence's state is the longest suffix of the sequence that occurred before, and the end of the sequence never
counts as an occurrence of itself. Transitions record how often each was taken, and which one last.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

from ..tree import Source
from .interface import SAME_CONVERSATION, Agreement, Candidate, Drafter, bucket

_MAX_CANDIDATES: Final = 3
_NONE: Final = -1
"""Marks a state that no token has followed yet."""
_SEVERAL: Final = -2
"""Marks a state that several tokens have followed; see its branches."""
_SHIFT: Final = 24
"""A branch is stored as one number, `target << _SHIFT | count`."""
_COUNT: Final = (1 << _SHIFT) - 1
"""Mask of the count; sequences are shorter than this."""

Match: TypeAlias = tuple[int, int]
"""An automaton state and the length of the match: the number of last tokens of the sequence that it stands for."""


class SuffixDrafter(Drafter):
    """Proposes the tokens that followed the latest earlier occurrence of the longest suffix that has one.

    Appending a token takes a few microseconds, amortised; a lookup takes the same time at any length. Memory use is
    about 120 bytes per token. States stay valid while the sequence grows, but not when it is replaced.

    Args:
        reach: maximum number of suffixes, the longest first, that are examined per token. Chat needs about two and
            seldom more than ten; very repetitive text has thousands. Its shortest suffixes then count too few
            occurrences, may have an older token as the latest, and are not used.
    """

    source = Source.SUFFIX
    prior = SAME_CONVERSATION

    def __init__(self, reach: int = 16) -> None:
        self._reach = reach
        self._clear()

    def _clear(self) -> None:
        self._token_ids: list[int] = []
        self._last = 0
        # One entry per state; state 0 stands for the empty string. Nearly all states have one next token only.
        self._length = array("i", [0])
        self._link = array("i", [-1])
        self._token = array("i", [_NONE])
        self._target = array("i", [0])
        self._count = array("i", [0])
        self._branches: dict[int, dict[int, int]] = {}
        """Branches by state and next token; the one taken last is at the end."""

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence: grow if the new one starts with the old one, otherwise start again."""
        known = len(self._token_ids)
        if list(token_ids[:known]) != self._token_ids:
            self._clear()
            known = 0
        self._grow(token_ids[known:])

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        self._grow((token,))

    def state(self) -> Match:
        """The longest suffix of the sequence that occurred before."""
        if self._last == 0:
            return 0, 0
        match = self._link[self._last]
        return match, self._length[match]

    def repetition(self) -> int:
        """Length of the longest suffix of the sequence that occurred before."""
        return self.state()[1]

    def after(self, state: Match, token: int) -> Match:
        """The longest suffix of match and `token` in the sequence (within reach, otherwise `token` alone)."""
        node, length = self._current(state)
        left = self._reach
        while node >= 0:
            if self._token[node] == token:
                return self._target[node], length + 1
            if self._token[node] == _SEVERAL:
                branch = self._branches[node].get(token)
                if branch is not None:
                    return branch >> _SHIFT, length + 1
            left -= 1
            node = self._link[node] if left > 0 or node == 0 else 0
            length = self._length[node]
        return 0, 0

    def candidates(self, state: Match) -> list[Candidate]:
        """Up to three: the tokens that followed the match, the latest first, then tokens after its shorter suffixes."""
        node, length = self._current(state)
        found: list[Candidate] = []
        seen: set[int] = set()
        left = self._reach
        while node > 0 and left > 0:
            token, count = self._token[node], self._count[node]
            if token == _SEVERAL:
                branches = self._branches[node]
                tokens = reversed(branches)
                latest = branches[next(reversed(branches))] & _COUNT
                agreement = Agreement.MOSTLY if 2 * latest > count else Agreement.SPLIT
            else:
                tokens = iter(() if token == _NONE else (token,))
                agreement = Agreement.ONCE if count == 1 else Agreement.ALWAYS
            for token in tokens:
                if token not in seen:
                    seen.add(token)
                    found.append(Candidate(token, bucket(length, agreement, len(found))))
                    if len(found) == _MAX_CANDIDATES:
                        return found
            left -= 1
            node = self._link[node]
            length = self._length[node]
        return found

    def _current(self, state: Match) -> Match:
        """Update a state: as the sequence grows, the shorter strings of an automaton state may move to its link."""
        node, length = state
        while node > 0 and length <= self._length[self._link[node]]:
            node = self._link[node]
        return node, length

    def _grow(self, tokens: Sequence[int]) -> None:
        lengths, links = self._length, self._link
        for token in tokens:
            new = self._new_state(lengths[self._last] + 1, 0, _NONE, 0, 0)
            node = self._learn(self._last, token, new)
            self._last = new
            if node >= 0:
                old = self._next(node, token)
                split = old
                if lengths[old] != lengths[node] + 1:
                    split = self._new_state(
                        lengths[node] + 1, links[old], self._token[old], self._target[old], self._count[old]
                    )
                    if old in self._branches:
                        self._branches[split] = self._branches[old].copy()
                    links[old] = split
                links[new] = split
                self._count_transition(node, token, old, split)
        self._token_ids.extend(tokens)

    def _new_state(self, length: int, link: int, token: int, target: int, count: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._token.append(token)
        self._target.append(target)
        self._count.append(count)
        return len(self._length) - 1

    def _next(self, node: int, token: int) -> int:
        return self._target[node] if self._token[node] == token else self._branches[node][token] >> _SHIFT

    def _learn(self, node: int, token: int, new: int) -> int:
        """Add a transition to `new` to suffixes that `token` never followed; returns the longest other one, or -1."""
        links, only, targets, counts = self._link, self._token, self._target, self._count
        while node >= 0:
            known = only[node]
            if known == token:
                return node
            if known == _NONE:
                only[node] = token
                targets[node] = new
            elif known == _SEVERAL:
                branches = self._branches[node]
                if token in branches:
                    return node
                branches[token] = new << _SHIFT | 1
            else:
                self._branches[node] = {known: targets[node] << _SHIFT | counts[node], token: new << _SHIFT | 1}
                only[node] = _SEVERAL
            counts[node] += 1
            node = links[node]
        return node

    def _count_transition(self, node: int, token: int, old: int, split: int) -> None:
        """Count `token` once more after `node` and its shorter suffixes; redirect their transitions from `old`.

        The strings of `old` that now end at one more place than its others have a state of their own, `split`; if all
        of them do, it is `old` itself.
        """
        links, only, targets, counts = self._link, self._token, self._target, self._count
        moves = split != old
        left = self._reach
        while node >= 0 and (left > 0 or moves):
            if only[node] == token:
                moves = moves and targets[node] == old
                if moves:
                    targets[node] = split
            else:
                branches = self._branches[node]
                branch = branches.pop(token)  # and back, as the last
                moves = moves and branch >> _SHIFT == old
                if moves:
                    branch = split << _SHIFT | branch & _COUNT
                branches[token] = branch + 1
            counts[node] += 1
            left -= 1
            node = links[node]
