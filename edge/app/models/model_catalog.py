"""What the app says of each model on this machine: its size, its memory, its speed, and what it is for."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from ....errors import EdgeError, InputError
from ....models.bundle import Bundle
from ....models.file_system import remove
from ....models.find import BUNDLED_MODEL, exports_folder, is_on_hub
from ....models.graph_files import find_graph
from ....models.hub.downloaded_model import parse_hub_id, read_downloaded
from ....models.hub.local_store import Store
from ....models.json_file import is_finite, is_whole
from ....models.manifest import MANIFEST_NAME, Manifest
from ....models.regular_file import MAX_JSON_BYTES, read_regular
from ....runtime.options import model_defaults
from ....runtime.sampling.sampler import SamplingParams
from ...conversations.store import ConversationStore
from ...service.model_pool import ModelPool
from ...service.offered_models import ModelEntry

_SPEEDS: Final = "model_speeds"
"""Name of the setting that keeps the measured speeds."""
_KEPT_SPEEDS: Final = 5
_LEAST_TOKENS: Final = 8
"""Shorter answers say little about a model's speed."""
_MAX_MODELS: Final = 200
"""Models whose speeds are kept; beyond it the ones measured longest ago are dropped."""
_FLOAT32_BYTES: Final = 4
_BUNDLED_ABOUT: Final = (
    'A shell helper: it turns a request in English into one shell command, such as "find large files here". It is '
    "not a chat model, and answers small talk with nonsense. To chat, download one of the recommended models."
)


@dataclass(frozen=True)
class ModelFacts:
    """What the page shows of a model. Unknown numbers are None."""

    id: str
    title: str
    """Its name without the organization."""
    loaded: bool
    loading: bool
    in_use: bool
    """Whether requests use it now, so that it cannot be unloaded."""
    bundled: bool
    removable: bool
    """Whether it was downloaded or exported here."""
    about: str
    """What it is, where there is something to say."""
    chats: bool
    """Whether it is for conversations: it has a chat template and is not the bundled model."""
    disk_bytes: int
    weight_bytes: int
    """Memory of the weights: bytes of the graph and its weights. ONNX Runtime keeps them in memory as packed for the
    processor, which is as many bytes within about a tenth (`export.allocation.plan_costs`)."""
    cache_bytes_per_token: int | None
    """Bytes of the KV cache per token: 2 (keys and values) x layers x KV heads x head size x 4 bytes. For a loaded
    model this is what its graph says, also where its cache has another type."""
    context: int | None
    """Tokens of prompt and answer together: of a loaded model as it was opened, else what its files allow."""
    memory_bytes: int
    """Memory that it needs with its context full: `weight_bytes + context * cache_bytes_per_token`; of a model whose
    cache is not known, the weights alone. The cache grows with the conversation, so short ones need less."""
    tokens_per_second: float | None
    """Median speed of its last answers on this machine; None if it has not been measured."""
    sampling_defaults: Mapping[str, float]
    """Sampling options that its files set, by their name in a conversation."""


class ModelSpeeds:
    """The speeds of the last answers of each model, kept in the store."""

    def __init__(self, store: ConversationStore) -> None:
        self._store: Final = store
        self._lock: Final = threading.Lock()

    def record(self, model: str, tokens: int, tokens_per_second: float | None) -> bool:
        """Keep the speed of an answer; returns whether it was long enough to count."""
        if tokens < _LEAST_TOKENS or not is_finite(tokens_per_second) or not tokens_per_second:
            return False
        with self._lock:
            known = self._known()
            recent = [*known.pop(model, [])[1 - _KEPT_SPEEDS :], round(float(tokens_per_second), 2)]
            kept = {**known, model: recent}
            self._store.set_setting(_SPEEDS, dict(list(kept.items())[-_MAX_MODELS:]))
        return True

    def of(self, model: str) -> float | None:
        """Median speed of the last answers of a model, in tokens per second; None if there is none."""
        recent = self._known().get(model, [])
        return median(recent) if recent else None

    def _known(self) -> dict[str, list[float]]:
        stored = self._store.setting(_SPEEDS, {})
        if not isinstance(stored, Mapping):
            return {}
        found = {
            str(model): [float(each) for each in speeds if is_finite(each) and each > 0]
            for model, speeds in stored.items()
            if isinstance(speeds, Sequence) and not isinstance(speeds, str)
        }
        return {model: speeds for model, speeds in found.items() if speeds}


