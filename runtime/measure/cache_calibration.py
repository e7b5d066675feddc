"""Scales of a model's quantized KV cache, from its bundle or measured on a text.

The largest keys and values of a short text are not the largest ever, and values beyond the largest code saturate, which
costs more than coarser codes do. Therefore scales have a margin, and the scales of rotated keys cover every position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import BundleError, DeviceError
from ...models.bundle import CACHE_SCALES_NAME, Bundle
from ...models.manifest import DeviceKind
from ...models.progress import Progress, silent
from ..arguments.load_options import MEASURING_OPTIONS
from ..graph.attention_edits import Rotation
from ..graph.bound_graph import BoundGraph
from ..graph.quantized_cache import envelope, key_rotations
from ..graph.session import SessionConfig
from ..kv.cache_scales import CacheScales, Floats, KVFormat
from ..loaded_model import LoadedModel
from ..prefill import prefill
from .exactness import SAMPLE_TEXT
from .measurement_store import MeasurementStore, model_id
from .text_sampler import SAMPLED_TOGETHER, SelfTextSampler

CACHE_SCALES: Final = MeasurementStore("kv-scales", 1, CacheScales.from_json, CacheScales.to_json)
"""Scales of models without a file of them."""

MARGIN: Final = 1.15
"""Largest code over the largest value seen (docs/decisions/0060-int8-cache.md)."""
_TOKENS: Final = 256
"""Tokens of the sampled texts."""
_MAX_TEXT_TOKENS: Final = 64
"""Tokens of a sampled text at most: eight short texts are sampled in as many passes as one."""
_STAGE: Final = "measuring the scales of the KV cache"


def with_quantized_kv(
    bundle: Bundle,
    config: SessionConfig,
    kv: KVFormat,
    context: int | None,
    *,
    cache: bool,
    progress: Progress = silent,
) -> SessionConfig:
    """The configuration with which a model has a quantized KV cache.

    Args:
        bundle: the model.
        config: how its graph is run, with a float cache.
        kv: the format of the cache.
        context: the context that the user wants; None for what the model allows.
        cache: whether what is measured is kept on disk, and used again.
        progress: receives the progress of measuring scales.

    Raises:
        BundleError: the model's cache cannot be quantized, or its file of scales is damaged.
        DeviceError: the format does not work on this device.
    """
    if config.device.kind is not DeviceKind.CPU:
        raise DeviceError(
            f"an {kv} KV cache works on the CPU alone, not on {config.device}", "leave --kv out, or add --device cpu"
        )
    stored = None
    if bundle.manifest is not None and CACHE_SCALES_NAME in bundle.manifest.files:
        try:
            stored = CacheScales.from_json(bundle.json_file(CACHE_SCALES_NAME))
        except ValueError as error:
            raise BundleError(f"{bundle.folder / CACHE_SCALES_NAME} {error}", "export the model again") from error
    key = (model_id(bundle),)
    if stored is None and cache:
        stored = CACHE_SCALES.load(key)
    if stored is None:
        stored = _measured(bundle, config, context, cache, progress)
        if cache:
            CACHE_SCALES.save(key, stored)
    return replace(config, kv_scales=stored.of_format(kv))


def calibrated_scales(
    bound: BoundGraph, rotations: Mapping[str, Rotation | None], texts: Iterable[npt.NDArray[np.int64]]
) -> CacheScales:
    """Scales for the keys and values that a model has over texts.

    Args:
        bound: the graph with a float cache, whose contents are lost.
        rotations: how its keys are rotated; see `key_rotations`.
        texts: token ids, int64 `[n]` each, at least one.

    Raises:
        ContextError: a text does not fit the context.
        EdgeError: ONNX Runtime failed.
    """
    names = [each.past for each in bound.graph_io.cache]
    largest: dict[str, Floats] = {}
    for text in texts:
        bound.arena.rewind_to(0)
        prefill(bound, text.tolist())
        slots = bound.arena.buffers.read(bound.arena.length)
        for stack, members in zip(slots, bound.arena.groups.values(), strict=True):
            for tensor, index in zip(stack, members, strict=True):
                name, values = names[index], tensor[0].astype(np.float32, copy=False)
                # Of rotated keys, the sizes at any position.
                is_key = name in rotations
                sizes = envelope(values, rotations[name]) if is_key else np.abs(values).max(axis=1, initial=0.0)
                largest[name] = np.maximum(largest.get(name, sizes), sizes)
    bound.arena.rewind_to(0)
    return CacheScales.of_largest({name: MARGIN * sizes for name, sizes in largest.items()})


def _measured(
    bundle: Bundle, config: SessionConfig, context: int | None, cache: bool, progress: Progress
) -> CacheScales:
    """Scales measured on texts that the model samples with a float cache, and on the sample text."""
    rotations = key_rotations(bundle.graph)
    progress(_STAGE, 0.0)
    model = LoadedModel(
        bundle, config, MEASURING_OPTIONS.changed({"cache": cache, "context": context, "parallel": SAMPLED_TOGETHER})
    )
    try:
        sampler = SelfTextSampler(model, _MAX_TEXT_TOKENS, 0)
        texts = sampler.texts(_TOKENS, lambda fraction: progress(_STAGE, 0.9 * fraction))
        sample = model.tokenizer.encode(SAMPLE_TEXT, add_special_tokens=True) or [0]
        texts.append(np.array(sample[: model.context], np.int64))
        return calibrated_scales(model.new_sequence().bound, rotations, texts)
    finally:
        model.close()
        progress(_STAGE, 1.0)
