"""Model folders: their files, and checking them against the manifest.

A bundle is a plain folder with `model.onnx`, its weights in `model.onnx.data`, the tokenizer and configuration files as
Hugging Face names them, and `edge.json` (see `manifest`). Folders of other tools have other names (see `variants`).
Only the .onnx file and a tokenizer are required; the rest is introspected or has a default.
"""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ..errors import BundleError
from .atomic import write_atomically
from .graph_files import find_graph
from .json_file import is_whole, read_json_object
from .manifest import MANIFEST_NAME, MIN_CONTEXT, DeviceKind, FileDigest, Manifest, is_variant_file
from .onnx_file.wire import check_external_data, external_files
from .regular_file import MAX_JSON_BYTES, open_regular, read_regular
from .user_folders import cache_folder
from .variants import GENAI_CONFIG, part_beside

GRAPH_NAME: Final = "model.onnx"
WEIGHTS_NAME: Final = "model.onnx.data"
REPORT_DATA_NAME: Final = "report.json"
"""The report of an export, for programs; the runtime does not read it."""
REPORT_PAGE_NAME: Final = "report.html"
"""The same report for people."""
PLAN_NAME: Final = "plan.toml"
"""The quantization plan of an export, which can be edited and used again."""
CACHE_SCALES_NAME: Final = "kv_scales.json"
"""Scales of a quantized KV cache (`--kv`), where the export measured them."""
TARGET_IDS_NAME: Final = "d2t.npy"
"""The target's token ids of a draft's logits, unless a manifest names another file."""
DRAFT_GRAPH_NAME: Final = "draft.onnx"
"""The graph of a draft head, which uses the model's weights."""
DRAFT_WEIGHTS_NAME: Final = "draft.onnx.data"
"""The own weights of a draft head."""
VISION_GRAPH_NAME: Final = "vision.onnx"
"""The graph that turns images into features, of a model that sees."""
VISION_WEIGHTS_NAME: Final = "vision.onnx.data"
DRAFT_FOLDER: Final = "draft"
"""Folder below the model's in which an export puts the draft, a bundle too."""
SENTENCE_POOLING: Final = "1_Pooling/config.json"
"""How sentence-transformers makes one vector of the hidden states of a text, where a checkpoint says so."""
SENTENCE_PROMPTS: Final = "config_sentence_transformers.json"
"""What sentence-transformers writes before texts, where a checkpoint says so."""
POOLING_NAME: Final = "pooling.json"
"""The same file in a bundle."""
TOKENIZER_AND_CONFIG_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files that an export copies from a checkpoint to its bundle unchanged."""

SEEING_FAMILIES: Final = ("gemma3", "idefics3", "lfm2_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm")
"""Families whose image processors edge-run has, by the `model_type` of config.json."""
_VISION_FILES: Final = (VISION_GRAPH_NAME, VISION_WEIGHTS_NAME)
_HASH_ALWAYS_BELOW: Final = 8 << 20
_SAMPLE: Final = 1 << 20
"""Bytes from either end of a file that identify it if no digest was recorded."""
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_CONTEXT_NAMES: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")


@dataclass(frozen=True)
class Bundle:
    """A model on disk."""

    folder: Path
    """Folder of the configuration files."""
    graph: Path
    """The .onnx file."""
    manifest: Manifest | None
    """Contents of `edge.json`, if there is one."""
    first: Path | None = None
    """The graph for passes without a cache, if that is another one (old exports of Optimum)."""
    tokenizer: Path | None = None
    """A tokenizer.json, or a folder with one, that replaces the tokenizer beside the graph."""

    def file(self, name: str) -> Path | None:
        """Return the path of the bundle's file of that name, or None."""
        folders = [self.graph.parent, self.folder]
        if self.tokenizer is not None and name in _TOKENIZER_FILES:
            if name == _TOKENIZER_FILES[0] and self.tokenizer.is_file():
                return self.tokenizer
            folders.insert(0, self.tokenizer if self.tokenizer.is_dir() else self.tokenizer.parent)
        return next((folder / name for folder in folders if (folder / name).is_file()), None)

    def copy_config_files(self, folder: Path) -> None:
        """Copy the model's tokenizer and configuration into a folder."""
        for name in TOKENIZER_AND_CONFIG_FILES:
            if (path := self.file(name)) is not None:
                shutil.copyfile(path, folder / name)

    def json_file(self, name: str) -> dict[str, Any]:
        """Read one of the bundle's JSON files; a missing file reads as an empty object.

        Raises:
            BundleError: the file cannot be read or is not a JSON object.
        """
        path = self.file(name)
        return {} if path is None else read_json_object(path, BundleError, "restore it or export the model again")

    @cached_property
    def embedding(self) -> Path | None:
        """The graph that turns token ids into the embeddings that `graph` takes, if that is another one."""
        return None if self.manifest is not None else self._part("embedding")

    @cached_property
    def vision(self) -> Path | None:
        """The graph that turns images into features: of a bundle, or, of a family that sees, beside another tool's."""
        if self.manifest is not None:
            return self.file(VISION_GRAPH_NAME)
        return self._part("vision") if self.embedding is not None and self.family in SEEING_FAMILIES else None

    def _part(self, part: str) -> Path | None:
        names = [path.name for path in self.graph.parent.glob("*.onnx")]
        is_genai = self.graph.with_name(GENAI_CONFIG).is_file()
        name = part_beside(self.graph.name, part, names, is_genai=is_genai)
        return None if name is None else self.graph.with_name(name)

    @cached_property
    def _graphs_and_weights(self) -> list[Path]:
        return [file for graph in (self.graph, self.embedding) if graph is not None for file in _with_weights(graph)]

    @cached_property
    def context(self) -> int | None:
        """Largest context of the model; None if no file says so."""
        if self.manifest is not None:
            return self.manifest.architecture.context
        values = [*(self.config.get(name) for name in _CONTEXT_NAMES), self.genai.get("context_length")]
        return next((value for value in values if is_whole(value, MIN_CONTEXT)), None)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Contents of config.json; of a multimodal model, with its `text_config` merged in."""
        config = self.json_file("config.json")
        text = config.get("text_config")
        return {**config, **text} if isinstance(text, dict) else config

    @cached_property
    def genai(self) -> dict[str, Any]:
        """The `model` section of genai_config.json; empty without one."""
        model = self.json_file(GENAI_CONFIG).get("model")
        return model if isinstance(model, dict) else {}

    @property
    def family(self) -> Any:
        """The family that the model's files name, of a multimodal model the one of the whole; None if they do not."""
        return self.json_file("config.json").get("model_type", self.genai.get("type"))

    @property
    def hidden_size(self) -> int:
        """Channels of an embedding; 0 if no file says so."""
        if self.manifest is not None:
            return self.manifest.architecture.hidden_size
        decoder = self.genai.get("decoder")
        value = self.config.get("hidden_size", decoder.get("hidden_size") if isinstance(decoder, dict) else None)
        return value if isinstance(value, int) else 0

    @cached_property
    def input_vocab(self) -> int | None:
        """Number of tokens of the model's embedding; None if no file says so."""
        if self.manifest is not None:
            return self.manifest.architecture.vocab_size
        value = self.config.get("vocab_size", self.genai.get("vocab_size"))
        return value if is_whole(value, 1) else None

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the graph and its external weights."""
        return sum(path.stat().st_size for path in self._graphs_and_weights)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) of the digests of graph and weights; without a manifest, of samples of these files."""
        if self.manifest is None:
            towers = [] if self.vision is None else _with_weights(self.vision)
            parts = b"".join(map(_sample_digest, [*self._graphs_and_weights, *towers]))
        else:
            files, names = self.manifest.files, (GRAPH_NAME, WEIGHTS_NAME, *_VISION_FILES)
            parts = "".join(files[name].sha256 for name in names if name in files).encode()
        return hashlib.sha256(parts).hexdigest()

    def verify(self) -> None:
        """Compare every file with the manifest's digests; a large file is hashed once per (size, modification time).

        Raises:
            BundleError: a file is missing or differs.
        """
        if self.manifest is None:
            return
        if GRAPH_NAME not in self.manifest.files:  # the fingerprint needs its digest
            raise BundleError(f"{self.folder / MANIFEST_NAME} lacks files.{GRAPH_NAME}", "export the model again")
        for name, digest in self.manifest.files.items():
            if Path(name).name != name:
                raise BundleError(
                    f"{self.folder / MANIFEST_NAME} names {name!r}, which lies outside the bundle",
                    "do not use this bundle: it was tampered with",
                )
            verify_file(self.folder / name, digest)