class ModelCatalog:
    """The models of the app.

    Args:
        pool: the models that the app offers.
        store: keeps measured speeds.
    """

    def __init__(self, pool: ModelPool, store: ConversationStore) -> None:
        self._pool: Final = pool
        self.speeds: Final = ModelSpeeds(store)
        self._lock: Final = threading.Lock()
        self._read: Final[dict[tuple[str, int], _FileFacts]] = {}
        """What was read of a model's files, by their folder and the time at which the graph was written."""

    def models(self) -> list[ModelFacts]:
        """All models, the one that answers requests without a name first."""
        status = {each.id: each for each in self._pool.status()}
        found = []
        for entry in self._pool.names():
            known = status.get(entry.id)
            loaded = known is not None and known.loaded
            files = self._files(entry)
            context, cache = self._pool.sizes_of(entry.id) or (files.context, files.cache_bytes_per_token)
            bundled = entry.id == BUNDLED_MODEL
            found.append(
                ModelFacts(
                    id=entry.id,
                    title=_title(entry.id),
                    loaded=loaded,
                    loading=known is not None and not known.loaded,
                    in_use=known is not None and known.users > 0,
                    bundled=bundled,
                    removable=not bundled and _is_removable(entry),
                    about=_BUNDLED_ABOUT if bundled else "",
                    chats=files.has_template and not bundled,
                    disk_bytes=files.disk_bytes,
                    weight_bytes=files.weight_bytes,
                    cache_bytes_per_token=cache,
                    context=context,
                    memory_bytes=files.weight_bytes + (context or 0) * (cache or 0),
                    tokens_per_second=self.speeds.of(entry.id),
                    sampling_defaults=files.sampling_defaults,
                )
            )
        return found

    def objects(self) -> list[dict[str, Any]]:
        """The models as JSON objects."""
        return [asdict(model) for model in self.models()]

    def remove(self, name: str) -> int:
        """Unload a model that was downloaded or exported here, and remove its files; returns the bytes freed.

        Raises:
            InputError: it is the bundled model, or lies in a folder of the user's own.
            RequestError: there is no such model, or it is in use.
            HubError: the disk refused.
        """
        entry = self._pool.find(name)
        if entry.id == BUNDLED_MODEL:
            raise InputError(f"{entry.id} comes with edge-run and cannot be removed", "remove a downloaded model")
        path = Path(entry.source)
        downloaded = read_downloaded(path)
        exported = _is_exported(path)
        if downloaded is None and not exported:
            raise InputError(f"{entry.id} is not a model that the app downloaded", f"its files are in {entry.source}")
        self._pool.unload(entry.id)
        if downloaded is not None:
            store = Store(downloaded.repo)
            others = [each for each in store.all_downloaded() if each.folder != downloaded.folder]
            return store.remove([downloaded] if others or store.unfinished_bytes() else None)
        return remove_exported(path)

    def _files(self, entry: ModelEntry) -> _FileFacts:
        try:
            graph, _, folder = find_graph(_on_disk(entry), None, self._pool.kind)
            key = str(graph), graph.stat().st_mtime_ns
        except (EdgeError, OSError):
            return _FileFacts()  # not downloaded yet, removed meanwhile, or damaged: loading it says more
        with self._lock:
            if key not in self._read:
                self._read[key] = _FileFacts.read(graph, folder)
            return self._read[key]


@dataclass(frozen=True)
class _FileFacts:
    """What a model's files say of it."""

    disk_bytes: int = 0
    weight_bytes: int = 0
    cache_bytes_per_token: int | None = None
    context: int | None = None
    has_template: bool = False
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, graph: Path, folder: Path) -> _FileFacts:
        """Read the files of a model, but for its weights."""
        try:
            manifest_path = graph.parent / MANIFEST_NAME
            manifest = (
                Manifest.from_json(read_regular(manifest_path, MAX_JSON_BYTES)) if manifest_path.is_file() else None
            )
            bundle = Bundle(folder, graph, manifest)
            own = graph.parent if manifest is not None else folder
            disk = sum(path.stat().st_size for path in own.rglob("*") if path.is_file())
            template = bundle.file("chat_template.jinja") is not None or bool(
                bundle.json_file("tokenizer_config.json").get("chat_template")
            )
            return cls(
                disk,
                bundle.weight_bytes,
                _cache_bytes(bundle.config),
                bundle.context,
                template,
                _sampling_defaults(model_defaults(bundle)),
            )
        except (EdgeError, OSError):
            return cls()


def _sampling_defaults(defaults: SamplingParams) -> dict[str, float]:
    """What a model's files set; without `do_sample`, they ask for greedy decoding."""
    if defaults.greedy:
        return {"temperature": 0.0}
    values = {name: getattr(defaults, name) for name in ("top_k", "top_p", "min_p", "repeat_penalty")}
    changed = {name: value for name, value in values.items() if value != getattr(SamplingParams(), name)}
    return {"temperature": defaults.temperature, **changed}


def _cache_bytes(config: Mapping[str, Any]) -> int | None:
    """Bytes of a float32 KV cache per token by a config.json; None if it does not have the numbers."""
    heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    kv_heads = config.get("num_key_value_heads", heads)
    head_size = config.get("head_dim")
    if head_size is None and is_whole(heads, 1) and is_whole(config.get("hidden_size"), 1):
        head_size = config["hidden_size"] // config["num_attention_heads"]
    sizes = [int(size) for size in (layers, kv_heads, head_size) if size is not None and is_whole(size, 1)]
    return 2 * math.prod(sizes) * _FLOAT32_BYTES if len(sizes) == 3 else None


def remove_exported(folder: Path) -> int:
    """Remove an exported model; returns the bytes freed.

    Raises:
        InputError: the disk refused.
    """
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    try:
        remove(folder)
    except OSError as error:
        what = f"{error.filename or folder} cannot be removed: {error.strerror or error}"
        raise InputError(what, "close the programs that use it, and check its permissions") from error
    return size


def _is_removable(entry: ModelEntry) -> bool:
    path = Path(entry.source)
    return read_downloaded(path) is not None or _is_exported(path)


def _is_exported(path: Path) -> bool:
    return path.is_dir() and path.parent.resolve() == exports_folder().resolve()


def _on_disk(entry: ModelEntry) -> Path:
    """The path of a model's files, which do not exist for a hub id that is not downloaded yet."""
    path = Path(entry.source)
    if path.exists() or not is_on_hub(entry.source):
        return path
    named = parse_hub_id(entry.source)
    here = Store(named.repo).all_downloaded()
    return next((model.path for model in here if named.variant in (None, model.variant)), path)


def _title(model: str) -> str:
    name, _, variant = model.rpartition("/")[2].partition(":")
    return f"{name} ({variant})" if variant else name
