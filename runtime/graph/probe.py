"""What a foreign graph's ports do not tell, found out by running it.

Whether a cache may be extended in place, whether all rows are scored, and whether several rows may follow cached ones:
the declared shapes and the files beside a graph are often silent or wrong about these. So a short text is run in one
pass, in two and row by row, which has to give the same logits. A graph for which no reading of its ports does that is
refused: it would run, and write nonsense.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from ...errors import BundleError, EdgeError
from .bound_session import BoundSession, Floats
from .graph_io import CacheMode, GraphIO, LogitsMode

_TEXT_ROWS: Final = 6
_ARENA_ROWS: Final = 64
_STRIDE: Final = 7919
"""Between the ids of the text: they are spread over the vocabulary."""
_NOISE: Final = 0.1
"""Largest difference between logits of the same row, in standard deviations of a row's logits. Rounding gives up to
0.02, where activations are rounded to 8 bits; a wrong cache gives more than 1."""
_QUANTIZED_NOISE: Final = 0.75
"""The same where one scale is chosen for all rows of a pass (DynamicQuantizeLinear): rows disturb each other."""


@dataclass(frozen=True)
class ProbeResult:
    """What running a graph showed of its ports."""

    ports: str
    """What stands for the spec that was tried: names may be changed beside the graph."""
    sharing: CacheMode
    scores: LogitsMode
    wide: bool

    def applied(self, graph_io: GraphIO) -> GraphIO:
        """The spec with what was found."""
        return replace(graph_io, sharing=self.sharing, scores=self.scores, wide=self.wide)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"ports": self.ports, "sharing": self.sharing.name, "scores": self.scores.name, "wide": self.wide}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProbeResult:
        """The inverse of `to_json`.

        Raises:
            ValueError: the values are not such.
        """
        try:
            return cls(str(data["ports"]), CacheMode[data["sharing"]], LogitsMode[data["scores"]], bool(data["wide"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not what a graph's ports were found to be: {error}") from error


class Trial(Protocol):
    """Makes the session as it would be if a spec was right."""

    def __call__(self, graph_io: GraphIO, limit: int) -> BoundSession:
        """`limit` is the most rows of its arena."""
        ...


def ports_key(graph_io: GraphIO) -> str:
    """SHA-256 (hexadecimal) of what the ports tell."""
    return hashlib.sha256(repr(graph_io).encode()).hexdigest()


def settle(graph_io: GraphIO, trial: Trial, where: str, *, in_place: bool, disturbs: bool) -> ProbeResult:
    """What running the graph shows.

    Args:
        spec: as the ports tell.
        trial: see `Trial`.
        where: names the file in errors.
        in_place: whether a cache that is extended in place is worth trying.
        disturbs: whether rows of a pass disturb each other by design.

    Raises:
        BundleError: under no reading of its ports does the graph give the same logits in one pass and in several.
    """
    noise = _QUANTIZED_NOISE if disturbs else _NOISE
    hint = "upgrade it with edge-run export, or choose another variant of the model"
    failures: list[EdgeError] = []
    ran = False
    for reading in _readings(graph_io, in_place):
        outcome = _outcome(trial, reading, noise)
        if isinstance(outcome, bool):
            return ProbeResult(ports_key(graph_io), reading.sharing, reading.scores, outcome)
        if outcome is None:
            ran = True
        else:
            failures.append(outcome)
    if failures and not ran:
        raise BundleError(f"{where}: {failures[-1].what}", hint) from failures[-1]
    raise BundleError(
        f"{where} gives other logits for a text in several passes than in one: its cache is not kept as its inputs say",
        hint,
    )


def _outcome(trial: Trial, reading: GraphIO, noise: float) -> bool | EdgeError | None:
    """Whether several rows may follow cached ones; the error of a graph that does not run; None if it runs wrongly."""
    try:
        return _wide(trial(reading, min(_ARENA_ROWS, reading.capacity or _ARENA_ROWS)), noise)
    except EdgeError as error:
        return error


def _readings(graph_io: GraphIO, in_place: bool) -> Iterator[GraphIO]:
    """What the graph may be, the best first."""
    sharings = [CacheMode.IN_PLACE, CacheMode.GROWING] if in_place and graph_io.capacity is None else [graph_io.sharing]
    scores = [LogitsMode.ALL, LogitsMode.LAST] if graph_io.scores is LogitsMode.ALL else [graph_io.scores]
    for sharing in sharings:
        for score in scores:
            yield replace(graph_io, sharing=sharing, scores=score)


def _wide(bound: BoundSession, noise: float) -> bool | None:
    """Whether several rows may follow cached ones; None if even single ones do not give what one pass gives.

    Raises:
        EdgeError: the graph did not run.
    """
    arena, half = bound.arena, _TEXT_ROWS // 2
    text = (np.arange(_TEXT_ROWS) * _STRIDE + 1) % bound.graph_io.vocab_size
    whole = _last(bound, text)
    bound.forward(text[:half], rows=(half - 1,))
    arena.commit(half)
    together = _last(bound, text[half:])
    leak = 0.0
    if bound.graph_io.scores is not LogitsMode.LAST:
        first = bound.forward(text[half:], rows=(0,))[0].copy()
        other = text[half:].copy()
        other[1:] = (other[1:] + 1) % bound.graph_io.vocab_size
        leak = _apart(bound.forward(other, rows=(0,))[0], first)
    for token in text[half:]:
        apart = _last(bound, (token,))
        arena.commit(1)
    if not _apart(apart, whole) <= noise:
        return None
    return _apart(together, apart) <= noise and leak <= noise


def _last(bound: BoundSession, tokens: np.typing.ArrayLike) -> Floats:
    """Logits of the last row of a pass, `[V]`."""
    logits: Floats = bound.forward(tokens, rows=(np.size(tokens) - 1,))[0].copy()
    return logits


def _apart(first: Floats, second: Floats) -> float:
    """The largest difference, in standard deviations; NaN where something is no number."""
    with np.errstate(all="ignore"):  # damaged weights give any number
        spread = float(second.std(dtype=np.float64))
        return float(np.abs(first - second).max()) / spread if spread else float("nan")
