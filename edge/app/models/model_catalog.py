"""What the app says of each model on this machine: its size, its memory, its speed, and what it is for."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from ....errors import EdgeError, InputError
from ....models.bundle import Bundle
from ....models.file_system import remove
from ....models.find import BUNDLED_MODEL, exports_folder, is_on_hub
from ....models.graph_files import find_graph
from ....models.graph_variant import DeviceKind
from ....models.hub.downloaded_model import DownloadedModel, parse_hub_id, read_downloaded
from ....models.hub.local_store import Store
from ....models.json_file import is_whole
from ....models.manifest import MANIFEST_NAME, Manifest
from ....models.regular_file import MAX_JSON_BYTES, read_regular
from ....models.user_text import format_bytes
from ....runtime.options import model_defaults
from ....runtime.result import Stats
from ....runtime.sampling.sampler import SamplingParams
from ...conversations.store import ConversationStore
from ...service.model_pool import ModelPool
from ...service.offered_models import ModelEntry
from ..app_context import AppContext

_SPEEDS: Final = "model_speeds"
"""Name of the setting that keeps the speeds of the last answers of each model."""
_KEPT_SPEEDS: Final = 5
_RECORDING: Final = threading.Lock()
_LEAST_TOKENS: Final = 8
"""Shorter answers say little about a model's speed."""
_MAX_MODELS: Final = 200
"""Models whose speeds are kept; beyond it the ones measured longest ago are dropped."""
_BUNDLED_ABOUT: Final = (
    'A shell helper: it turns a request in English into one shell command, such as "find large files here". It is '
    "not a chat model, and answers small talk with nonsense. To chat, download one of the recommended models."
)
_UNKNOWN: Final[Mapping[str, Any]] = {
    "disk_bytes": 0,
    "weight_bytes": 0,
    "cache_bytes_per_token": None,
    "context": None,
    "chats": False,
    "sampling_defaults": {},
}
"""What is said of a model whose files cannot be read; loading it says more."""
_FILE: Final = Path(__file__).with_name("recommended_models.json")
_SMALL_SHARE: Final = 0.5
"""Share of the free memory up to which a model leaves enough for other programs."""
_FAST_ON_CPU: Final = 2_000_000_000
"""Bytes of weights up to which a CPU writes faster than people read: each token reads all of them, and the memory of a
laptop gives 20 to 50 GB a second."""


