"""The exactness report of a model on this machine, and how far its logits differ between pass widths.

A text is run one token per pass, then again in chains of every width and in branching trees, each over the cache that
its own passes have filled, and the logits are compared position by position. That is what decoding does: where
activations are rounded to 8 bits, a difference in the last bit can become a rounding that falls the other way, and
later positions read it in the cache. A short text may not contain such a rounding, so it is also run one token per
pass over a cache whose last bits were perturbed, which causes many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...models.json_file import Count, NotNegative, WholeNumber
from ..graph.bound_graph import BoundGraph
from ..kv.buffers import CacheSnapshot
from ..prefill import prefill
from ..result import DraftCounts
from ..speculation.tree import Source, Tree
from .measurement_store import MeasurementStore

_QUICK_WIDTHS: Final = (2, 4)
_QUICK_TOKENS: Final = 96
SAMPLE_TEXT: Final = """\
The library will be closed on Monday because the heating is being repaired. Books that are due on that day may be \
returned on Tuesday without a fee; the reading room on the first floor stays open until noon.

def overdue(books, today):
    return [book for book in books if book.due < today and not book.returned]

{"title": "Opening hours", "days": ["Tuesday", "Wednesday", "Friday"], "from": "9:30", "to": "18:00"}
"""
"""The text over which noise is measured before any text is generated."""
WIDTHS: Final = (1, 2, 3, 4, 8, 16)
_PERTURBATION: Final = 2.0**-18
"""Relative perturbation of cached values: a few units in the last place, more than another order of summation causes.
Where nothing is rounded to 8 bits it causes little noise."""
_FALSE_CHILDREN: Final = 2
_TREE_DEPTH: Final = 4
_TREE_NODES: Final = 1 + (_TREE_DEPTH - 1) * (1 + _FALSE_CHILDREN)
"""Nodes of a tree; the context must have room for the last tree, most of which lies beside the text."""
_MAX_NOISE: Final = 0.5
"""Largest difference that counts as noise, as a share of the logits' standard deviation."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ComparisonCounts:
    """Counts of speculative texts that were compared with plain ones."""

    texts: WholeNumber = 0
    """Number of texts that were compared."""
    identical: WholeNumber = 0
    """Number of texts that equal the plain one."""
    near_ties: WholeNumber = 0
    """Number of texts that differ from the plain one from a near tie on; after it they are different texts."""
    widest_near_tie: float = 0.0
    """Largest margin of those near ties, in logits of plain decoding."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Draft tokens that were verified and accepted."""
    recomputed: WholeNumber = 0
    """Number of positions that were recomputed one by one to decide near ties."""

    def __add__(self, other: ComparisonCounts) -> ComparisonCounts:
        return ComparisonCounts(
            self.texts + other.texts,
            self.identical + other.identical,
            self.near_ties + other.near_ties,
            max(self.widest_near_tie, other.widest_near_tie),
            self.drafts + other.drafts,
            self.recomputed + other.recomputed,
        )

    @property
    def failed(self) -> int:
        """Number of texts that differ where the choice was clear."""
        return self.texts - self.identical - self.near_ties


@dataclass(frozen=True)
class Counterexample:
    """A speculative text that differs from plain decoding where it must not."""

    kind: str
    """What was compared: `greedy`, `sampled`, `exact` or `together`."""
    drafter: str
    """Name of the drafter: `oracle`, `oracle tree` or `auto`."""
    prompt: int
    """Index of the prompt."""
    seed: int
    """Seed of a sampled text."""
    position: int
    """Index of the first differing token in the answer."""
    expected: int
    """Token id of plain decoding."""
    found: int
    """Token id of the speculative text; -1 if it ends there."""
    gap: float
    """Distance between the two in logits; see `comparison`."""


@dataclass(frozen=True)
class ExactnessReport:
    """What was measured; the counts are None until `edge-run verify` has compared texts."""

    noise: WidthNoise
    greedy: ComparisonCounts | None = None
    sampled: ComparisonCounts | None = None
    exact: ComparisonCounts | None = None
    """Greedy decoding that recomputes near ties."""
    together: ComparisonCounts | None = None
    """Greedy answers that were generated several at a time; None also where answers cannot share passes."""
    counterexample: Counterexample | None = None
    """The first text that differs where it must not."""

    @property
    def epsilon(self) -> float:
        """Margin in logits above which a choice is certain."""
        return self.noise.epsilon

    @property
    def passed(self) -> bool:
        """Whether wide passes differ by noise only and no text differs where it must not."""
        return self.noise.sound and self.counterexample is None

    def to_json(self) -> dict[str, Any]:
        """Convert to a plain JSON object."""
        return {**asdict(self), "epsilon": self.epsilon, "passed": self.passed}


