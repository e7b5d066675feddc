"""Stores the scales of an int8 KV cache in a bundle, and measures what that cache costs in quality."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ...models.bundle import CACHE_SCALES_NAME, digest_file, open_bundle
from ...models.manifest import MANIFEST_NAME, GraphLayout
from ...runtime.devices.providers import choose_device
from ...runtime.graph.int8_cache import rotated_pairs
from ...runtime.graph.session import GraphSession, SessionConfig
from ...runtime.measure.cache_calibration import calibrated_scales
from ...runtime.measure.cache_quality import CacheQuality, measure_cache_quality
from ...runtime.text.turn_markers import TokenArray
from .calibration_text import CalibrationText

_CALIBRATION_TOKENS: Final = 2048
_COMPARED_TOKENS: Final = 1024
"""Held-out tokens on which the caches are compared: each runs through the model twice."""


def store_cache_scales(folder: Path, text: CalibrationText) -> CacheQuality | None:
    """Measure scales on calibration text, store them in a bundle, and compare the caches on held-out text.

    Args:
        folder: the bundle's folder.
        text: its calibration text.

    Returns:
        The quality with an int8 cache; None for a layout that other programs run.

    Raises:
        EdgeError: ONNX Runtime failed.
        OSError: the disk refused a write.
    """
    bundle = open_bundle(folder)
    manifest = bundle.manifest
    if manifest is None or manifest.layout is not GraphLayout.EDGE:
        return None
    context = manifest.architecture.context
    config = SessionConfig(choose_device("cpu"))
    session = GraphSession(bundle.graph, config)
    bound = session.bind(session.arena(context))
    texts = list(_first(text.calibration, _CALIBRATION_TOKENS, context))
    scales = calibrated_scales(bound, rotated_pairs(bundle.graph), texts)
    path = folder / CACHE_SCALES_NAME
    path.write_text(json.dumps(scales.to_json()) + "\n", encoding="utf-8")
    files = {**manifest.files, CACHE_SCALES_NAME: digest_file(path)}
    (folder / MANIFEST_NAME).write_text(replace(manifest, files=files).to_json(), encoding="utf-8")
    quantized = GraphSession(bundle.graph, replace(config, kv_scales=scales))
    compared = [part.tolist() for part in _first(text.held_out, _COMPARED_TOKENS, context)]
    return measure_cache_quality(quantized.bind(quantized.arena(context)), bound, compared)


def _first(texts: Sequence[TokenArray], tokens: int, context: int) -> Iterable[TokenArray]:
    """The first texts of about `tokens` tokens together, at least one; each is cut to the context."""
    total = 0
    for text in texts:
        if total >= tokens:
            return
        yield text[:context]
        total += len(text)
