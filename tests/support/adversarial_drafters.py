"""Adversarial drafters, and speculators that verify nearly everything: output must not depend on drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from edgerun.runtime.decode import Step
from edgerun.runtime.speculation.drafters.interface import Candidate, Drafter
from edgerun.runtime.speculation.pass_cost import PassCost
from edgerun.runtime.speculation.speculator import Speculator
from edgerun.runtime.speculation.tree import Source, Tree

NEARLY_FREE: Final = {128: {1: 1.0, 2: 1.0001, 16: 1.001}}
"""Seconds of a pass: nearly any draft token pays, and the time spent on drafting is negligible."""
CLASSES: Final = 8
"""Evidence buckets of an adversary: classes of the probability that its tree states for a node given its parent."""


class FixedCost(PassCost):
    """A pass cost that does not change, whatever passes take."""

    def observe(self, width: int, context: int, seconds: float) -> None:
        """Learn nothing."""


def chain_tree(anchor: int, tokens: Sequence[int], path_prob: Sequence[float], source: Source) -> Tree:
    """A tree of a single path."""
    sources = [Source.ANCHOR, *[source] * len(tokens)]
    return Tree.of([anchor, *tokens], range(-1, len(tokens)), [1.0, *path_prob], sources)


def eager(*drafters: Drafter, **options: Any) -> Speculator:
    """A speculator for which nearly every draft token pays."""
    return Speculator(drafters, FixedCost(NEARLY_FREE), **options)


class Adversary(Drafter):
    """Proposes the tree that a function makes of the sequence; its state is a node of the tree.

    The probabilities that a tree states are taken as evidence; how reliable they are is learned.
    """

    source = Source.OTHER
    prior = tuple((step + 0.5) / CLASSES for step in range(CLASSES))

    def __init__(self, make: Callable[[list[int], int], Tree | None]) -> None:
        self.make = make
        self.proposals = 0

    def reset(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)

    def append(self, token: int) -> None:
        self.token_ids.append(token)

    def state(self) -> int | None:
        self.proposals += 1
        self.tree = self.make(self.token_ids, 16)
        return None if self.tree is None else 0

    def after(self, state: int | None, token: int) -> int | None:
        return None if state is None else self.tree.child(state, token)

    def candidates(self, state: int | None) -> Sequence[Candidate]:
        """The children of the node, the most probable first. What is not a probability is in the lowest class."""
        found = []
        for node in () if state is None else range(1, len(self.tree)):
            if self.tree.parent_nodes[node] == state:
                stated = self.tree.path_probs[node] / max(self.tree.path_probs[state], 1e-6)
                step = min(int(stated * CLASSES), CLASSES - 1) if 0 <= stated < np.inf else 0
                found.append(Candidate(self.tree.token_ids[node], step))
        return sorted(found, key=lambda candidate: -candidate.bucket)


def adversaries(text: Sequence[int], vocab_size: int, eos: int, seed: int = 0) -> dict[str, Adversary]:
    """Adversaries by name. `text` is the output of plain decoding, prompt included; some use it to be always wrong."""
    random = np.random.default_rng(seed)

    def following(done: list[int], count: int) -> list[int]:
        return list(text[len(done) : len(done) + count])

    def chain(done: list[int], tokens: Sequence[int], claims: Sequence[float] | None = None) -> Tree:
        return chain_tree(done[-1], tokens, [0.9] * len(tokens) if claims is None else claims, Source.OTHER)

    def scattered(done: list[int], nodes: int, *, near: bool) -> Tree:
        """A random tree; if `near`, many of its tokens are the next ones."""
        tokens, parents, depths = [done[-1]], [-1], [0]
        coming = [*following(done, 20), *[0] * 21]
        for _ in range(nodes):
            parent = int(random.integers(max(0, len(tokens) - 6), len(tokens)))
            token = int(random.integers(0, vocab_size))
            if near and random.random() < 0.6:
                token = coming[min(depths[parent], 20)]
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
        claims = [1.0, *random.random(len(tokens) - 1).tolist()]
        return Tree.of(tokens, parents, claims, [Source.OTHER] * len(tokens))

    def wide(done: list[int]) -> Tree:
        """Children of the anchor only, the right one among them."""
        right = following(done, 1)
        others = [token for token in random.permutation(vocab_size).tolist() if token not in right][:11]
        tokens = [*others, *right]
        count = len(tokens)
        return Tree.of([done[-1], *tokens], [-1] + [0] * count, [1.0] + [0.9] * count, [Source.OTHER] * (count + 1))

    def wrong(done: list[int], count: int) -> list[int]:
        return [(token + 1 + int(random.integers(0, vocab_size - 1))) % vocab_size for token in following(done, count)]

    ends = (0, vocab_size - 1)
    made: dict[str, Callable[[list[int], int], Tree | None]] = {
        "scattered": lambda done, _: scattered(done, 12, near=False),
        "nearly right": lambda done, _: scattered(done, 14, near=True),
        "always wrong": lambda done, most: chain(done, wrong(done, most)),
        "oracle": lambda done, most: chain(done, following(done, most), [1.0] * len(following(done, most))),
        "right, then wrong": lambda done, _: chain(done, [*following(done, 2), *wrong([*done, 0, 0], 3)]),
        "end of text": lambda done, _: chain(done, [eos] * 6),
        "right, then end of text": lambda done, _: chain(done, [*following(done, 3), eos, eos]),
        "deep": lambda done, _: chain(done, [*following(done, 9), *[7] * 40]),
        "wide": lambda done, _: wide(done),
        "huge": lambda done, _: scattered(done, 300, near=True),
        "confident and wrong": lambda done, most: chain(done, wrong(done, most), [1.0] * len(wrong(done, most))),
        "improbable but right": lambda done, _: chain(done, following(done, 5), [0.001] * len(following(done, 5))),
        "rising with depth": lambda done, _: chain(
            done, following(done, 4), [0.1, 0.5, 0.9, 7.0][: len(following(done, 4))]
        ),
        "not probabilities": lambda done, _: chain(
            done, following(done, 5), [np.nan, np.inf, -np.inf, -1.0, 1e30][: len(following(done, 5))]
        ),
        "first and last id": lambda done, _: chain(done, [ends[len(done) % 2], 0, vocab_size - 1, vocab_size - 1, 0]),
        "the text again": lambda done, most: chain(done, done[-most:]),
        "another anchor": lambda done, _: chain([(done[-1] + 1) % vocab_size], following(done, 3)),
        "anchor alone": lambda done, _: Tree.anchor_only(done[-1]),
        "nothing": lambda done, _: None,
        "unsteady": lambda done, _: chain(done, following(done, 4)) if random.random() < 0.5 else None,
    }
    return {name: Adversary(make) for name, make in made.items()}


def check_rounds(steps: Iterable[Step]) -> None:
    """Assert what holds of every round, whatever was drafted: nothing is counted twice, or not at all."""
    for step in steps:
        one = step.round
        if one is None:
            assert len(step.tokens) <= 1
            continue
        assert one.width == 1 + sum(one.drafted)
        assert sum(one.drafted_by_depth) == sum(one.drafted)
        assert all(accepted <= drafted for accepted, drafted in zip(one.accepted, one.drafted, strict=True))
        assert all(drafted <= grown for drafted, grown in zip(one.drafted, one.candidates, strict=True))
        assert one.emitted == step.produced == sum(one.accepted) + 1
        assert sum(one.accepted) <= len(one.drafted_by_depth)
        assert step.target_passes >= 1
        assert 1 <= one.expected_tokens <= one.width
        assert one.width <= 16
        assert 0 <= one.ahead.kept <= one.ahead.passes
        assert min(one.draft_s, one.target_s, one.host_s, one.ahead.hidden_s, one.ahead.waited_s) >= 0


def random_tree(random: np.random.Generator, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Depths int `[n]` and mask bool `[n, n]` of a random tree whose parents come first."""
    parents = [-1, *(int(random.integers(node)) for node in range(1, nodes))]
    tree = Tree(range(nodes), parents, [1.0] * nodes, [Source.OTHER] * nodes)
    return tree.depths, tree.mask