EXACTNESS_REPORTS: Final = MeasurementStore("exactness", 2, ExactnessReport, ExactnessReport.to_json)
"""Exactness reports of models on this machine."""


def measure_exactness(bound: BoundGraph, text: Sequence[int]) -> ExactnessReport:
    """Measure little more than the noise over one text of at least two tokens, in about a second.

    Raises:
        EdgeError: ONNX Runtime failed.
    """
    return ExactnessReport(measure_width_noise(bound, [text[:_QUICK_TOKENS]], widths=_QUICK_WIDTHS))


@dataclass(frozen=True)
class WidthNoise:
    """Largest differences between logits of passes over one token and of other passes."""

    chains: Mapping[int, NotNegative]
    """By the width of the passes. Width 1 repeats the same computation, which should give the same bits."""
    trees: NotNegative
    """In branching trees, at the nodes of the text; 0 if the graph does not verify trees."""
    perturbed: NotNegative
    """With one token per pass, over a cache whose last bits were perturbed."""
    leak: NotNegative
    """At positions whose own tokens are the same but which must not see other tokens that were replaced: later ones, or
    ones on another branch."""
    spread: NotNegative
    """Standard deviation of the logits."""
    positions: Count
    """Number of positions that were compared for each kind of pass."""
    long_context: NotNegative = 0.0
    """With one token per pass, in the graph for long contexts; 0 if there is none. It is not part of `largest`: shorter
    texts, and exact ones, do not run in it."""

    def __post_init__(self) -> None:
        if not self.chains:
            raise ValueError("no width was compared")

    @property
    def largest(self) -> float:
        """Largest difference of a logit between passes of different widths."""
        return max(*self.chains.values(), self.trees, self.leak)

    @property
    def identical(self) -> bool:
        """Whether logits are bit-identical for every pass width."""
        return self.largest == 0

    @property
    def epsilon(self) -> float:
        """Margin in logits above which two tokens keep their order: both logits may move towards each other.

        It is 0 if the logits are bit-identical.
        """
        return 0.0 if self.identical else 2 * max(self.largest, self.perturbed)

    @property
    def sound(self) -> bool:
        """Whether the differences are noise; if not, wide passes compute something else on this device."""
        return self.largest <= _MAX_NOISE * self.spread and self.leak <= 2 * self.perturbed