class ModelCatalog:
    """The models of the app.

    Args:
        pool: the models that the app offers.
        store: keeps measured speeds.
    """

    def __init__(self, pool: ModelPool, store: ConversationStore) -> None:
        self._pool: Final = pool
        self._store: Final = store
        self._lock: Final = threading.Lock()
        self._read: Final[dict[tuple[str, int], Mapping[str, Any]]] = {}
        """What was read of a model's files, by their folder and the time at which the graph was written."""

    def objects(self) -> list[dict[str, Any]]:
        """All models as JSON objects, the one that answers requests without a name first; unknown numbers are None.

        `weight_bytes` is the size of the graph and its weights: ONNX Runtime keeps them in memory as packed for the
        processor, which is as many bytes within about a tenth (`export.allocation.plan_costs`). `memory_bytes` is what
        the model needs with its `context` full; the cache grows with the conversation, so short ones need less. Of a
        loaded model, the context and the bytes of the cache are read from its graph as it was opened.
        `tokens_per_second` is the median of its last answers on this machine.
        """
        status = {each.id: each for each in self._pool.status()}
        found = []
        for entry in self._pool.offered.entries():
            known, files = status.get(entry.id), self._files(entry)
            context, cache = self._pool.sizes_of(entry.id) or (files["context"], files["cache_bytes_per_token"])
            bundled, path = entry.id == BUNDLED_MODEL, Path(entry.source)
            name, _, variant = entry.id.rpartition("/")[2].partition(":")
            speeds = self._store.setting(_SPEEDS, {}).get(entry.id)
            found.append(
                {
                    **files,
                    "id": entry.id,
                    "title": f"{name} ({variant})" if variant else name,
                    "loaded": known is not None and known.loaded,
                    "loading": known is not None and not known.loaded,
                    "in_use": known is not None and known.users > 0,
                    "bundled": bundled,
                    "removable": not bundled and (read_downloaded(path) is not None or _is_exported(path)),
                    "about": _BUNDLED_ABOUT if bundled else "",
                    "chats": files["chats"] and not bundled,
                    "cache_bytes_per_token": cache,
                    "context": context,
                    "memory_bytes": files["weight_bytes"] + (context or 0) * (cache or 0),
                    "tokens_per_second": median(speeds) if speeds else None,
                }
            )
        return found

    def remove(self, name: str) -> None:
        """Unload a model that was downloaded or exported here, and remove its files.

        Raises:
            InputError: it is the bundled model, or lies in a folder of the user's own; or the disk refused.
            RequestError: there is no such model, or it is in use.
            HubError: the disk refused.
        """
        entry = self._pool.offered.find(name)
        if entry.id == BUNDLED_MODEL:
            raise InputError(f"{entry.id} comes with edge-run and cannot be removed", "remove a downloaded model")
        path = Path(entry.source)
        downloaded = read_downloaded(path)
        if downloaded is None and not _is_exported(path):
            raise InputError(f"{entry.id} is not a model that the app downloaded", f"its files are in {entry.source}")
        self._pool.unload(entry.id)
        if downloaded is not None:
            store = Store(downloaded.repo)
            others = [each for each in store.all_downloaded() if each.folder != downloaded.folder]
            store.remove([downloaded] if others or store.unfinished_bytes() else None)
            return
        try:
            remove(path)
        except OSError as error:
            what = f"{error.filename or path} cannot be removed: {error.strerror or error}"
            raise InputError(what, "close the programs that use it, and check its permissions") from error

    def _files(self, entry: ModelEntry) -> Mapping[str, Any]:
        """What a model's files say of it."""
        path = Path(entry.source)
        try:
            if not path.exists() and is_on_hub(entry.source):
                named = parse_hub_id(entry.source)
                here = Store(named.repo).all_downloaded()
                path = next((each.path for each in here if named.variant in (None, each.variant)), path)
            graph, _, folder = find_graph(path, None, self._pool.kind)
            key = str(graph), graph.stat().st_mtime_ns
            with self._lock:
                if key not in self._read:
                    self._read[key] = _read_files(graph, folder)
                return self._read[key]
        except (EdgeError, OSError):  # not downloaded yet, removed meanwhile, or damaged
            return _UNKNOWN


def record_speed(context: AppContext, model: str | None, stats: Stats) -> None:
    """Keep the speed of an answer that is long enough to count, and tell the page."""
    if model and stats.text_tokens >= _LEAST_TOKENS and (speed := stats.decode_tokens_per_second):
        with _RECORDING:
            known = context.store.setting(_SPEEDS, {})
            known[model] = [*known.pop(model, [])[1 - _KEPT_SPEEDS :], round(speed, 2)]
            context.store.set_setting(_SPEEDS, dict(list(known.items())[-_MAX_MODELS:]))
        context.events.publish("models")


def _read_files(graph: Path, folder: Path) -> dict[str, Any]:
    """Read the files of a model, but for its weights.

    Raises:
        EdgeError: one is damaged.
        OSError: one cannot be read.
    """
    manifest_path = graph.parent / MANIFEST_NAME
    manifest = Manifest.from_json(read_regular(manifest_path, MAX_JSON_BYTES)) if manifest_path.is_file() else None
    bundle = Bundle(folder, graph, manifest)
    template = bundle.json_file("tokenizer_config.json").get("chat_template")
    files = (folder if manifest is None else graph.parent).rglob("*")
    return {
        "disk_bytes": sum(path.stat().st_size for path in files if path.is_file()),
        "weight_bytes": bundle.weight_bytes,
        "cache_bytes_per_token": _cache_bytes(bundle.config),
        "context": bundle.context,
        "chats": bundle.file("chat_template.jinja") is not None or bool(template),
        "sampling_defaults": _sampling_defaults(model_defaults(bundle)),
    }


