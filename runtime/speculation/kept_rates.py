"""What drafters have learned about a model, kept on disk between runs.

A file holds acceptance rates by evidence bucket, the weights that mix them, and what passes of the draft model gained:
a few hundred numbers, and no token of any text. There is one for every model, draft model and set of drafters. It is
written when an engine closes, and meanwhile in a thread, at most once a minute. Every process adds what it learned to
what the file says by then, so two processes lose nothing but what both write in the same moment.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from ..measure.measurement_store import MeasurementKey, MeasurementStore
from .choice import SOURCE_NAMES
from .drafters.interface import Drafter
from .mixing import MixerState
from .speculator import LearnedRates
from .tree import DRAFT_MODELS

_MAX_OUTCOMES: Final = 400.0
"""Number of outcomes that the file counts for at most when new ones are added, so that old ones fade."""
_MIN_NEW: Final = 64
"""Number of new outcomes from which the file is written."""
_INTERVAL_S: Final = 60.0
_LARGEST: Final = 1e6
_DIGITS: Final = 6


@dataclass(frozen=True)
class KeptRates:
    """The contents of a file."""

    mixer: MixerState
    histograms: list[list[float]]
    """See `DraftModelValue.histograms`."""

    def to_json(self) -> dict[str, Any]:
        """Convert to a plain JSON object."""
        rates, outcomes, weights = (_rounded(each) for each in self.mixer)
        histograms = [[round(each, _DIGITS) for each in bins] for bins in self.histograms]
        return {"rates": rates, "outcomes": outcomes, "weights": weights, "draft_model": histograms}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KeptRates:
        """Inverse of `to_json`.

        Raises:
            ValueError: the object is something else.
        """
        rates, outcomes, weights = (_lists(data.get(name)) for name in ("rates", "outcomes", "weights"))
        histograms = list(_lists(dict(enumerate(_items(data.get("draft_model"))))).values())
        same = {key: len(each) for key, each in rates.items()} == {key: len(each) for key, each in outcomes.items()}
        counts = [each for values in (*outcomes.values(), *histograms) for each in values]
        if not same or min(counts, default=0.0) < 0 or any(not 0 < each < 1 for row in rates.values() for each in row):
            raise ValueError("the numbers are not rates and counts")
        # One weight for every source of the combination, and one constant.
        if any(key < 1 or len(row) != _sources_in(key) + 1 for key, row in weights.items()):
            raise ValueError("the weights are not those of combinations")
        return cls(MixerState(rates, outcomes, weights), histograms)

    def with_new(self, mixer: MixerState, added: Mapping[int, Sequence[float]]) -> MixerState:
        """The kept rates with what a mixer has learned; `added` is the number of outcomes of each cell since then."""
        rates: dict[int, list[float]] = {}
        outcomes: dict[int, list[float]] = {}
        for source, new in mixer.rates.items():
            counts = [min(each, _MAX_OUTCOMES) for each in self.mixer.outcomes[source]]
            totals = [count + more for count, more in zip(counts, added[source], strict=True)]
            rates[source] = [
                (old * count + rate * more) / total if total else rate
                for old, count, rate, more, total in zip(
                    self.mixer.rates[source], counts, new, added[source], totals, strict=True
                )
            ]
            outcomes[source] = totals
        return MixerState(rates, outcomes, {**self.mixer.weights, **mixer.weights})


@dataclass
class _Learning:
    """What a file is written from."""

    key: MeasurementKey
    rates: LearnedRates
    saved: dict[int, list[float]]
    """Number of outcomes of each cell that the file has already."""


_STORE: Final = MeasurementStore("learned", 1, KeptRates.from_json, KeptRates.to_json)


class RatesStore:
    """Restores and saves what the drafters of an engine learn.

    Args:
        model: identifies the model.
        draft: identifies its draft model; empty if there is none.
        interval_s: seconds between two writings during a run.
    """

    def __init__(self, model: str, draft: str = "", interval_s: float = _INTERVAL_S) -> None:
        self._model = model
        self._draft = draft
        self._interval_s = interval_s
        self._saved_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._learning: list[_Learning] = []

    def restore(self, rates: LearnedRates, drafters: Sequence[Drafter], *, exact: bool) -> None:
        """Begin with what was learned in earlier runs, and keep what will be learned.

        Args:
            rates: what is known about the drafters: nothing yet.
            drafters: the drafters.
            exact: whether they draft for exact answers.
        """
        names = [SOURCE_NAMES[drafter.source] for drafter in drafters]
        draft = self._draft if any(drafter.source in DRAFT_MODELS for drafter in drafters) else ""
        # Other buckets, or other priors for them, mean that the evidence is another one.
        buckets = hashlib.sha256(repr([tuple(drafter.prior) for drafter in drafters]).encode()).hexdigest()
        key = MeasurementKey((self._model, draft, tuple(names), buckets, exact), {"drafters": names})
        kept = _STORE.load(key)
        if kept is not None:
            with suppress(ValueError):  # damaged in a way that its form does not show
                rates.model_value.restore(kept.histograms)
                rates.mixer.restore(kept.mixer)
        self._learning.append(_Learning(key, rates, rates.mixer.state().outcomes))

    def save_soon(self) -> None:
        """Save in a thread, unless that was done a moment ago; returns at once."""
        if time.monotonic() - self._saved_at < self._interval_s or (self._thread and self._thread.is_alive()):
            return
        self._saved_at = time.monotonic()
        self._thread = threading.Thread(target=self._save, name="edge-run rates", daemon=True)
        with suppress(RuntimeError):  # no thread can be started: saved when the engine closes
            self._thread.start()

    def close(self) -> None:
        """Save now."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        self._save()

    def _save(self) -> None:
        for each in list(self._learning):
            mixer, model_value = each.rates.mixer.state(), each.rates.model_value
            added = {
                source: [now - before for now, before in zip(counts, each.saved[source], strict=True)]
                for source, counts in mixer.outcomes.items()
            }
            if sum(map(sum, added.values())) < _MIN_NEW:
                continue
            kept = _STORE.load(each.key)
            new = MixerState(mixer.rates, added, mixer.weights)
            if kept is not None and _shape(kept.mixer) == _shape(mixer):
                new = kept.with_new(mixer, added)
            if _STORE.save(each.key, KeptRates(new, model_value.histograms())) is not None:
                each.saved = mixer.outcomes


def _shape(mixer: MixerState) -> dict[int, int]:
    return {source: len(cells) for source, cells in mixer.rates.items()}


def _sources_in(combination: int) -> int:
    """Number of sources of a combination: a leading 1, then five bits each; see `Mixer.predict`."""
    return (combination.bit_length() - 1) // 5


def _rounded(lists: Mapping[int, Sequence[float]]) -> dict[str, list[float]]:
    return {str(key): [round(each, _DIGITS) for each in values] for key, values in lists.items()}


def _items(values: object) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r:.40} is not a list")
    return values


def _lists(values: object) -> dict[int, list[float]]:
    """Lists of finite numbers by a whole number.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{values!r:.40} is not an object")
    found: dict[int, list[float]] = {}
    for key, numbers in values.items():
        checked = [float(each) for each in _items(numbers) if isinstance(each, int | float)]
        if len(checked) != len(numbers) or not all(math.isfinite(each) and abs(each) < _LARGEST for each in checked):
            raise ValueError("not all are numbers")
        found[int(key)] = checked
    return found