def measure_width_noise(
    bound: BoundGraph,
    texts: Sequence[Sequence[int]],
    *,
    widths: Sequence[int] = WIDTHS,
    long_context: BoundGraph | None = None,
) -> WidthNoise:
    """Measure the noise over texts.

    The first half of each text, at least one token, is the context; the logits of the rest are compared.

    Args:
        bound: the session and its arena, whose contents are lost.
        texts: token ids, each of at least two tokens; those longer than the context are cut.
        widths: widths of the chains.
        long_context: the model's graph for long contexts, over the same arena, if it has one.

    Raises:
        EdgeError: ONNX Runtime failed.
        ValueError: there is no text, or one has less than two tokens.
    """
    arena = bound.arena
    cut = [list(text[: max(2, arena.limit - _TREE_NODES)]) for text in texts]
    if not cut or min(map(len, cut)) < 2:
        raise ValueError("noise is measured over texts of at least two tokens")
    chains = dict.fromkeys(widths, 0.0)
    trees = perturbed = leak = spread = other_graph = 0.0
    positions = 0
    for number, text in enumerate(cut):
        context, rest = text[: len(text) // 2], text[len(text) // 2 :]
        arena.rewind_to(0)
        prefill(bound, context)
        start = arena.snapshot()
        expected = _run_chains(bound, start, rest, 1)
        positions += len(rest)
        spread = max(spread, float(expected.std()))
        for width in widths:
            chains[width] = max(chains[width], _largest_difference(_run_chains(bound, start, rest, width), expected))
        if long_context is not None:
            other_graph = max(other_graph, _largest_difference(_run_chains(long_context, start, rest, 1), expected))
        found = _run_chains(bound, _perturb(start, number), rest, 1)
        perturbed = max(perturbed, _largest_difference(found, expected))
        if bound.graph_io.supports_trees:
            trees = max(trees, _largest_difference(_run_trees(bound, start, rest), expected))
        leak = max(leak, _leak(bound, start, rest))
    arena.rewind_to(0)
    return WidthNoise(chains, trees, perturbed, leak, spread, positions, other_graph)


def _largest_difference(first: Floats, second: Floats) -> float:
    """Return the largest difference; the largest float32 if a value is not finite, since NaN compares false."""
    difference = float(np.abs(first - second).max())
    return difference if math.isfinite(difference) else float(np.finfo(np.float32).max)


def _perturb(cache: CacheSnapshot, seed: int) -> CacheSnapshot:
    """Multiply every cached value by a random factor close to 1; of a quantized cache, the values before rounding."""
    random = np.random.default_rng(seed)
    perturbed = []
    for array in cache:
        factor = random.uniform(1 - _PERTURBATION, 1 + _PERTURBATION, array.shape)
        if array.dtype.kind == "f":
            perturbed.append((array * factor).astype(array.dtype))
        else:
            values = np.rint((array + random.uniform(-0.5, 0.5, array.shape)) * factor)
            limits = np.iinfo(array.dtype)
            perturbed.append(np.clip(values, limits.min, limits.max).astype(array.dtype))
    return tuple(perturbed)


def _run_chains(bound: BoundGraph, start: CacheSnapshot, text: Sequence[int], width: int) -> Floats:
    """Return logits float32 `[n, V]` of the text, run `width` tokens per pass after the cache contents `start`."""
    bound.arena.restore(start)
    parts = []
    for index in range(0, len(text), width):
        parts.append(bound.forward(text[index : index + width]).copy())
        bound.arena.commit(len(parts[-1]))
    return np.concatenate(parts)


def _run_trees(bound: BoundGraph, start: CacheSnapshot, text: Sequence[int]) -> Floats:
    """Return logits like `_run_chains`, of trees in which the text's nodes lie scattered among false branches."""
    arena = bound.arena
    arena.restore(start)
    parts = []
    for tree, path in _trees(text, bound.graph_io.vocab_size):
        base = arena.length
        parts.append(_forward_tree(bound, tree)[path].copy())
        arena.compact(base, path)
    return np.concatenate(parts)


def _forward_tree(bound: BoundGraph, tree: Tree) -> Floats:
    return bound.forward(tree.tokens, positions=bound.arena.length + tree.depths, tree_mask=tree.mask)


def _trees(text: Sequence[int], vocab_size: int) -> Iterator[tuple[Tree, list[int]]]:
    """Yield trees that together contain the text, with their nodes that do. Inner nodes have false children too."""
    for index in range(0, len(text), _TREE_DEPTH):
        true = text[index : index + _TREE_DEPTH]
        tokens, parents, path = [true[0]], [-1], [0]
        for depth, token in enumerate(true[1:], 1):
            siblings = [(token + 1 + index + child) % vocab_size for child in range(_FALSE_CHILDREN)]
            siblings.insert(depth % (_FALSE_CHILDREN + 1), token)
            parents += [path[-1]] * len(siblings)
            path.append(len(tokens) + siblings.index(token))
            tokens += siblings
        yield Tree.of(tokens, parents, [1.0] * len(tokens), [Source.OTHER] * len(tokens)), path


def _leak(bound: BoundGraph, start: CacheSnapshot, text: Sequence[int]) -> float:
    """Return how far logits move when tokens that their positions must not see are replaced."""
    vocab_size = bound.graph_io.vocab_size
    bound.arena.restore(start)
    chain = list(text[:8])
    half = len(chain) // 2
    other = [*chain[:half], *((token + 1) % vocab_size for token in chain[half:])]
    before = bound.forward(chain)[:half].copy()
    moved = _largest_difference(before, bound.forward(other)[:half]) if half else 0.0
    if bound.graph_io.supports_trees:
        tree, path = next(_trees(text, vocab_size))
        tokens = (tree.tokens + 7) % vocab_size
        tokens[path] = tree.tokens[path]
        changed = Tree(tokens.tolist(), tree.parent_nodes, tree.path_probs, tree.sources)
        before = _forward_tree(bound, tree)[path].copy()
        moved = max(moved, _largest_difference(before, _forward_tree(bound, changed)[path]))
    return moved
