"""Guesses from repetitions within the text: a suffix automaton that grows with it.

The automaton (Blumer et al. 1985; for drafting: SAM-Decoding, Hu et al. 2024) has a state for every set of substrings
that end at the same places. A state's link leads to the longest suffix that also ends elsewhere. So the link of the
whole text's state is the longest end of the text that occurred before, and the text's own end never counts as an
occurrence of itself. Transitions know how often each was taken, and which one last.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

from ..tree import Source
from .evidence import WITHIN_TEXT, Agreement, bucket
from .interface import Candidate

_GUESSES: Final = 3
_NONE: Final = -1
"""In place of a state's only next token: nothing has followed yet."""
_SEVERAL: Final = -2
"""In place of a state's only next token: see the state's branches."""
_SHIFT: Final = 24
"""A branch is one number, `target << _SHIFT | count`."""
_COUNT: Final = (1 << _SHIFT) - 1
"""Texts are shorter than this."""

Match: TypeAlias = tuple[int, int]
"""An automaton state, and how many tokens of the text's end it stands for."""


class SuffixDrafter:
    """Guesses what followed the latest earlier occurrence of the longest end of the text that has one.

    Growing by a token takes a few microseconds, amortised over the text; a guess takes the same at any length of text.
    Memory is about 120 bytes a token. States stay good while the text grows, not when it is replaced.

    Args:
        reach: how many ends of the text, the longest first, are looked at per token. Chat needs about two and seldom
            more than ten; very repetitive text has thousands, and its shortest ends then count too few occurrences,
            may know an older token as the latest, and are not asked.
    """

    source: Final = Source.SUFFIX
    prior: Final = WITHIN_TEXT

    def __init__(self, reach: int = 16) -> None:
        self._reach = reach
        self._clear()

    def _clear(self) -> None:
        self._text: list[int] = []
        self._last = 0
        # By state; state 0 stands for the empty string. All but a few states have one next token only.
        self._length = array("i", [0])
        self._link = array("i", [-1])
        self._token = array("i", [_NONE])
        self._target = array("i", [0])
        self._count = array("i", [0])
        self._branches: dict[int, dict[int, int]] = {}
        """By state and next token, the one taken last at the end."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text: grow if it starts with the text so far, else start again from its beginning."""
        known = len(self._text)
        if len(tokens) < known or list(tokens[:known]) != self._text:
            self._clear()
            known = 0
        self._grow(tokens[known:])

    def append(self, token: int) -> None:
        """Let the text grow by one token."""
        self._grow((token,))

    def state(self) -> Match:
        """The longest end of the text that occurred before."""
        if self._last == 0:
            return 0, 0
        match = self._link[self._last]
        return match, self._length[match]

    def after(self, state: Match, token: int) -> Match:
        """The longest end of the match and `token` that occurs in the text (within reach, else `token` alone)."""
        node, length = self._settled(state)
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
        """Up to three: what followed the match, the latest first, then what followed shorter ends of it."""
        node, length = self._settled(state)
        found: list[Candidate] = []
        seen: set[int] = set()
        left = self._reach
        while node > 0 and left > 0:
            token = self._token[node]
            if token == _SEVERAL:
                branches = self._branches[node]
                agreement = None
                for token in reversed(branches):
                    if agreement is None:
                        most = 2 * (branches[token] & _COUNT) > self._count[node]
                        agreement = Agreement.MOSTLY if most else Agreement.SPLIT
                    if token not in seen:
                        seen.add(token)
                        found.append(Candidate(token, bucket(length, agreement, len(found))))
                        if len(found) == _GUESSES:
                            return found
            elif token != _NONE and token not in seen:
                agreement = Agreement.ONCE if self._count[node] == 1 else Agreement.ALWAYS
                seen.add(token)
                found.append(Candidate(token, bucket(length, agreement, len(found))))
            left -= 1
            node = self._link[node]
            length = self._length[node]
        return found

    def _settled(self, state: Match) -> Match:
        """The state again: as the text grows, the shorter strings of an automaton state may move to its link."""
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
                self._count_again(node, token, old, split)
        self._text.extend(tokens)

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
        """Lead the ends of the text that `token` never followed to `new`; the longest one it did follow, or -1."""
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

    def _count_again(self, node: int, token: int, old: int, split: int) -> None:
        """Count `token` once more after `node` and its shorter ends; those that it led to `old`, it leads to `split`.

        The strings that now end at one place more than the others of `old` are a state of their own, `split`; if they
        are all of them, it is `old` itself.
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
