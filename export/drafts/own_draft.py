"""A draft of the target's own layers, chosen, measured and put into its bundle."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import ModelProto

from ...errors import InputError
from ...models.bundle import DRAFT_GRAPH_NAME, GRAPH_NAME
from ...models.manifest import MANIFEST_NAME, GraphLayout, Manifest
from ...models.progress import Progress
from ...runtime.measure.bundle_timing import BundleTimer
from ...runtime.text.turn_markers import TokenArray, answer_start, read_markers
from ..upgrade.edit.editable import EditableGraph
from ..upgrade.edit.tensor_writers import InPlace
from .companion import CHOSEN
from .frequencies import Ranking, rank_tokens
from .head_size import TARGET_ROWS, Agreement, StepTimes, agreeing_sizes, best_size, speed
from .layer_search import LayerSearch, PartTimes
from .skip_judge import SkipJudge
from .skipped_layers import Part, SubLayer, as_bundle, external_bytes, inner_parts, without, write_own_draft
from .trimmed_head import trim_head, trim_own_draft

_STAGE: Final = "draft"
_ROUNDS: Final = 8
"""Turns of a measurement."""
_READ: Final = 1024
"""Tokens of text that choices are judged on, and as many others for what is reported."""
_JUDGED: Final = 192
"""Rows of them whose next token is guessed."""
_SECONDS: Final = 180.0
"""Most that the search takes."""
_FEWEST_LAYERS: Final = 3


@dataclass(frozen=True)
class OwnDraftReport:
    """What a draft of the target's own layers does."""

    skips: tuple[str, ...]
    """Parts that it does without."""
    parts: int
    """How many there are that it might."""
    tokens: int
    """That its head has."""
    agreement: float
    """Share of positions of other text where draft and target prefer the same token."""
    step_ms: float
    """Milliseconds of the draft's step."""
    target_ms: float
    """Of the target's."""
    tokens_per_second: float
    """Expected of chains of the best length."""
    plain_tokens_per_second: float
    """Without guesses."""
    judged: int
    """Choices that were compared."""

    @property
    def pays(self) -> bool:
        """Whether it is expected to be faster than plain decoding where it was measured."""
        return self.tokens_per_second > self.plain_tokens_per_second

    def as_mapping(self) -> dict[str, float]:
        """The numbers by name."""
        numbers = {name: value for name, value in vars(self).items() if name != "skips"}
        return {"skipped": len(self.skips), **{name: round(value, 6) for name, value in numbers.items()}}


def adopt_own_draft(
    target: Path,
    vocabulary: int | None,
    counted: Sequence[TokenArray],
    held_out: Sequence[TokenArray],
    progress: Progress,
    *,
    seed: int = 0,
    seconds: float = _SECONDS,
) -> OwnDraftReport:
    """Give a bundle a draft that is its own graph without some parts, and name it in the manifest.

    Args:
        target: a bundle.
        vocabulary: tokens of the draft's head; `CHOSEN` for as many as pay, None for all.
        counted: text of the target, ids int64 [n] each, for choosing.
        held_out: other such text, for judging.
        progress: hears the stage "draft".
        seed: of the search.
        seconds: most that the search takes.

    Returns:
        What the draft does. It is made even if it does not pay on this machine: on another it may, and the runtime asks
        it only where it does.

    Raises:
        BundleError: the folder is no bundle.
        InputError: the model has too few layers, another layout, the head cannot have so many tokens, or there is no
            text.
        ExportError: a graph does not run, or the head cannot be trimmed.
        OSError: the disk refused a write.
    """
    manifest = _fitting(target)
    progress(_STAGE, 0.0)
    markers = read_markers(target)
    whole = onnx.load(target / GRAPH_NAME, load_external_data=False)
    chosen_on, judged_on = (_first(texts, _READ) for texts in (counted, held_out))

    def judge(texts: Sequence[TokenArray]) -> SkipJudge:
        starts = [answer_start(text, markers) for text in texts]
        return SkipJudge(target, manifest.architecture, texts, starts, _JUDGED)

    ranking = None
    if vocabulary is not None:
        ranking = rank_tokens(counted, manifest.architecture.vocab_size, markers.special | markers.ending)
        if vocabulary != CHOSEN:
            ranking.kept(vocabulary)  # before anything that takes long
    times = _part_times(target, manifest, whole)
    progress(_STAGE, 0.1)
    started = time.monotonic()
    search = LayerSearch(
        judge(chosen_on).agreement,
        times,
        seed=seed,
        deadline=started + seconds,
        progress=lambda _: progress(_STAGE, 0.1 + 0.7 * min(1.0, (time.monotonic() - started) / seconds)),
    )
    skipped, choices = search.best().skipped, search.judged
    del search  # and with it a session as large as the model
    progress(_STAGE, 0.8)
    other = judge(judged_on)
    agreement, tokens = other.agreement(skipped), manifest.architecture.vocab_size
    write_own_draft(target, skipped)
    if ranking is not None:
        sizes = _agreement_by_size(other, skipped, ranking)
        tokens = vocabulary or _best_head(target, manifest, ranking, sizes, times)
        agreement = float(sizes[tokens])
        if tokens < ranking.order.size:
            trim_own_draft(target, ranking.kept(tokens))
    with as_bundle(target, manifest, _draft_of(target)) as draft:
        on_target, on_draft = BundleTimer().time_passes([target, draft], (1,), _ROUNDS)
    progress(_STAGE, 1.0)
    return OwnDraftReport(
        skips=tuple(map(str, sorted(skipped))),
        parts=len(times.part),
        tokens=tokens,
        agreement=agreement,
        step_ms=1e3 * on_draft[1],
        target_ms=1e3 * on_target[1],
        tokens_per_second=speed(agreement, on_draft[1], _at_the_pace_of(on_target[1], times.target)),
        plain_tokens_per_second=1 / on_target[1],
        judged=choices,
    )