def _sampling_defaults(defaults: SamplingParams) -> dict[str, float]:
    """Options of a conversation that a model's files set; without `do_sample`, they ask for greedy decoding."""
    if defaults.greedy:
        return {"temperature": 0.0}
    values = {name: getattr(defaults, name) for name in ("top_k", "top_p", "min_p", "repeat_penalty")}
    changed = {name: value for name, value in values.items() if value != getattr(SamplingParams(), name)}
    return {"temperature": defaults.temperature, **changed}


def _cache_bytes(config: Mapping[str, Any]) -> int | None:
    """Bytes of a float32 KV cache per token by a config.json; None if it does not have the numbers."""
    heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    head_size = config.get("head_dim")
    if head_size is None and is_whole(heads, 1) and is_whole(config.get("hidden_size"), 1):
        head_size = config["hidden_size"] // config["num_attention_heads"]
    sizes = (layers, config.get("num_key_value_heads", heads), head_size)
    # Keys and values of 4 bytes.
    return 2 * math.prod(sizes) * 4 if all(is_whole(size, 1) for size in sizes) else None


def _is_exported(path: Path) -> bool:
    return path.is_dir() and path.parent.resolve() == exports_folder().resolve()


@cache
def recommended_models() -> list[dict[str, Any]]:
    """The list, from small to large. Sizes are approximate: the hub says the exact ones.

    Of a model the list has the `variants` to download by kind of device, the `disk_bytes` of the CPU's variant, and the
    `memory_bytes` that it needs with a `context`: `disk_bytes + context * cache_bytes_per_token`. A model is
    recommended from `minimum_free_bytes` on: a quarter more, for the buffers of a pass. `quality` orders the models by
    their answers: larger is better.
    """
    models: list[dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))["models"]
    return models


def recommend(free_bytes: int, kind: DeviceKind, here: Collection[str]) -> list[dict[str, Any]]:
    """Order the list for a machine: what fits, the best answers first; then what does not, small ones first.

    A model that takes more than half of the free memory, or is slow on a CPU, fits, but comes after those that are
    neither.

    Args:
        free_bytes: memory that programs can have now.
        kind: kind of device that models run on.
        here: ids of models that are on this machine already.

    Returns:
        The models with their `id` on the hub, whether it `fits` and is `downloaded`, and the `reason` in a sentence.
    """
    ranked = []
    free = format_bytes(free_bytes)
    for model in recommended_models():
        name, needed = DownloadedModel.name(model["repo"], model["variants"].get(kind.value, "")), model["memory_bytes"]
        fits = model["minimum_free_bytes"] <= free_bytes
        large = needed > _SMALL_SHARE * free_bytes
        slow = kind is DeviceKind.CPU and model["disk_bytes"] > _FAST_ON_CPU
        if not fits:
            least = format_bytes(model["minimum_free_bytes"])
            reason = f"Too large now: it wants {least} of free memory, and {free} are free."
        elif large:
            reason = f"Fits, but takes most of it: needs {format_bytes(needed)} of your {free} free."
        else:
            but = ", but writes slowly without a graphics card" if slow else ""
            reason = f"Fits{but}: needs {format_bytes(needed)} of your {free} free."
        downloaded = any(each == name or each.partition(":")[0] == model["repo"] for each in here)
        rank = (False, large or slow, -model["quality"]) if fits else (True, True, needed)
        ranked.append((rank, {"id": name, "fits": fits, "downloaded": downloaded, "reason": reason, **model}))
    return [model for _, model in sorted(ranked, key=lambda each: each[0])]


def free_memory() -> int:
    """Bytes of memory that programs can have now."""
    return int(psutil.virtual_memory().available)
