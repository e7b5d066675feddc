"""How far passes over several rows are from passes over one: what the exactness of speculation rests on.

A text is run one token a pass, then again in chains of every width and in branching trees, each over the cache that its
own passes have left, and the logits are compared row by row. That is what decoding does: with activations rounded to
8 bits a difference in the last bit can become a rounding that falls the other way, and later rows read it in the
cache. Whether a short text meets such a rounding is chance, so it is also run one token a pass over a cache whose last
bits were disturbed, which meets many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...models.json_file import is_finite, is_whole, shown
from ..graph.bound_session import BoundSession
from ..kv.arena import CacheSnapshot
from ..prefill import prefill
from ..speculation.tree import Source, Tree

WIDTHS: Final = (1, 2, 3, 4, 8, 16)
_DISTURBANCE: Final = 2.0**-18
"""Of each value of the cache: some units of its last place, more than adding up in another order moves it, so that a
short text meets a rounding that falls the other way. Where nothing is rounded it makes little noise."""
_FALSE_CHILDREN: Final = 2
_TREE_DEPTH: Final = 4
_TREE_ROWS: Final = 1 + (_TREE_DEPTH - 1) * (1 + _FALSE_CHILDREN)
"""Room that the last tree needs, most of it beside the text."""
_LARGEST_SHARE: Final = 0.5
"""Of the logits' own spread; noise beyond is none: the passes compute something else."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class WidthNoise:
    """Largest differences between logits computed one row a pass and otherwise; all but `rows` in logits."""

    chains: Mapping[int, float]
    """By rows a pass. One row is the same computation again, to which a sound device gives the same bits."""
    trees: float
    """In branching trees, on the path that the text took; 0 where the graph verifies none."""
    disturbed: float
    """One row a pass, over a cache whose last bits were disturbed."""
    leak: float
    """Between a row and itself when rows that it does not see, later or on another branch, hold other tokens."""
    spread: float
    """Standard deviation of the logits."""
    rows: int
    """Rows compared, of each kind."""

    @property
    def largest(self) -> float:
        """The most that a logit moved."""
        return max(*self.chains.values(), self.trees, self.leak)

    @property
    def identical(self) -> bool:
        """Whether rows are the same to the last bit, however they were computed."""
        return self.largest == 0

    @property
    def epsilon(self) -> float:
        """Scores further apart than this keep their order: both may move, towards each other. 0 if none moves."""
        return 0.0 if self.identical else 2 * max(self.largest, self.disturbed)

    @property
    def sound(self) -> bool:
        """Whether the differences are noise; else passes over several rows compute something else on this device."""
        return self.largest <= _LARGEST_SHARE * self.spread and self.leak <= 2 * self.disturbed

    def to_json(self) -> dict[str, Any]:
        """A plain object that `from_json` reads."""
        return {**vars(self), "chains": {str(width): value for width, value in self.chains.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WidthNoise:
        """What `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        chains = data.get("chains")
        if not isinstance(chains, dict) or not chains or not is_whole(data.get("rows"), 1):
            raise ValueError("lacks the differences by width")
        return cls(
            {int(width): _difference(value) for width, value in chains.items()},
            **{name: _difference(data.get(name)) for name in ("trees", "disturbed", "leak", "spread")},
            rows=data["rows"],
        )


def _difference(value: Any) -> float:
    if not is_finite(value) or value < 0:
        raise ValueError(f"holds a difference of {shown(value)}")
    return float(value)


def measure_width_noise(
    bound: BoundSession,
    texts: Sequence[Sequence[int]],
    *,
    widths: Sequence[int] = WIDTHS,
    progress: Callable[[float], None] = lambda _: None,
) -> WidthNoise:
    """Measure over `texts`, of which the first half, at least one token, is the context and the rest is compared.

    The arena's contents are lost.

    Args:
        bound: the session, and its arena.
        texts: token ids, each of at least two tokens; longer ones than the context are cut.
        widths: rows of a pass.
        progress: told the fraction done.

    Raises:
        EdgeError: ONNX Runtime failed.
        ValueError: there is no text of two tokens.
    """
    arena = bound.arena
    cut = [list(text[: max(2, arena.limit - _TREE_ROWS)]) for text in texts]
    if not cut or min(map(len, cut)) < 2:
        raise ValueError("noise is measured over texts of at least two tokens")
    chains = dict.fromkeys(widths, 0.0)
    trees = disturbed = leak = spread = 0.0
    rows = 0
    for number, text in enumerate(cut):
        context, rest = text[: len(text) // 2], text[len(text) // 2 :]
        arena.rewind_to(0)
        prefill(bound, context)
        start = arena.snapshot()
        truth = _in_chains(bound, start, rest, 1)
        rows += len(rest)
        spread = max(spread, float(truth.std()))
        for width in widths:
            chains[width] = max(chains[width], _apart(_in_chains(bound, start, rest, width), truth))
        disturbed = max(disturbed, _apart(_in_chains(bound, _disturbed(start, number), rest, 1), truth))
        if bound.graph_io.supports_trees:
            trees = max(trees, _apart(_in_trees(bound, start, rest), truth))
        leak = max(leak, _leak(bound, start, rest))
        progress((number + 1) / len(cut))
    arena.rewind_to(0)
    return WidthNoise(chains, trees, disturbed, leak, spread, rows)


def _apart(first: Floats, second: Floats) -> float:
    """The largest difference, and where there is none because something is no number, more than any other."""
    difference = float(np.abs(first - second).max())
    return difference if math.isfinite(difference) else float(np.finfo(np.float32).max)


def _disturbed(rows: CacheSnapshot, seed: int) -> CacheSnapshot:
    """Rows of which every number is off by a little."""
    random = np.random.default_rng(seed)
    return tuple(
        (array * random.uniform(1 - _DISTURBANCE, 1 + _DISTURBANCE, array.shape)).astype(array.dtype) for array in rows
    )


def _in_chains(bound: BoundSession, start: CacheSnapshot, text: Sequence[int], width: int) -> Floats:
    """Logits float32 `[n, V]` of the text, run `width` tokens a pass behind the rows of `start`."""
    bound.arena.restore(start)
    parts = []
    for at in range(0, len(text), width):
        parts.append(bound.forward(text[at : at + width]).copy())
        bound.arena.commit(len(text[at : at + width]))
    return np.concatenate(parts)


def _in_trees(bound: BoundSession, start: CacheSnapshot, text: Sequence[int]) -> Floats:
    """As `_in_chains`, in trees whose path along the text lies scattered among false branches."""
    arena = bound.arena
    arena.restore(start)
    parts = []
    for tree, path in _trees(text, bound.graph_io.vocab_size):
        base = arena.length
        parts.append(_pass(bound, tree)[path].copy())
        arena.compact(base, path)
    return np.concatenate(parts)


def _pass(bound: BoundSession, tree: Tree) -> Floats:
    return bound.forward(tree.tokens, positions=bound.arena.length + tree.depths, tree_mask=tree.mask)


def _trees(text: Sequence[int], vocab_size: int) -> Iterator[tuple[Tree, list[int]]]:
    """Trees that together hold the text, and their nodes that do. Each of these but the last has false children too."""
    for at in range(0, len(text), _TREE_DEPTH):
        true = text[at : at + _TREE_DEPTH]
        tokens, parents, path = [true[0]], [-1], [0]
        for depth, token in enumerate(true[1:], 1):
            siblings = [(token + 1 + at + child) % vocab_size for child in range(_FALSE_CHILDREN)]
            siblings.insert(depth % (_FALSE_CHILDREN + 1), token)
            parents += [path[-1]] * len(siblings)
            path.append(len(tokens) + siblings.index(token))
            tokens += siblings
        yield Tree.of(tokens, parents, [1.0] * len(tokens), [Source.OTHER] * len(tokens)), path


def _leak(bound: BoundSession, start: CacheSnapshot, text: Sequence[int]) -> float:
    """How far rows move when tokens that they do not see are replaced."""
    vocab_size = bound.graph_io.vocab_size
    bound.arena.restore(start)
    chain = list(text[:8])
    half = len(chain) // 2
    other = [*chain[:half], *((token + 1) % vocab_size for token in chain[half:])]
    before = bound.forward(chain)[:half].copy()
    moved = _apart(before, bound.forward(other)[:half]) if half else 0.0
    if bound.graph_io.supports_trees:
        tree, path = next(_trees(text, vocab_size))
        tokens = (tree.tokens + 7) % vocab_size
        tokens[path] = tree.tokens[path]
        changed = Tree(tokens, tree.parents, tree.path_prob, tree.source)
        before = _pass(bound, tree)[path].copy()
        moved = max(moved, _apart(before, _pass(bound, changed)[path]))
    return moved