def open_bundle(path: Path, *, kind: DeviceKind = DeviceKind.CPU, tokenizer: Path | None = None) -> Bundle:
    """Open a model folder, or the folder around an .onnx file, and check it against its manifest.

    Args:
        path: path of the folder or the file.
        kind: kind of device that decides between several graphs in the folder.
        tokenizer: a tokenizer.json, or a folder with one; None for the one beside the graph.

    Raises:
        BundleError: the file does not exist, the folder holds no graph, or a file differs from the manifest.
    """
    try:
        graph, first, folder = find_graph(path, None, kind)
        require_text_path(graph)
        name = _TOKENIZER_FILES[0]
        if tokenizer is not None and not (tokenizer.is_file() or (tokenizer / name).is_file()):
            found = "is not a regular file" if tokenizer.exists() else "does not exist"
            found = f"holds no {name}" if tokenizer.is_dir() else found
            raise BundleError(f"{tokenizer} {found}", f"give a {name}, or a folder with one")
        manifest_path = graph.parent / MANIFEST_NAME
        manifest = None
        if manifest_path.is_file() and graph.name == GRAPH_NAME:
            manifest = Manifest.from_json(read_regular(manifest_path, MAX_JSON_BYTES), str(manifest_path))
        bundle = Bundle(folder, graph, manifest, first, tokenizer)
        bundle.verify()
        for each in (graph, first, bundle.embedding, bundle.vision):
            if each is not None:
                check_external_data(each)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BundleError(f"{error.filename or path} cannot be read: {reason}", "check its permissions") from error
    return bundle


