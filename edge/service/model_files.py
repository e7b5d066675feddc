"""What the files of the offered models say of them, and removing these files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ...errors import EdgeError, InputError
from ...models.bundle import Bundle, unchecked_bundle
from ...models.file_system import remove
from ...models.find import BUNDLED_MODEL, exports_folder, is_on_hub
from ...models.graph_files import find_graph
from ...models.hub.downloaded_model import parse_hub_id, read_downloaded
from ...models.hub.local_store import Store
from ...models.json_file import is_whole
from ...models.manifest import DeviceKind
from ...runtime.options import model_defaults
from ...runtime.sampling.sampler import SamplingParams
from .model_pool import ModelPool
from .offered_models import ModelEntry, capabilities

_UNKNOWN: Final[Mapping[str, Any]] = {
    "architecture": "",
    "disk_bytes": 0,
    "weight_bytes": 0,
    "cache_bytes_per_token": None,
    "context": None,
    "capabilities": ["completion"],
    "sampling_defaults": {},
}
"""What is said of a model whose files cannot be read; loading it says more."""


def describe_model(entry: ModelEntry, kind: DeviceKind) -> Mapping[str, Any]:
    """What a model's files say of it, those for a kind of device."""
    path = Path(entry.source)
    try:
        if not path.exists() and is_on_hub(entry.source):
            named = parse_hub_id(entry.source)
            here = Store(named.repo).all_downloaded()
            path = next((each.path for each in here if named.variant in (None, each.variant)), path)
        graph, _, folder = find_graph(path, None, kind)
        return _read_files(graph, folder, graph.stat().st_mtime_ns)
    except (EdgeError, OSError):  # not downloaded yet, removed meanwhile, or damaged
        return _UNKNOWN


@lru_cache(256)
def _read_files(graph: Path, folder: Path, _modified_ns: int) -> Mapping[str, Any]:
    return describe_files(unchecked_bundle(graph, folder))


def remove_model(pool: ModelPool, model: str) -> None:
    """Unload a model that was downloaded or exported here, and remove its files.

    Raises:
        InputError: it is the bundled model, or lies in a folder of the user's own; or the disk refused.
        RequestError: there is no such model, or it is in use.
        HubError: the disk refused.
    """
    entry = pool.offered.find(model)
    if entry.id == BUNDLED_MODEL:
        raise InputError(f"{entry.id} comes with edge-run and cannot be removed", "remove a downloaded model")
    path = Path(entry.source)
    downloaded = read_downloaded(path)
    if downloaded is None and not _is_exported(path):
        raise InputError(f"{entry.id} is not a model that edge-run downloaded", f"its files are in {entry.source}")
    pool.unload(entry.id)
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


def is_removable(path: Path) -> bool:
    """Whether a model was downloaded or exported by edge-run, to its own folders."""
    return read_downloaded(path) is not None or _is_exported(path)


def _is_exported(path: Path) -> bool:
    return path.is_dir() and path.parent.resolve() == exports_folder().resolve()


def describe_files(bundle: Bundle) -> dict[str, Any]:
    """Read the files of a model, but for its weights.

    Raises:
        EdgeError: one is damaged.
        OSError: one cannot be read.
    """
    files = (bundle.folder if bundle.manifest is None else bundle.graph.parent).rglob("*")
    return {
        "architecture": str(bundle.config.get("model_type", "")),
        "disk_bytes": sum(path.stat().st_size for path in files if path.is_file()),
        "weight_bytes": bundle.weight_bytes,
        "cache_bytes_per_token": _cache_bytes(bundle.config),
        "context": bundle.context,
        "capabilities": capabilities(bundle),
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
