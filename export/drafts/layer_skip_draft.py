"""Makes a draft of the target's own layers in its bundle: searches for the sub-layers to skip.

The objective is the expected number of tokens per second of a draft chain (`head_size.tokens_per_second`), from the
agreement of the draft with the target and the time of its step. Agreement is not additive in the sub-layers, so it is
searched for: the sub-layers are ordered by the agreement that each alone costs for the time it saves, the best prefix
of that order is the start, and a local search adds, removes or exchanges single sub-layers as long as that helps (as in
SWIFT, Xia et al. 2025; exchange as in EvoPress, Sieberling et al. 2025).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import ModelProto

from ...errors import InputError
from ...models.bundle import DRAFT_GRAPH_NAME, GRAPH_NAME
from ...models.manifest import Manifest
from ...models.progress import Progress
from ...runtime.measure.bundle_timing import BundleTimer
from ...runtime.text.turn_markers import answer_start, read_markers
from ..bundle_content import read_manifest
from ..calibration.calibration_text import CalibrationText
from ..recipe import DraftTokens
from ..upgrade.graph_parts import in_place
from .head_size import (
    TARGET_WIDTHS,
    Agreement,
    TokenRanking,
    best_size,
    count_agreement,
    ranked_text,
    tokens_per_second,
)
from .skipped_layers import (
    SkipAgreement,
    SubLayer,
    SubLayerKind,
    as_bundle,
    external_bytes,
    inner_sub_layers,
    without,
    write_layer_skip_draft,
)
from .trimmed_head import trim_own_draft, trimmed_own_draft

_STAGE: Final = "draft"
_ROUNDS: Final = 8
"""Number of turns in which passes are timed."""
_MAX_POSITIONS: Final = 192
"""Number of positions in that text at which the draft predicts."""
_MIN_LAYERS: Final = 3
_MAX_PREFIXES: Final = 16
"""Largest number of prefixes of the order that are measured."""
_PATIENCE: Final = 2
"""The search ends after so many failures in a row for each sub-layer."""
_EXCHANGE_SHARE: Final = 0.5
"""Share of changes that exchange a sub-layer for another."""


def step_seconds(target: Mapping[int, float], saved: Mapping[SubLayer, float], skipped: Collection[SubLayer]) -> float:
    """Seconds of a step that skips some sub-layers.

    Args:
        target: Seconds of the target's passes by their widths.
        saved: Seconds that skipping a sub-layer saves.
        skipped: The sub-layers.
    """
    return max(target[1] - sum(saved[each] for each in skipped), target[1] / 1000)


def search_skips(
    agreement: Callable[[Collection[SubLayer]], float],
    target: Mapping[int, float],
    saved: Mapping[SubLayer, float],
    *,
    seed: int = 0,
    deadline: float = math.inf,
    progress: Callable[[], None] = lambda: None,
) -> frozenset[SubLayer]:
    """Search the sub-layers to skip, at least one.

    Args:
        agreement: Measures the agreement of a choice; slow.
        target: Seconds of the target's passes by their widths, for `head_size.TARGET_WIDTHS`.
        saved: Seconds that skipping a sub-layer saves in a step, for at least one.
        seed: Seed of the changes that are tried.
        deadline: Value of `time.monotonic` at which the search ends, but not before one choice was measured.
        progress: Called after each measured choice.
    """
    sub_layers, random = sorted(saved), np.random.default_rng(seed)
    measured: dict[frozenset[SubLayer], float] = {}

    def is_late() -> bool:
        return time.monotonic() > deadline

    def speed(skipped: frozenset[SubLayer]) -> float:
        """Expected tokens per second."""
        if skipped not in measured:
            measured[skipped] = agreement(skipped)
            progress()
        return tokens_per_second(measured[skipped], step_seconds(target, saved, skipped), target)

    def better(choices: Iterable[frozenset[SubLayer]], best: frozenset[SubLayer]) -> frozenset[SubLayer]:
        """Measure choices; the best of them, if it is better than the best so far."""
        for skipped in choices:
            if measured and is_late():
                break
            if speed(skipped) > speed(best):
                best = skipped
        return best

    alone = {each: frozenset({each}) for each in sub_layers}
    best = better(alone.values(), alone[sub_layers[0]])
    # In ascending order of the agreement that a sub-layer alone costs for the time that it saves.
    order = sorted(sub_layers, key=lambda each: (1 - measured.get(alone[each], 0.0)) / max(saved[each], 1e-12))
    lengths = np.unique(np.linspace(1, len(order), min(_MAX_PREFIXES, len(order))).round().astype(int))
    best, failures = better((frozenset(order[:length]) for length in lengths.tolist()), best), 0
    while failures < _PATIENCE * len(sub_layers) and not is_late():
        found = better([_changed(best, sub_layers, random)], best)
        failures = failures + 1 if found == best else 0
        best = found
    return best


def _changed(
    skipped: frozenset[SubLayer], sub_layers: Sequence[SubLayer], random: np.random.Generator
) -> frozenset[SubLayer]:
    """A random choice that adds or removes one sub-layer, or exchanges one for another."""
    out, kept = sorted(skipped), [each for each in sub_layers if each not in skipped]
    exchange, removes = random.random() < _EXCHANGE_SHARE, bool(random.integers(2))
    changed = set(skipped)
    if kept and (exchange or not removes or len(out) == 1):
        changed.add(kept[int(random.integers(len(kept)))])
    if len(out) > 1 - exchange and (exchange or removes):
        changed.discard(out[int(random.integers(len(out)))])
    return frozenset(changed) or skipped


def adopt_layer_skip_draft(
    target: Path, wanted: DraftTokens, text: CalibrationText, progress: Progress, max_seconds: float = 180.0
) -> tuple[tuple[str, ...], int]:
    """Add to a bundle a draft that is its own graph without some sub-layers, and name it in the manifest.

    Args:
        target: The bundle.
        wanted: Number of tokens of the draft's head; `auto` for the fastest, None or `all` for all.
        text: Text of the target: its calibration part chooses the sub-layers, its held-out part the fastest head.
        progress: Receives the stage "draft".
        max_seconds: Time limit of the search.

    Returns:
        The skipped sub-layers, and the number of tokens of the draft's head. The draft is made even if it does not pay
        on this machine, since it may pay on another; the runtime uses it only where it pays.

    Raises:
        BundleError: The folder is not a bundle.
        InputError: The model has too few layers, the head cannot have that size, or text is missing.
        ExportError: A graph does not run, or the head cannot be trimmed.
        OSError: The disk refused a write.
    """
    manifest = read_manifest(target)
    if manifest.architecture.layers < _MIN_LAYERS:
        raise InputError(
            f"a model of {manifest.architecture.layers} layers has none to skip", "leave --draft-layers out"
        )
    progress(_STAGE, 0.0)
    ranking, held_out_starts = ranked_text(target, manifest.architecture.vocab_size, text)
    if isinstance(wanted, int):
        ranking.kept(wanted)  # raises before measurements
    passes, saved = _sub_layer_times(target, manifest, onnx.load(target / GRAPH_NAME, load_external_data=False))
    progress(_STAGE, 0.1)
    markers = read_markers(target)
    starts = [answer_start(each, markers) for each in text.calibration]
    agreement = SkipAgreement(target, manifest.architecture, text.calibration, starts, _MAX_POSITIONS).agreement
    started = time.monotonic()
    skipped = search_skips(
        agreement,
        passes,
        saved,
        deadline=started + max_seconds,
        progress=lambda: progress(_STAGE, 0.1 + 0.7 * min(1.0, (time.monotonic() - started) / max_seconds)),
    )
    del agreement  # its session is as large as the model
    progress(_STAGE, 0.8)
    write_layer_skip_draft(target, skipped)
    tokens = wanted if isinstance(wanted, int) else ranking.order.size
    if wanted == "auto":
        held_out = SkipAgreement(target, manifest.architecture, text.held_out, held_out_starts, _MAX_POSITIONS)
        preferred = iter(held_out.preferred)
        pairs = ((np.array([*islice(preferred, len(logits))]), logits) for logits in held_out.logits(skipped))
        tokens = _fastest_head(target, manifest, ranking, count_agreement(pairs, ranking), passes)
    if tokens < ranking.order.size:
        trim_own_draft(target, ranking.kept(tokens))
    progress(_STAGE, 1.0)
    return tuple(map(str, sorted(skipped))), tokens


def _sub_layer_times(
    target: Path, manifest: Manifest, whole: ModelProto
) -> tuple[dict[int, float], dict[SubLayer, float]]:
    """Seconds of the target's passes by width, and of each sub-layer.

    The time saved without all sub-layers of a kind is divided in proportion to their bytes.
    """
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
    # Rescaled to the state of the machine in which the sub-layers were timed.
    return {width: each * on_target[1] / by_width[1] for width, each in by_width.items()}, saved


def _fastest_head(
    target: Path, manifest: Manifest, ranking: TokenRanking, agreement: Agreement, passes: Mapping[int, float]
) -> int:
    """The fastest size of the draft's head."""
    draft = onnx.load(target / DRAFT_GRAPH_NAME, load_external_data=False)
    trimmed = trimmed_own_draft(target, ranking.kept(ranking.min_tokens))
    with (
        as_bundle(target, manifest, draft) as whole,
        as_bundle(target, manifest, trimmed.model(in_place)) as smallest,
    ):
        on_whole, on_smallest = BundleTimer().time_passes([whole, smallest], (1,), _ROUNDS)
    return best_size(ranking, agreement, passes, on_whole[1], on_smallest[1])