def unchecked_bundle(graph: Path, folder: Path) -> Bundle:
    """The model with a graph, whose other files are not compared with its manifest.

    Raises:
        EdgeError: the manifest is damaged.
        OSError: it cannot be read.
    """
    manifest_path = graph.parent / MANIFEST_NAME
    manifest = Manifest.from_json(read_regular(manifest_path, MAX_JSON_BYTES)) if manifest_path.is_file() else None
    return Bundle(folder, graph, manifest)


def _with_weights(graph: Path) -> list[Path]:
    """A graph's file, and those with its weights."""
    return [graph, *(graph.parent / name for name in external_files(graph))]


def require_text_path(path: Path) -> None:
    """Check that a path is UTF-8 text, which paths on Linux need not be; ONNX Runtime takes paths as text.

    Raises:
        BundleError: the path has other bytes.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise BundleError(f"the path {path} is not UTF-8, which ONNX Runtime cannot open", "rename it") from error


def holds_only_bundle_files(folder: Path) -> bool:
    """Return whether `folder` is a bundle with nothing but files that an export writes, in its draft's folder too."""
    names = {GRAPH_NAME, WEIGHTS_NAME, DRAFT_GRAPH_NAME, DRAFT_WEIGHTS_NAME, TARGET_IDS_NAME, CACHE_SCALES_NAME}
    names |= {MANIFEST_NAME, REPORT_DATA_NAME, REPORT_PAGE_NAME, PLAN_NAME, GENAI_CONFIG, POOLING_NAME}
    names |= {*_VISION_FILES}
    names |= {*TOKENIZER_AND_CONFIG_FILES}
    entries = list(folder.iterdir())
    return folder / MANIFEST_NAME in entries and all(
        holds_only_bundle_files(entry)
        if entry.name == DRAFT_FOLDER and entry.is_dir()
        # A folder with the name of such a file belongs to somebody else.
        else (entry.name in names or is_variant_file(entry.name)) and entry.is_file()
        for entry in entries
    )


def digest_file(path: Path) -> FileDigest:
    """Compute size and SHA-256 of a file, reading it piece by piece."""
    with open_regular(path) as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), sha)


def _sample_digest(path: Path) -> bytes:
    """Hash the name, size, beginning and end of a file."""
    size = path.stat().st_size
    with open_regular(path) as file:
        beginning = file.read(_SAMPLE)
        file.seek(max(size - _SAMPLE, 0))
        return hashlib.sha256(f"{path.name}\0{size}\0".encode() + beginning + file.read(_SAMPLE)).digest()


def verify_file(path: Path, expected: FileDigest) -> None:
    """Compare a file with its digest; a large one is hashed once per (size, modification time).

    Raises:
        BundleError: the file is missing or differs.
    """
    hint = "copy the bundle again or export the model again"
    if not path.is_file():
        raise BundleError(f"{path} is missing", hint)
    size = path.stat().st_size
    if size != expected.bytes:
        raise BundleError(f"{path} is damaged: {size} bytes, {expected.bytes} expected", hint)
    if (stamp := _stamp(path, expected)) is not None and stamp.is_file():
        return
    if digest_file(path).sha256 != expected.sha256:
        raise BundleError(f"{path} is damaged: its checksum is not the one recorded", hint)
    mark_verified(path, expected)


def mark_verified(path: Path, digest: FileDigest) -> None:
    """Record that a file has this digest, so that `verify_file` does not hash it again while it is unchanged."""
    if (stamp := _stamp(path, digest)) is not None:
        # With a read-only cache the file is hashed again next time.
        with suppress(OSError):
            write_atomically(stamp, b"")


def _stamp(path: Path, digest: FileDigest) -> Path | None:
    """Return the marker file that exists if `path` was verified in its present state; None for small files."""
    status = path.stat()
    if status.st_size < _HASH_ALWAYS_BELOW:
        return None
    key = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{digest.sha256}"
    return cache_folder() / "verified" / hashlib.sha256(key.encode()).hexdigest()
