"""Loads a model: finds its files, device, threads and draft, and gives an `Engine`."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Final, Unpack

from ..errors import EdgeError
from ..models.bundle import Bundle, open_bundle
from ..models.find import find_model, path_of_user
from ..models.manifest import DeviceKind
from ..models.pairing import DraftPair, find_draft
from ..models.progress import Progress, silent
from .arguments.argument_types import checked_arguments, lists_options
from .arguments.load_options import LoadOptions
from .arguments.option_keywords import LoadKeywords
from .devices.processor import available_memory, choose_power, saver_threads, usable_cores
from .devices.providers import Device, choose_device, cpu_device
from .engine import Engine
from .graph.session import SessionConfig
from .kv.cache_scales import KVFormat
from .loaded_model import LoadedModel
from .measure.device_choice import chosen_threads, measured_device
from .prefill import PrefillMode
from .speculation.draft_loading import PlacedDraft, place_draft

_log: Final = logging.getLogger(__name__)

_PREFIX_SHARE: Final = 0.25
"""Share of the free memory that the KV caches of earlier answers may take."""


@lists_options(LoadOptions)
@checked_arguments
def load(
    model: str | os.PathLike[str] | None = None,
    options: LoadOptions | None = None,
    *,
    progress: Progress = silent,
    **changes: Unpack[LoadKeywords],
) -> Engine:
    """Load a model.

    Options can be given as a `LoadOptions`, which explains them, by name, or both.

    Args:
        model: an .onnx file, a model folder, or `org/name[:variant][@revision]` on the Hugging Face Hub; None for the
            model that comes with edge-run.
        options: how the model is opened and run.
        progress: called as `progress(stage, fraction)` while an answer waits for a long prompt to be read, or for the
            measurements that the first answer of a new model needs; in the thread that generates.
        changes: options by name.

    Raises:
        BundleError: there is no such model, or it is damaged.
        DeviceError: this machine has no such device, or it cannot run the model, or runs it wrongly.
        InputError: an option is unknown, or its value is out of range.
    """
    wanted = (options or LoadOptions()).changed(changes)
    cache, tokenizer, threads = wanted.cache, wanted.tokenizer, usable_threads(wanted.threads)
    chosen, mode = choose_device(wanted.device), choose_power(wanted.power)
    if tokenizer is not None:
        tokenizer = path_of_user(tokenizer, "give a tokenizer.json, or a folder with one")
    bundle = open_bundle(find_model(model, chosen.kind), kind=chosen.kind, tokenizer=tokenizer)
    # A quantized cache and an int8 prompt graph are the CPU's, so nothing else is chosen for them.
    automatic = wanted.device.lower() == "auto" and wanted.kv == KVFormat.FLOAT and wanted.prefill != PrefillMode.INT8
    if automatic and cache:
        chosen = measured_device(bundle)
    pair = find_draft(bundle, wanted.draft)
    if wanted.prefix_cache is None:
        wanted = replace(wanted, prefix_cache=int(_PREFIX_SHARE * available_memory()))
    if pair is None and wanted.draft_device != "auto":
        _log.warning("draft_device is %s, but %s has no draft model", wanted.draft_device, bundle.folder)

    def engine_on(where: Device) -> Engine:
        stored = chosen_threads(bundle, SessionConfig(where)) if cache else 0
        count = threads or (saver_threads() if mode.saves else stored)
        config = SessionConfig(where, count, mode)
        if wanted.kv != KVFormat.FLOAT:
            from .measure.cache_calibration import with_quantized_kv  # noqa: PLC0415 -- importing protobuf takes 28 ms

            config = with_quantized_kv(
                bundle, config, KVFormat(wanted.kv), wanted.context, cache=cache, progress=progress
            )
        config = replace(config, shares_cores=wanted.anchor is not None)
        config, placed = _with_draft(bundle, config, pair, wanted.draft_device)
        return Engine(LoadedModel(bundle, config, wanted, placed, progress))

    try:
        return engine_on(chosen)
    except EdgeError as error:
        if not automatic or chosen.kind is DeviceKind.CPU:
            raise
        _log.warning("%s was fastest for %s, but %s; the CPU computes", chosen.name, bundle.folder.name, error.what)
        return engine_on(cpu_device())


def _with_draft(
    bundle: Bundle, config: SessionConfig, pair: DraftPair | None, draft_device: str
) -> tuple[SessionConfig, PlacedDraft | None]:
    """How the target and its draft run; None for a draft that cannot run there."""
    if pair is None:
        return config, None
    if pair.head is not None and config.device.kind is not DeviceKind.CPU:
        _log.warning("%s runs without its draft head, which works on the CPU alone", bundle.folder)
        return config, None
    return place_draft(pair, config, draft_device)


def usable_threads(wanted: int | None) -> int:
    """The number of threads to compute with: `wanted`, as far as they can run at the same time; 0 for None."""
    if wanted is None:
        return 0
    if wanted > (most := usable_cores()):
        _log.warning("threads is %d, but this program may use %d processors: %d threads compute", wanted, most, most)
    return min(wanted, most)
