"""Scales of a model's int8 KV cache, from its bundle or measured on a text, and what the cache costs in quality.

The largest keys and values of a short text are not the largest ever, and values beyond the largest code saturate, which
costs more than coarser codes do. Therefore scales have a margin, and those of rotated keys cover every position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import BundleError, DeviceError
from ...models.bundle import CACHE_SCALES_NAME, Bundle
from ...models.graph_variant import DeviceKind
from ...models.progress import Progress, silent
from ..arguments.load_options import MEASURING_OPTIONS
from ..graph.bound_graph import BoundGraph
from ..graph.int8_cache import RotatedPairs, observed_sizes, rotated_pairs
from ..graph.session import SessionConfig
from ..kv.cache_scales import CacheScales, Floats, KVFormat
from ..loaded_model import LoadedModel
from ..prefill import prefill
from ..text.turn_markers import TokenArray
from .exactness import SAMPLE_TEXT
from .measurement_store import MeasurementKey, MeasurementStore, model_id
from .text_sampler import SelfTextSampler

CACHE_SCALES: Final = MeasurementStore("kv-scales", 1, CacheScales.from_json, CacheScales.to_json)
"""Scales of models without a file of them."""

MARGIN: Final = 1.15
"""Largest code over the largest value seen (docs/decisions/0060-int8-cache.md)."""
_TOKENS: Final = 256
"""Tokens of the sampled texts."""
_MAX_TEXT_TOKENS: Final = 64
"""Tokens of a sampled text at most: eight short texts are sampled in as many passes as one."""
_STAGE: Final = "measuring the scales of the KV cache"
_WIDTH: Final = 32
"""Tokens per pass. Their logits are compared at once: 20 MB of them for a vocabulary of 152,000."""


def with_kv_format(
    kv: str, bundle: Bundle, config: SessionConfig, context: int | None, *, cache: bool, progress: Progress = silent
) -> SessionConfig:
    """The configuration with which a model has a KV cache of the format `kv`, `float` or `int8`.

    Args:
        kv: the wanted format.
        bundle: the model.
        config: how its graph is run, with a float cache.
        context: the context that the user wants; None for what the model allows.
        cache: whether what is measured is kept on disk, and used again.
        progress: receives the progress of measuring scales.

    Raises:
        BundleError: the model's cache cannot be quantized, or its file of scales is damaged.
        DeviceError: the format does not work on this device.
    """
    if kv == KVFormat.FLOAT:
        return config
    if config.device.kind is not DeviceKind.CPU:
        raise DeviceError(
            f"an int8 KV cache works on the CPU alone, not on {config.device}", "leave --kv out, or add --device cpu"
        )
    stored = stored_scales(bundle)
    key = MeasurementKey((model_id(bundle),), {"model": bundle.folder.name})
    if stored is None and cache:
        stored = CACHE_SCALES.load(key)
    if stored is None:
        stored = _measured(bundle, config, context, cache, progress)
        if cache:
            CACHE_SCALES.save(key, stored)
    return replace(config, kv_scales=stored)


def stored_scales(bundle: Bundle) -> CacheScales | None:
    """The scales that the export stored in a bundle; None if it stored none.

    Raises:
        BundleError: the file is damaged.
    """
    if bundle.manifest is None or CACHE_SCALES_NAME not in bundle.manifest.files:
        return None
    try:
        return CacheScales.from_json(bundle.json_file(CACHE_SCALES_NAME))
    except ValueError as error:
        raise BundleError(f"{bundle.folder / CACHE_SCALES_NAME} {error}", "export the model again") from error


def calibrated_scales(
    bound: BoundGraph,
    pairs: Mapping[str, RotatedPairs],
    texts: Iterable[TokenArray],
) -> CacheScales:
    """Scales for the keys and values that a model has over texts.

    Args:
        bound: the graph with a float cache, whose contents are lost.
        pairs: how its keys are rotated; see `rotated_pairs`.
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
        tensors = {
            names[index]: tensor
            for stack, members in zip(slots, bound.arena.groups.values(), strict=True)
            for tensor, index in zip(stack, members, strict=True)
        }
        for name, sizes in observed_sizes(tensors, pairs).items():
            largest[name] = np.maximum(largest.get(name, sizes), sizes)
    bound.arena.rewind_to(0)
    return CacheScales.of_largest({name: MARGIN * sizes for name, sizes in largest.items()})


