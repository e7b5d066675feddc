"""Makes a draft of the target's own layers in its bundle."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
from onnx import ModelProto

from ...errors import InputError
from ...models.bundle import DRAFT_GRAPH_NAME, GRAPH_NAME
from ...models.manifest import MANIFEST_NAME, GraphLayout, Manifest
from ...models.progress import Progress
from ...runtime.measure.bundle_timing import BundleTimer
from ...runtime.text.turn_markers import TokenArray, answer_start, read_markers
from ..calibration.calibration_text import CalibrationText
from ..upgrade.edit.editable import EditableGraph
from ..upgrade.edit.tensors import in_place
from .head_size import (
    TARGET_WIDTHS,
    Agreement,
    Float32Array,
    Int64Array,
    StepTimes,
    best_size,
    count_agreement,
    tokens_per_second,
)
from .separate_draft import FASTEST_SIZE
from .skip_agreement import SkipAgreement
from .skip_search import SkipSearch, SubLayerTimes
from .skipped_layers import (
    SubLayer,
    SubLayerKind,
    as_bundle,
    external_bytes,
    inner_sub_layers,
    without,
    write_layer_skip_draft,
)
from .token_ranking import TokenRanking, rank_tokens
from .trimmed_head import trim_head, trim_layer_skip_draft

_STAGE: Final = "draft"
_ROUNDS: Final = 8
"""Number of turns in which passes are timed."""
_MAX_TEXT_TOKENS: Final = 1024
"""Number of tokens of text on which choices are measured, and of other text on which the result is."""
_MAX_POSITIONS: Final = 192
"""Number of positions in that text at which the draft predicts."""
_MAX_SECONDS: Final = 180.0
"""Time limit of the search."""
_MIN_LAYERS: Final = 3


@dataclass(frozen=True)
class LayerSkipReport:
    """Figures of a layer-skip draft."""

    skips: tuple[str, ...]
    """Skipped sub-layers."""
    sub_layers: int
    """Number of sub-layers that may be skipped."""
    tokens: int
    """Number of tokens of the draft's head."""
    agreement: float
    """Share of positions of held-out text where draft and target prefer the same token."""
    step_ms: float
    """Milliseconds of the draft's step."""
    target_ms: float
    """Milliseconds of the target's pass over one token."""
    tokens_per_second: float
    """Expected tokens per second of draft chains of the best length."""
    plain_tokens_per_second: float
    """Tokens per second without speculation."""
    measured: int
    """Number of choices of sub-layers that were measured."""

    @property
    def pays(self) -> bool:
        """Whether the draft is expected to be faster than plain decoding on this machine."""
        return self.tokens_per_second > self.plain_tokens_per_second


def adopt_layer_skip_draft(
    target: Path,
    vocabulary_size: int | None,
    text: CalibrationText,
    progress: Progress,
    *,
    seed: int = 0,
    max_seconds: float = _MAX_SECONDS,
) -> LayerSkipReport:
    """Add to a bundle a draft that is its own graph without some sub-layers, and name it in the manifest.

    Args:
        target: The bundle.
        vocabulary_size: Number of tokens of the draft's head; `FASTEST_SIZE` for the fastest, None for all.
        text: Text of the target: sub-layers are chosen by its calibration part, the draft is measured on the held-out
            one.
        progress: Receives the stage "draft".
        seed: Seed of the search.
        max_seconds: Time limit of the search.

    Returns:
        Figures of the draft. It is made even if it does not pay on this machine, since it may pay on another; the
        runtime uses it only where it pays.

    Raises:
        BundleError: The folder is not a bundle.
        InputError: The model has too few layers or another layout, the head cannot have that size, or text is missing.
        ExportError: A graph does not run, or the head cannot be trimmed.
        OSError: The disk refused a write.
    """
    manifest = _manifest(target)
    progress(_STAGE, 0.0)
    markers = read_markers(target)
    whole = onnx.load(target / GRAPH_NAME, load_external_data=False)
    chosen_on, measured_on = (_beginning(texts) for texts in (text.calibration, text.held_out))

    def skip_agreement(texts: Sequence[TokenArray]) -> SkipAgreement:
        starts = [answer_start(each, markers) for each in texts]
        return SkipAgreement(target, manifest.architecture, texts, starts, _MAX_POSITIONS)

    ranking = None
    if vocabulary_size is not None:
        ranking = rank_tokens(text.calibration, manifest.architecture.vocab_size, markers.special | markers.ending)
        if vocabulary_size != FASTEST_SIZE:
            ranking.kept(vocabulary_size)  # raises before the measurements
    times = _sub_layer_times(target, manifest, whole)
    progress(_STAGE, 0.1)
    started = time.monotonic()
    search = SkipSearch(
        skip_agreement(chosen_on).agreement,
        times,
        seed=seed,
        deadline=started + max_seconds,
        progress=lambda _: progress(_STAGE, 0.1 + 0.7 * min(1.0, (time.monotonic() - started) / max_seconds)),
    )
    skipped, measured = search.best().skipped, search.measured
    del search  # and with it a session as large as the model
    progress(_STAGE, 0.8)
    held_out = skip_agreement(measured_on)
    agreement, tokens = held_out.agreement(skipped), manifest.architecture.vocab_size
    by_size = None if ranking is None else count_agreement(_predictions(held_out, skipped), ranking)
    del held_out  # its session maps the weights too
    write_layer_skip_draft(target, skipped)
    if ranking is not None and by_size is not None:
        tokens = vocabulary_size or _best_head(target, manifest, ranking, by_size, times)
        agreement = float(by_size[tokens])
        if tokens < ranking.order.size:
            trim_layer_skip_draft(target, ranking.kept(tokens))
    with as_bundle(target, manifest, _draft_graph(target)) as draft:
        on_target, on_draft = BundleTimer().time_passes([target, draft], (1,), _ROUNDS)
    progress(_STAGE, 1.0)
    return LayerSkipReport(
        skips=tuple(map(str, sorted(skipped))),
        sub_layers=len(times.saved),
        tokens=tokens,
        agreement=agreement,
        step_ms=1e3 * on_draft[1],
        target_ms=1e3 * on_target[1],
        tokens_per_second=tokens_per_second(agreement, on_draft[1], _rescaled(times.target, on_target[1])),
        plain_tokens_per_second=1 / on_target[1],
        measured=measured,
    )


