"""Which models a service offers, and the ids that clients name them by."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from ...errors import EdgeError
from ...models.bundle import Bundle, unchecked_bundle
from ...models.find import find_model, is_on_hub, named_models
from ...models.graph_files import find_graph
from ...models.hub.downloaded_model import parse_hub_id, read_downloaded
from ...models.hub.local_store import stores
from ...models.manifest import DeviceKind
from ...models.onnx_file.wire import external_files
from ...runtime.graph.encoder_graph import SCORE, encoder_output
from .request_error import ErrorCode, RequestError

_MAX_NAMED: Final = 8
"""Number of models that an error message names."""


@dataclass(frozen=True)
class ModelEntry:
    """A model that is offered."""

    id: str
    """What a client writes in `model`."""
    source: str
    """What `edgerun.load` opens: a path, or an id on the Hugging Face Hub."""
    aliases: tuple[str, ...] = ()
    """Further names, which count as far as only one model has them."""
    created: int = 0
    """Time at which its files were written, in seconds since 1970; 0 where that is unknown."""
    owner: str = "edge-run"
    """The organization on the hub; for other models `edge-run`."""


class OfferedModels:
    """The models that a service offers: those given, or those on this machine (bundled, exported, from the hub).

    A model's id is its name on the hub (`org/name`, `org/name:variant`), or the name of its folder; where several
    models would have one id, the path as it was given. Without given models the list follows what is on disk.

    Args:
        given: paths, hub ids, and the bundled model's name; empty for what is on this machine.
        kind: kind of device that the models will run on.

    Raises:
        BundleError: a path does not exist, or holds no model.
    """

    def __init__(self, given: Sequence[str], kind: DeviceKind = DeviceKind.CPU) -> None:
        self._kind: Final = kind
        entries = [_given_entry(name, kind) for name in dict.fromkeys(given)]
        ids = [entry.id for entry in entries]
        self._given: Final = tuple(
            entry if ids.count(entry.id) == 1 else replace(entry, id=entry.source, aliases=(entry.id,))
            for entry in entries
        )
        self.local = not given
        """Whether what is on this machine is offered, also beside given models."""

    def entries(self) -> tuple[ModelEntry, ...]:
        """The models, the one that answers requests without a name first."""
        given, local = self._given, _local_entries() if self.local else ()
        found = {entry.id: entry for entry in (*reversed(local), *reversed(given))}
        return tuple(dict.fromkeys(found[entry.id] for entry in (*given, *local)))

    def find(self, name: str | None) -> ModelEntry:
        """Return the model of a name; the first one for None.

        Raises:
            RequestError: there is no such model, or several have the name.
        """
        entries = self.entries()
        if name is None:
            if not entries:
                hint = "download one: edge-run pull onnx-community/Qwen2.5-0.5B-Instruct"
                raise _not_found("there is no model on this machine", hint)
            return entries[0]
        wanted = {name, name.removesuffix(":latest")}  # the tag that Ollama's clients add to names without one
        found = [entry for entry in entries if entry.id in wanted] or [
            entry for entry in entries if wanted & {entry.source, *entry.aliases}
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise _not_found(f"{name!r} names {len(found)} models", f"write one of: {_listed(found)}")
        raise _not_found(f"there is no model {name!r:.200}", f"models are: {_listed(entries)}")

    def resolve(self, entry: ModelEntry) -> Path:
        """Return the path of a model's files, downloaded if necessary, and checked if they come from the hub.

        Raises:
            EdgeError: the model cannot be downloaded, or is damaged.
        """
        path = find_model(entry.source, self._kind)
        if (downloaded := read_downloaded(path)) is not None:
            downloaded.verify()
        return path

    def file_bytes(self, path: Path) -> int:
        """Bytes of the graphs and weights of a model at a path, which is about what loading it takes.

        Raises:
            BundleError: the path holds no model.
        """
        graph, first, _ = find_graph(path, None, self._kind)
        graphs = [each for each in (graph, first) if each is not None]
        files = graphs + [each.parent / name for each in graphs for name in external_files(each)]
        return sum(file.stat().st_size for file in dict.fromkeys(files) if file.is_file())


def capabilities_at(path: Path) -> Sequence[str]:
    """What the model at a path is for; nothing where its files do not say it, as those of unfinished downloads."""
    with suppress(EdgeError, OSError):
        return _read_capabilities(path)
    return ()


@cache
def _read_capabilities(path: Path) -> Sequence[str]:
    graph, _, folder = find_graph(path, None, DeviceKind.CPU)
    return capabilities(unchecked_bundle(graph, folder))


def capabilities(bundle: Bundle) -> list[str]:
    """What a model is for: `embedding` or `rerank` (encoders), or `completion`, with `tools` if it has a chat template,
    and `vision` if it has a vision tower.

    Raises:
        EdgeError: a file is damaged.
    """
    if (output := encoder_output(bundle)) is not None:
        return ["rerank" if output == SCORE else "embedding"]
    template = bundle.json_file("tokenizer_config.json").get("chat_template")
    chats = bundle.file("chat_template.jinja") is not None or bool(template)
    return ["completion", *["tools"] * chats, *["vision"] * (bundle.vision is not None)]


def _not_found(what: str, hint: str) -> RequestError:
    return RequestError(what, hint, code=ErrorCode.MODEL_NOT_FOUND, param="model")


def _listed(entries: Iterable[ModelEntry]) -> str:
    ids = [entry.id for entry in entries]
    more = f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
    return ", ".join(ids[:_MAX_NAMED]) + more


def _given_entry(name: str, kind: DeviceKind) -> ModelEntry:
    if not os.path.lexists(name) and (named := [entry for entry in _named_entries() if entry.id == name]):
        return named[0]
    if is_on_hub(name):
        repo = parse_hub_id(name).repo
        return ModelEntry(name, name, () if repo == name else (repo,), owner=repo.partition("/")[0])
    path = find_model(name, kind)
    graph, _, _ = find_graph(path, None, kind)
    folder, colon, variant = name.rpartition(":")
    is_variant = bool(colon) and not os.path.lexists(name)
    place = Path(folder).expanduser() if is_variant else path
    own = place.parent if place.is_file() and place.stem == "model" else place
    word = own.resolve().name if own.is_dir() else own.stem
    return ModelEntry(f"{word}:{variant}" if is_variant else word, name, (word,), int(graph.stat().st_mtime))


def _local_entries() -> tuple[ModelEntry, ...]:
    """The bundled model, exported ones, and the newest commit of every graph from the hub that is on this machine."""
    entries = _named_entries()
    for store in stores():
        with suppress(FileNotFoundError):  # removed meanwhile
            main = store.commit_of(None)
            found = [model for model in store.all_downloaded() if model.source.endswith(".onnx")]
            found.sort(key=lambda model, main=main: (model.commit == main, model.last_used))  # type: ignore[misc]
            # The last one of an id is at the commit that the main branch refers to, or else the last used one.
            newest = {model.id: model for model in found}
            for id_, model in sorted(newest.items()):
                aliases = tuple(name for name in (model.repo, f"{id_}@{model.commit}") if name != id_)
                created = int(model.folder.stat().st_mtime)
                entries.append(ModelEntry(id_, str(model.path), aliases, created, model.repo.partition("/")[0]))
    return tuple(entries)


def _named_entries() -> list[ModelEntry]:
    """The bundled model and exported ones."""
    entries = []
    for name, folder in named_models().items():
        with suppress(OSError):  # removed meanwhile
            entries.append(ModelEntry(name, str(folder), (folder.name,), int(folder.stat().st_mtime)))
    return entries
