"""Loads a model: finds its files, device, threads and draft, and gives an `Engine`."""

from __future__ import annotations

import logging
import os
from typing import Final

import psutil

from ..errors import EdgeError, InputError
from ..models.bundle import open_bundle
from ..models.device_kind import DeviceKind
from ..models.find import find_model, path_of_user
from ..models.pairing import find_draft
from ..models.progress import Progress, silent
from .argument_types import checked_arguments
from .devices.power import Power, choose_power, saver_threads
from .devices.processor import usable_cores
from .devices.providers import Device, choose_device, cpu_device
from .engine import Engine
from .graph.session import SessionConfig
from .kv.cache_scales import KVFormat
from .kv.prefix_files import DEFAULT_DISK_BYTES
from .loaded_model import LoadedModel
from .measure.fastest_device import measured_device
from .measure.thread_choice import chosen_threads
from .options import Persistence
from .overflow import Overflow
from .prefill import PrefillMode
from .scheduling.request_queue import DEFAULT_MAX_WAITING, DEFAULT_PARALLEL, RequestQueue
from .speculation.draft_loading import place_draft

_log: Final = logging.getLogger(__name__)

_PREFIX_SHARE: Final = 0.25
"""Share of the free memory that the KV caches of earlier answers may take."""


@checked_arguments
def load(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    threads: int | None = None,
    power: str = Power.AUTO,
    kv: str = KVFormat.FLOAT,
    prefill: str = PrefillMode.AUTO,
    context: int | None = None,
    cache: bool = True,
    draft: str | os.PathLike[str] | None = "auto",
    draft_device: str = "auto",
    history: bool = False,
    learned: bool = True,
    tokenizer: str | os.PathLike[str] | None = None,
    progress: Progress = silent,
    prefix_cache: int | None = None,
    prefix_disk: int = DEFAULT_DISK_BYTES,
    overflow: str | None = None,
    parallel: int = DEFAULT_PARALLEL,
    max_waiting: int = DEFAULT_MAX_WAITING,
    tool_format: str = "auto",
) -> Engine:
    """Load a model.

    Args:
        model: an .onnx file, a model folder, or `org/name[:variant][@revision]` on the Hugging Face Hub; None for the
            model that comes with edge-run.
        device: `auto`, `cpu`, `gpu`, `npu` or the name of an execution provider, with an index where there are several
            devices, as in `webgpu:1`. `auto` is the device on which `edge-run tune` measured this model to be fastest,
            and the CPU until then, or where that device fails.
        threads: number of compute threads, at most one per processor that this program may use; None for the number
            that `edge-run tune` found to be fastest, else one per performance core, or half as many to save power.
        power: `performance`, `saver` (fewer threads, which sleep between passes: slower, for less processor time), or
            `auto` for `saver` where the machine runs on its battery now. The text does not depend on it.
        kv: element type of the KV cache: `float`, or `int8` for a quarter of the memory at a small loss of quality, on
            the CPU alone. Its scales come with the model, or are measured when it is first loaded.
        prefill: which graph reads prompts on the CPU: `plain` for the model's own; `int8` for a copy with int8 weights,
            which is made now, reads long prompts faster, and changes the KV cache a little; `auto` for that copy where
            it was made, found faster and passed a check of its quality: `edge-run tune` does all this, and so does the
            engine in the background while it is idle after a long prompt.
        context: largest number of tokens of a conversation; None for what the model allows.
        cache: whether to keep on disk what is measured and prepared for this machine: packed weights, the cost of a
            pass, n-gram tables, candidates of the recycling drafter, and how often candidates are accepted.
        draft: the draft model: a path, None for none, or `auto` for the one the model names.
        draft_device: where the draft model runs, as for `device`; `auto` for the CPU, or the model's own device if the
            draft is made of its layers. On another device than the model's it runs while the model verifies.
        history: whether to keep conversations on disk, and to draft from earlier ones.
        learned: whether to keep in the cache what drafters learn from answers; switch it off for repeatable
            measurements.
        tokenizer: a tokenizer.json, or a folder with one, for a model that has none beside it.
        prefix_cache: maximum bytes of memory for the KV caches of earlier answers, those of a draft model included,
            from which prompts with the same beginning continue; None for a quarter of the memory that is free now, 0
            for none.
        prefix_disk: maximum bytes on disk for the KV caches of the prefixes that `keep_prefix` keeps, those of all
            models together; 0 for none. Without `cache` there are none.
        overflow: what happens where a conversation is longer than the context, where the options of an answer do not
            say so; see `GenerateOptions.overflow`. None for `error`.
        parallel: number of answers that are generated at a time. Each has a KV cache of its own; they alternate, one
            forward pass each.
        max_waiting: number of further requests that may wait; more are refused with a `BusyError`.
        tool_format: how the model writes calls of functions: `auto` for the form that its chat template is made for,
            the name of a form, or `none` to leave calls in the text.
        progress: called as `progress(stage, fraction)` while an answer waits for a long prompt to be read, or for the
            measurements that the first answer of a new model needs; in the thread that generates.

    Raises:
        BundleError: there is no such model, or it is damaged.
        DeviceError: this machine has no such device, or it cannot run the model, or runs it wrongly.
        InputError: a number is out of range.
    """
    threads = usable_threads(threads)
    if context is not None and context < 2:
        raise InputError(f"context is {context}", "it must be 2 or more")
    if prefix_cache is not None and prefix_cache < 0:
        raise InputError(f"prefix_cache is {prefix_cache}", "it must be a number of bytes, 0 or more")
    if prefix_disk < 0:
        raise InputError(f"prefix_disk is {prefix_disk}", "it must be a number of bytes, 0 or more")
    if parallel < 1 or max_waiting < 0:
        name, value, least = ("parallel", parallel, 1) if parallel < 1 else ("max_waiting", max_waiting, 0)
        raise InputError(f"{name} is {value}", f"it must be {least} or more")
    policy = None if overflow is None else Overflow.parse(overflow)
    if prefill not in list(PrefillMode):
        raise InputError(f"prefill is {prefill!r:.60}", f"it must be one of {', '.join(PrefillMode)}")
    chosen, mode = choose_device(device), choose_power(power)
    tokenizer_path = (
        None if tokenizer is None else path_of_user(tokenizer, "give a tokenizer.json, or a folder with one")
    )
    bundle = open_bundle(find_model(model, chosen.kind), kind=chosen.kind, tokenizer=tokenizer_path)
    # An int8 cache and an int8 prompt graph are the CPU's, so nothing else is chosen for them.
    automatic = device.lower() == "auto" and kv != KVFormat.INT8 and prefill != PrefillMode.INT8
    if automatic and cache:
        chosen = measured_device(bundle)
    pair = find_draft(bundle, draft)
    if prefix_cache is None:
        prefix_cache = int(_PREFIX_SHARE * psutil.virtual_memory().available)
    persistence = Persistence(cache, history, learned, prefix_cache, prefix_disk)
    if pair is None and draft_device != "auto":
        _log.warning("draft_device is %s, but %s has no draft model", draft_device, bundle.folder)

    def engine_on(where: Device) -> Engine:
        count = threads
        if not count and mode.saves:
            count = saver_threads()
        elif not count and cache:
            count = chosen_threads(bundle, SessionConfig(where))
        config = SessionConfig(where, count, mode)
        if kv != KVFormat.FLOAT:
            from .measure.cache_calibration import with_kv_format  # noqa: PLC0415 -- importing protobuf takes 28 ms

            config = with_kv_format(kv, bundle, config, context, cache=cache, progress=progress)
        placed = None
        if pair is not None and pair.head is not None and where.kind is not DeviceKind.CPU:
            _log.warning("%s runs without its draft head, which works on the CPU alone", bundle.folder)
        elif pair is not None and pair.layer_skip and where.kind is DeviceKind.NPU:
            _log.warning("%s runs without the draft of its own layers, which cannot use an NPU's cache", bundle.folder)
        elif pair is not None:
            config, placed = place_draft(pair, config, draft_device)
        queue = RequestQueue(parallel, max_waiting)
        reads = PrefillMode(prefill)
        model = LoadedModel(
            *(bundle, config, context, placed, persistence, progress, queue, policy),
            prefill=reads,
            tool_format=tool_format,
        )
        return Engine(model)

    if not automatic or chosen.kind is DeviceKind.CPU:
        return engine_on(chosen)
    try:
        return engine_on(chosen)
    except EdgeError as error:
        _log.warning("%s was fastest for %s, but %s; the CPU computes", chosen.name, bundle.folder.name, error.what)
        return engine_on(cpu_device())


def usable_threads(wanted: int | None) -> int:
    """The number of threads to compute with: `wanted`, as far as they can run at the same time; 0 for None.

    Raises:
        InputError: the number is less than 1.
    """
    if wanted is None:
        return 0
    if wanted < 1:
        raise InputError(f"threads is {wanted}", "it must be 1 or more")
    if wanted > (most := usable_cores()):
        _log.warning("threads is %d, but this program may use %d processors: %d threads compute", wanted, most, most)
    return min(wanted, most)
