"""A model folder: which files it has, and whether they are the ones that were written.

A bundle is a plain folder with `model.onnx`, its weights in `model.onnx.data`, the tokenizer and configuration files as
Hugging Face names them, and `edge.json` (see `manifest`). Only the .onnx file and a tokenizer are required; the rest is
introspected or has a default.
"""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ..edge.errors import BundleError
from .atomic import write_atomically
from .cache import cache_folder
from .external_data import check_external_data
from .json_file import is_whole, read_json_object
from .manifest import MANIFEST_NAME, SHORTEST_CONTEXT, FileDigest, Manifest

GRAPH_NAME: Final = "model.onnx"
WEIGHTS_NAME: Final = "model.onnx.data"
COMPANIONS: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)
"""Files that are carried from a checkpoint to its bundle as they are."""

_HINT: Final = "give an .onnx file or a model folder"
_HASH_ALWAYS_BELOW: Final = 8 << 20


@dataclass(frozen=True)
class Bundle:
    """A model on disk: its folder, its graph file and, where there is one, its manifest."""

    folder: Path
    graph: Path
    manifest: Manifest | None

    def file(self, name: str) -> Path | None:
        """The bundle's file of that name, or None."""
        path = self.folder / name
        return path if path.is_file() else None

    def json_file(self, name: str) -> dict[str, Any]:
        """The object in one of the bundle's JSON files; an absent file reads as an empty object.

        Raises:
            BundleError: the file cannot be read or is not a JSON object.
        """
        path = self.file(name)
        return {} if path is None else read_json_object(path, BundleError, "restore it or export the model again")

    @cached_property
    def context(self) -> int | None:
        """Most positions the model allows; None if nothing says so."""
        if self.manifest is not None:
            return self.manifest.architecture.context
        value = self.json_file("config.json").get("max_position_embeddings")
        return value if is_whole(value, SHORTEST_CONTEXT) else None

    @cached_property
    def input_vocab(self) -> int | None:
        """Tokens the model's embedding has; None if nothing says so."""
        if self.manifest is not None:
            return self.manifest.architecture.vocab_size
        value = self.json_file("config.json").get("vocab_size")
        return value if is_whole(value, 1) else None

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the graph and the weights beside it."""
        data = self.folder / WEIGHTS_NAME
        return self.graph.stat().st_size + (data.stat().st_size if data.is_file() else 0)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) that stands for the graph and its weights."""
        if self.manifest is None:
            return digest_file(self.graph).sha256
        files = self.manifest.files
        parts = "".join(files[name].sha256 for name in (GRAPH_NAME, WEIGHTS_NAME) if name in files)
        return hashlib.sha256(parts.encode()).hexdigest()

    def verify(self) -> None:
        """Compare every file with the manifest's digests; a large file is hashed once per (size, modification time).

        Raises:
            BundleError: a file is missing or differs.
        """
        if self.manifest is None:
            return
        if GRAPH_NAME not in self.manifest.files:  # the fingerprint stands on its digest
            raise BundleError(f"{self.folder / MANIFEST_NAME} lacks files.{GRAPH_NAME}", "export the model again")
        for name, digest in self.manifest.files.items():
            if Path(name).name != name:
                raise BundleError(
                    f"{self.folder / MANIFEST_NAME} names {name!r}, which lies outside the bundle",
                    "do not use this bundle: it was tampered with",
                )
            verify_file(self.folder / name, digest)


def open_bundle(path: Path) -> Bundle:
    """Open a model folder, or the folder around an .onnx file, and check it against its manifest.

    Raises:
        BundleError: there is no such file, no graph in the folder, or the files are not those that were exported.
    """
    try:
        graph = _find_graph(path)
        manifest_path = graph.parent / MANIFEST_NAME
        manifest = None
        if manifest_path.is_file() and graph.name == GRAPH_NAME:
            manifest = Manifest.from_json(manifest_path.read_bytes(), str(manifest_path))
        bundle = Bundle(graph.parent, graph, manifest)
        bundle.verify()
        check_external_data(graph)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BundleError(f"{error.filename or path} cannot be read: {reason}", "check its permissions") from error
    return bundle


def holds_only_bundle_files(folder: Path) -> bool:
    """Whether everything in `folder` is a file that an export writes, `edge.json` among them."""
    names = {GRAPH_NAME, WEIGHTS_NAME, MANIFEST_NAME, *COMPANIONS}
    entries = list(folder.iterdir())
    return all(entry.name in names and entry.is_file() for entry in entries) and folder / MANIFEST_NAME in entries


def digest_file(path: Path) -> FileDigest:
    """Size and SHA-256 of a file, read in pieces of 1 MiB."""
    sha = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            sha.update(piece)
            size += len(piece)
    return FileDigest(size, sha.hexdigest())


def _find_graph(path: Path) -> Path:
    try:
        mode = path.stat().st_mode
    except PermissionError:
        raise
    except (OSError, ValueError) as error:  # such as a name that is too long, or holds a zero byte
        raise BundleError(f"{path} does not exist", _HINT) from error
    if stat.S_ISDIR(mode):
        if not (path / GRAPH_NAME).is_file():
            raise BundleError(f"{path} holds no {GRAPH_NAME}", _hint_for_folder(path))
        return path / GRAPH_NAME
    if not stat.S_ISREG(mode) or path.suffix != ".onnx":
        raise BundleError(f"{path} is not an .onnx file", _HINT)
    return path


def _hint_for_folder(path: Path) -> str:
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return f"it looks like a checkpoint: run edge-run export {path} OUT first"
    return "give a folder made by edge-run export, or an .onnx file"


def verify_file(path: Path, expected: FileDigest) -> None:
    """Compare a file with its digest; a large one is hashed once per (size, modification time).

    Raises:
        BundleError: it is missing or differs.
    """
    hint = "copy the bundle again or export the model again"
    if not path.is_file():
        raise BundleError(f"{path} is missing", hint)
    status = path.stat()
    if status.st_size != expected.bytes:
        raise BundleError(f"{path} is damaged: {status.st_size} bytes, {expected.bytes} expected", hint)
    stamp = None
    if status.st_size >= _HASH_ALWAYS_BELOW:
        key = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{expected.sha256}"
        stamp = cache_folder() / "verified" / hashlib.sha256(key.encode()).hexdigest()
        if stamp.is_file():
            return
    if digest_file(path).sha256 != expected.sha256:
        raise BundleError(f"{path} is damaged: its checksum is not the one recorded", hint)
    if stamp is not None:
        # A read-only cache only means hashing again next time.
        try:
            write_atomically(stamp, b"")
        except OSError:
            return