def _manifest(target: Path) -> Manifest:
    """The manifest of a bundle that can have a layer-skip draft.

    Raises:
        InputError: It cannot.
    """
    path = target / MANIFEST_NAME
    manifest = Manifest.from_json(path.read_bytes(), str(path))
    if manifest.layout is not GraphLayout.EDGE:
        raise InputError("drafts need edge-run's own layout", "leave --layout or --draft-layers out")
    if manifest.architecture.layers < _MIN_LAYERS:
        raise InputError(
            f"a model of {manifest.architecture.layers} layers has none to skip", "leave --draft-layers out"
        )
    return manifest


def _beginning(texts: Sequence[TokenArray]) -> list[TokenArray]:
    """The first texts, of at most `_MAX_TEXT_TOKENS` tokens in all.

    Raises:
        InputError: No text is given.
    """
    found: list[TokenArray] = []
    for text in texts:
        left = _MAX_TEXT_TOKENS - sum(map(len, found))
        if left > 1 and len(text) > 1:
            found.append(text[:left])
    if not found:
        raise InputError("no text to measure a draft on", "give a text with --calibration")
    return found


def _sub_layer_times(target: Path, manifest: Manifest, whole: ModelProto) -> SubLayerTimes:
    """Seconds that sub-layers take: the time saved without all of a kind, divided in proportion to their bytes."""
    sub_layers = inner_sub_layers(manifest.architecture.layers)
    by_kind = [[each for each in sub_layers if each.kind is kind] for kind in SubLayerKind]
    timer = BundleTimer()
    with (
        as_bundle(target, manifest, without(whole, by_kind[0])) as first,
        as_bundle(target, manifest, without(whole, by_kind[1])) as second,
    ):
        (by_width,) = timer.time_passes([target], TARGET_WIDTHS, _ROUNDS)
        on_target, *on_shortened = timer.time_passes([target, first, second], (1,), _ROUNDS)
    all_bytes = external_bytes(whole)
    saved: dict[SubLayer, float] = {}
    for kind, times in zip(by_kind, on_shortened, strict=True):
        sizes = [all_bytes - external_bytes(without(whole, (each,))) for each in kind]
        seconds = max(0.0, on_target[1] - times[1])
        saved |= {each: seconds * size / sum(sizes) for each, size in zip(kind, sizes, strict=True)}
    return SubLayerTimes(_rescaled(by_width, on_target[1]), saved)


def _rescaled(by_width: Mapping[int, float], seconds: float) -> dict[int, float]:
    """Seconds by width, rescaled to a machine state in which a pass over one token takes `seconds`."""
    return {width: each * seconds / by_width[1] for width, each in by_width.items()}


def _predictions(
    skip_agreement: SkipAgreement, skipped: Collection[SubLayer]
) -> Iterable[tuple[Int64Array, Float32Array]]:
    """Preferred tokens of the target and logits of the draft, some positions at a time."""
    start = 0
    for logits in skip_agreement.logits(skipped):
        yield skip_agreement.preferred[start : start + len(logits)], logits
        start += len(logits)


def _best_head(
    target: Path, manifest: Manifest, ranking: TokenRanking, agreement: Agreement, times: SubLayerTimes
) -> int:
    """The fastest size of the draft's head."""
    trimmed = EditableGraph(_draft_graph(target), target)
    trim_head(trimmed, ranking.kept(ranking.min_tokens))
    with (
        as_bundle(target, manifest, _draft_graph(target)) as whole,
        as_bundle(target, manifest, trimmed.model(in_place)) as smallest,
    ):
        on_whole, on_smallest = BundleTimer().time_passes([whole, smallest], (1,), _ROUNDS)
    return best_size(ranking, agreement, StepTimes(times.target, on_whole[1], on_smallest[1]))


def _draft_graph(target: Path) -> ModelProto:
    return onnx.load(target / DRAFT_GRAPH_NAME, load_external_data=False)