def _measured(
    bundle: Bundle, config: SessionConfig, context: int | None, cache: bool, progress: Progress
) -> CacheScales:
    """Scales measured on texts that the model samples with a float cache, and on the sample text."""
    pairs = rotated_pairs(bundle.graph)
    # Sliding windows count slots, which texts sampled together do not have in order.
    windows = bundle.config.get("sliding_window") is not None and bundle.config.get("use_sliding_window") is not False
    progress(_STAGE, 0.0)
    model = LoadedModel(bundle, config, MEASURING_OPTIONS.changed({"cache": cache, "context": context}))
    try:
        sampler = SelfTextSampler(model, _MAX_TEXT_TOKENS, 0, sliding_windows=windows)
        texts = sampler.texts(_TOKENS, lambda fraction: progress(_STAGE, 0.9 * fraction))
        sample = model.tokenizer.encode(SAMPLE_TEXT, add_special_tokens=True) or [0]
        texts.append(np.array(sample[: model.context], np.int64))
        return calibrated_scales(model.new_sequence().bound, pairs, texts)
    finally:
        model.close()
        progress(_STAGE, 1.0)


@dataclass(frozen=True)
class CacheQuality:
    """Logits with an int8 cache compared with those with a float cache, at every position of some texts."""

    mean_kl: float
    """Mean KL divergence of the next token's distribution, in nats."""
    p99_kl: float
    """KL divergence that 99 % of the positions stay below."""
    top1_agreement: float
    """Share of the positions with the same most likely token."""
    positions: int
    """Number of positions that were compared."""
    longest: int
    """Number of tokens of the longest text."""


def measure_cache_quality(
    quantized: BoundGraph,
    reference: BoundGraph,
    texts: Sequence[Sequence[int]],
    progress: Callable[[float], None] = lambda _: None,
) -> CacheQuality:
    """Compare the logits of two graphs, which differ in their caches, over texts.

    Args:
        quantized: the graph with an int8 cache, whose contents are lost.
        reference: the same with a float cache, whose contents are lost.
        texts: token ids, at least one text; those longer than the context are cut.
        progress: receives the fraction done, 0 to 1.

    Raises:
        EdgeError: ONNX Runtime failed.
        ValueError: there is no text.
    """
    limit = min(quantized.arena.limit, reference.arena.limit)
    cut = [list(text[:limit]) for text in texts if len(text)]
    if not cut:
        raise ValueError("there is no text to compare caches on")
    kl, agrees = [], []
    for number, text in enumerate(cut):
        for found, expected in zip(_log_probs(quantized, text), _log_probs(reference, text), strict=True):
            kl.append(np.sum(np.exp(expected) * (expected - found), axis=-1))
            agrees.append(found.argmax(axis=-1) == expected.argmax(axis=-1))
        progress((number + 1) / len(cut))
    values = np.concatenate(kl)
    return CacheQuality(
        mean_kl=float(values.mean()),
        p99_kl=float(np.quantile(values, 0.99)),
        top1_agreement=float(np.concatenate(agrees).mean()),
        positions=values.size,
        longest=max(map(len, cut)),
    )


def _log_probs(bound: BoundGraph, text: Sequence[int]) -> Iterator[npt.NDArray[np.float64]]:
    """Yield the log-probabilities `[n, V]` after each token of a text, a pass at a time."""
    bound.arena.rewind_to(0)
    for start in range(0, len(text), _WIDTH):
        tokens = text[start : start + _WIDTH]
        logits = bound.forward(tokens).astype(np.float64)
        bound.arena.commit(len(tokens))
        logits -= logits.max(axis=-1, keepdims=True)
        yield logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
