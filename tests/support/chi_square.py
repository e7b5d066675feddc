"""Chi-square tests of sampled sequences against their exact distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

from edgerun.runtime.sampling.distribution import Distribution

Text: TypeAlias = tuple[int, ...]


def critical(degrees: int) -> float:
    """The value that chi-square exceeds with probability 1e-4 (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 3.719 * spread**0.5) ** 3)


def expect_distribution(found: Counter[Text], expected: dict[Text, float], total: int) -> None:
    """Chi-square test; cells with an expected count below five are merged."""
    assert set(found) <= set(expected)
    rare = [text for text, weight in expected.items() if weight * total < 5]
    cells = [(found[text], expected[text] * total) for text in expected if text not in rare]
    cells.append((sum(found[text] for text in rare), sum(expected[text] for text in rare) * total))
    cells = [cell for cell in cells if cell[1] > 1e-9]
    assert sum((n - e) ** 2 / e for n, e in cells) < critical(len(cells) - 1)


def items(distribution: Distribution) -> Iterable[tuple[int, float]]:
    """The tokens that may come, and their probabilities."""
    pairs = zip(distribution.ids.tolist(), distribution.probs.tolist(), strict=True)
    return ((token, probability) for token, probability in pairs if probability > 0)


def sequences(after: Callable[[Text], Distribution], length: int) -> dict[Text, float]:
    """The exact distribution of `length` tokens, each distributed as `after` says of the tokens before it."""
    found: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        found = {(*text, token): weight * p for text, weight in found.items() for token, p in items(after(text))}
    return found