def _fitting(target: Path) -> Manifest:
    """The manifest of a bundle that may have a draft of its own layers.

    Raises:
        InputError: it may not.
    """
    path = target / MANIFEST_NAME
    manifest = Manifest.from_json(path.read_bytes(), str(path))
    if manifest.layout is not GraphLayout.EDGE:
        raise InputError("a draft is made for edge-run's own layout only", "leave --layout or --draft-layers out")
    if manifest.architecture.layers < _FEWEST_LAYERS:
        raise InputError(
            f"a model of {manifest.architecture.layers} layers has none to do without", "leave --draft-layers out"
        )
    return manifest


def _first(texts: Sequence[TokenArray], most: int) -> list[TokenArray]:
    """The first texts, of `most` tokens in all.

    Raises:
        InputError: there is no text.
    """
    some: list[TokenArray] = []
    for text in texts:
        left = most - sum(map(len, some))
        if left > 1 and len(text) > 1:
            some.append(text[:left])
    if not some:
        raise InputError("there is no text to judge a draft on", "give a text, or let the model write some")
    return some


def _part_times(target: Path, manifest: Manifest, whole: ModelProto) -> PartTimes:
    """What parts take: the time without all of a kind, shared out by their bytes."""
    parts = inner_parts(manifest.architecture.layers)
    of_kind = [[part for part in parts if part.part is kind] for kind in Part]
    with (
        as_bundle(target, manifest, without(whole, of_kind[0])) as first,
        as_bundle(target, manifest, without(whole, of_kind[1])) as second,
    ):
        (curve,) = BundleTimer().time_passes([target], TARGET_ROWS, _ROUNDS)
        again, *lacking = BundleTimer().time_passes([target, first, second], (1,), _ROUNDS)
    all_bytes = external_bytes(whole)
    seconds: dict[SubLayer, float] = {}
    for kind, times in zip(of_kind, lacking, strict=True):
        sizes = [all_bytes - external_bytes(without(whole, (part,))) for part in kind]
        saved = max(0.0, again[1] - times[1])
        seconds |= {part: saved * size / sum(sizes) for part, size in zip(kind, sizes, strict=True)}
    return PartTimes(_at_the_pace_of(again[1], curve), seconds)


def _at_the_pace_of(one: float, curve: Mapping[int, float]) -> dict[int, float]:
    """Seconds by rows as they would have been when a pass over one row took `one`."""
    return {rows: seconds * one / curve[1] for rows, seconds in curve.items()}


def _agreement_by_size(judge: SkipJudge, skipped: Collection[SubLayer], ranking: Ranking) -> Agreement:
    """Agreement by the size of the head, float64 [vocabulary + 1]; see `head_size`."""
    place = np.empty(ranking.order.size, np.int64)
    place[ranking.order] = np.arange(ranking.order.size)
    changes = np.zeros(ranking.order.size + 2, np.int64)
    at = 0
    for logits in judge.logits(skipped):
        first, last = agreeing_sizes(judge.preferred[at : at + len(logits)], logits, place)
        np.add.at(changes, first, 1)
        np.add.at(changes, last + 1, -1)
        at += len(logits)
    return np.cumsum(changes)[:-1] / judge.rows


def _best_head(
    target: Path,
    manifest: Manifest,
    ranking: Ranking,
    agreement: Agreement,
    times: PartTimes,
) -> int:
    """As many tokens as pay."""
    least = EditableGraph(_draft_of(target), target)
    trim_head(least, ranking.kept(ranking.least))
    with (
        as_bundle(target, manifest, _draft_of(target)) as on_all,
        as_bundle(target, manifest, least.model(InPlace())) as on_few,
    ):
        whole, few = BundleTimer().time_passes([on_all, on_few], (1,), _ROUNDS)
    return best_size(ranking, agreement, StepTimes(times.target, whole[1], few[1]))


def _draft_of(target: Path) -> ModelProto:
    return onnx.load(target / DRAFT_GRAPH_NAME, load_external_data=False)
