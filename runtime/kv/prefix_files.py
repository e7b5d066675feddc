"""KV caches of chosen prefixes on disk: system messages, tools, long documents.

The slots of a token depend on the tokens before it only, so a later process takes them from a file instead of computing
them. A file is memory-mapped and copied once, into the arena that continues it, while its checksum is compared. Its
folder is named after everything that its slots depend on besides the tokens, so files that are stale or of another
model lie in other folders. Slots whose file cannot be read are computed.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import ContextError
from ...models.array_file import map_arrays
from ...models.atomic import remove_abandoned_files, write_atomically
from ...models.file_system import remove_oldest
from ...models.json_file import is_whole, parse_json_object
from ...models.user_folders import cache_folder
from ...models.user_text import format_bytes
from .arena import KVArena
from .buffers import NumpyBuffers, StackedBuffers
from .parked_cache import ParkedCache, codes_of

TokenIds: TypeAlias = npt.NDArray[np.int64]

MIN_SHARED: Final = 8
"""Number of shared tokens below which a sequence starts afresh: computing so few takes one pass in any case."""
DEFAULT_DISK_BYTES: Final = 4 << 30
"""Largest size of all files together: the caches of 170,000 tokens of a model of half a billion parameters."""
MIN_STORED: Final = 64
"""Number of tokens below which a prefix is not kept: computing so few takes one pass in any case."""
_FORMAT: Final = 2
_SUFFIX: Final = ".kv"
_LEAST_SHARE: Final = 8
"""A file is used only for at least one in so many of its tokens, because all of it is read to compare its checksum.
Reading a token's slots takes about a hundredth of the time of computing them."""
_ENOUGH: Final = 2
"""A prefix gets no file of its own if a file of at most so many times its tokens begins with it."""
_HEADERS: Final = 2
"""Number of arrays before the cache: the description and the token ids."""

_log: Final = logging.getLogger("edgerun")


def prefix_folder() -> Path:
    """The folder of all prefixes, which may not exist; it can be removed at any time."""
    return cache_folder() / "prefixes"


class StoredPrefix(NamedTuple):
    """A prefix on disk; only `PrefixFiles.restore` compares its checksum."""

    path: Path
    token_ids: TokenIds
    plain_length: int
    """Number of its slots that plain decoding would compute bit for bit."""


@dataclass(eq=False)
class PrefixFiles:
    """The prefixes of one model on disk, within a size for all models."""

    key: Callable[[], str]
    """Gives what the slots of a token depend on besides the tokens before it; called when it is needed first."""
    max_bytes: int = DEFAULT_DISK_BYTES
    """Largest size of the files of all models together; the least recently used are removed first."""
    plain_only: Callable[[], bool] = lambda: False
    """Says whether only slots that the model's own graph computed may be used now, because no other graph reads its
    prompts."""
    parks: bool = False
    """Whether slots are kept in 8 bits (`parked_cache.py`), of which none counts as plain decoding's."""

    def __post_init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int], StoredPrefix]] = {}
        """What was read of files, by name, with size and time of change."""
        self._refused: set[str] = set()
        """Names of damaged files, which Windows does not remove while something maps them."""
        self._writers: list[tuple[threading.Thread, KVArena]] = []
        self._noticed = False

    @cached_property
    def folder(self) -> Path:
        """The folder of this model's prefixes, which may not exist."""
        key = f"{_FORMAT}\0{self.key()}" + ("\0parked" if self.parks else "")
        return prefix_folder() / hashlib.sha256(key.encode()).hexdigest()[:32]

    def find(self, wanted: TokenIds) -> tuple[int, StoredPrefix | None]:
        """The file that shares the longest prefix with a sequence, and the number of shared tokens.

        Of equals it is the smallest file.
        """
        found = [(min(common_prefix(each.token_ids, wanted), self._usable(each)), each) for each in self._stored()]
        worth = [(shared, each) for shared, each in found if shared * _LEAST_SHARE >= each.token_ids.size]
        return max(worth, key=lambda pair: (pair[0], -pair[1].token_ids.size), default=(0, None))

    def restored(self, wanted: TokenIds, known: int, new_arena: Callable[[], KVArena]) -> KVArena | None:
        """A new arena with slots from a file that has more of them than the `known` in memory; None if none has."""
        while wanted.size - known >= MIN_SHARED:
            shared, stored = self.find(wanted)
            if stored is None or shared - known < MIN_SHARED:
                break
            arena = new_arena()
            arena.expect(wanted.size)
            if self.restore(stored, shared, arena):
                return arena
        return None

    def restore(self, stored: StoredPrefix, slots: int, arena: KVArena) -> bool:
        """Replace the slots of an arena by the first `slots` of a file; False if it is damaged, and now removed."""
        try:
            _copy_slots(stored, slots, arena, parked=self.parks)
        except (OSError, ValueError, IndexError, ContextError):
            arena.rewind_to(0)
            self._discard(stored.path)
            return False
        with suppress(OSError):
            os.utime(stored.path)
        return True

    def keep(self, arena: KVArena, token_ids: TokenIds) -> None:
        """Write the slots of `token_ids`, the first of an arena, to a file, in a thread of its own."""
        slots = token_ids.size
        plain_length = min(arena.plain_length, slots)
        if slots < MIN_STORED or self.max_bytes <= 0 or self._is_stored(token_ids, plain_length):
            return
        buffers = arena.buffers
        if not isinstance(buffers, NumpyBuffers):  # of a device, which other threads may not use
            host = StackedBuffers(arena.tensor_types, slots)
            host.write(buffers.read(slots), slots)
            buffers = host
        prefix = token_ids, buffers, plain_length
        writer = threading.Thread(target=self._write, args=prefix, name="edge-run prefixes", daemon=True)
        with suppress(RuntimeError):  # no thread can be started: it is written after another answer
            writer.start()
            self._writers = [(thread, each) for thread, each in self._writers if thread.is_alive()]
            self._writers.append((writer, arena))

    def reads(self, arena: KVArena) -> bool:
        """Whether an arena is being written to a file."""
        return any(each is arena and thread.is_alive() for thread, each in self._writers)

    def wait(self) -> None:
        """Wait until everything is written."""
        for thread, _ in self._writers:
            thread.join()
        self._writers.clear()

    def _stored(self) -> list[StoredPrefix]:
        """What lies in the folder; files that are not prefixes are removed."""
        if self.max_bytes <= 0 or not prefix_folder().is_dir():  # saves computing the key
            return []
        found: dict[str, tuple[tuple[int, int], StoredPrefix]] = {}
        entries: list[os.DirEntry[str]] = []
        with suppress(OSError):
            entries = [each for each in os.scandir(self.folder) if each.name.endswith(_SUFFIX)]
        for entry in entries:
            if entry.name.startswith(".") or entry.name in self._refused:
                continue
            with suppress(OSError):
                status = entry.stat()
                version = status.st_size, status.st_mtime_ns
                known = self._known.get(entry.name)
                if known is not None and known[0] == version:
                    found[entry.name] = known
                    continue
                try:
                    found[entry.name] = version, _read_header(Path(entry.path), self.folder.name)
                except ValueError:
                    self._discard(Path(entry.path))
        self._known = found
        return [stored for _, stored in found.values()]

    def _is_stored(self, token_ids: TokenIds, plain_length: int) -> bool:
        """Whether a file has as many slots of a prefix that may be used; if so, it counts as used."""
        wanted = plain_length if self.plain_only() and not self.parks else token_ids.size
        for stored in self._stored():
            whole = common_prefix(stored.token_ids, token_ids) == token_ids.size
            if whole and self._usable(stored) >= wanted and stored.token_ids.size <= _ENOUGH * token_ids.size:
                with suppress(OSError):
                    os.utime(stored.path)
                return True
        return False

    def _usable(self, stored: StoredPrefix) -> int:
        """Number of slots of a file that this model may use."""
        return stored.plain_length if self.plain_only() and not self.parks else stored.token_ids.size

    def _write(self, token_ids: TokenIds, buffers: NumpyBuffers, plain_length: int) -> None:
        slot_bytes = sum(each.slot_bytes for each in buffers.tensor_types)
        about = {"format": _FORMAT, "key": self.folder.name, "plain": plain_length}
        parks = self.parks
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.mkdir(exist_ok=True, mode=0o700)
            _make_room(self.folder.parent, token_ids.size * slot_bytes, self.max_bytes)
            name = f"{hashlib.sha256(token_ids.tobytes()).hexdigest()[:32]}{_SUFFIX}"
            write_atomically(
                self.folder / name, lambda file: _write_prefix(file, about, token_ids, buffers, parks), private=True
            )
            self._refused.discard(name)
        except OSError as error:
            if not self._noticed:
                self._noticed = True
                _log.warning("a prefix is not kept on disk: %s", error.strerror or error)

    def _discard(self, path: Path) -> None:
        self._refused.add(path.name)
        with suppress(OSError):
            path.unlink()


def _copy_slots(stored: StoredPrefix, slots: int, arena: KVArena, *, parked: bool) -> None:
    """Copy the first slots of a file to an arena while another thread computes the file's checksum.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or of another cache.
        IndexError: its arrays have too few dimensions.
        ContextError: the slots do not fit the arena.
    """
    *arrays, digest = map_arrays(stored.path)
    content = np.memmap(stored.path, np.uint8, "r")[: -digest.size]
    found: list[bytes] = []
    hashing = threading.Thread(target=lambda: found.append(hashlib.sha256(content.data).digest()))
    hashing.start()
    try:
        count = len(arena.groups)
        pairs = list(zip(arrays[_HEADERS:][:count], arena.groups, strict=True))
        if any(array.dtype != (np.int8 if parked else tensor_type.dtype) for array, tensor_type in pairs):
            raise ValueError("the cache has another type")
        parts = tuple(array[tensor_type.stacked_index(slice(slots))] for array, tensor_type in pairs)
        if parked:
            parts = ParkedCache(parts, tuple(arrays[_HEADERS + count :])).values
        arena.restore(parts)
    finally:
        hashing.join()
    if found != [digest.tobytes()] or arena.length != slots:
        raise ValueError("its checksum is not the one recorded")
    arena.plain_length = 0 if parked else min(stored.plain_length, slots)


def _write_prefix(
    file: BinaryIO, about: dict[str, Any], token_ids: TokenIds, buffers: NumpyBuffers, parks: bool
) -> None:
    """Write a description, the token ids, their slots, scales of these if they are parked, and a checksum of all."""
    sha = hashlib.sha256()

    def write(data: Any) -> None:
        sha.update(data)
        file.write(data)

    def begin(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Write what an .npy file has before the elements."""
        header = io.BytesIO()
        description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, description)
        write(header.getvalue())

    def write_array(array: npt.NDArray[Any]) -> None:
        begin(array.shape, array.dtype)
        write(array.data)

    write_array(np.frombuffer(json.dumps(about).encode(), np.uint8))
    write_array(token_ids)
    all_scales = []
    for tensor_type, members in buffers.groups.items():
        dtype, scales = np.dtype(np.int8) if parks else tensor_type.dtype, []
        begin((len(members), *tensor_type.shape_of(token_ids.size)), dtype)
        for member in members:
            slots = buffers.arrays[member][tensor_type.index(slice(token_ids.size))]
            if parks:
                slots, scale = codes_of(slots, tensor_type.axis)
                scales.append(scale)
            write(np.ascontiguousarray(slots).data)
        all_scales.append(np.array(scales, np.float32))
    for each in all_scales if parks else ():
        write_array(each)
    begin((sha.digest_size,), np.dtype(np.uint8))
    file.write(sha.digest())


def _read_header(path: Path, key: str) -> StoredPrefix:
    """Read the description and the token ids of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a prefix, or of another model.
    """
    about_bytes, mapped = map_arrays(path, _HEADERS)
    about = parse_json_object(about_bytes.tobytes())
    plain: Any = about.get("plain")
    is_own = about.get("format") == _FORMAT and about.get("key") == key
    if not is_own or not is_whole(plain, 0) or mapped.dtype != np.int64 or mapped.ndim != 1:
        raise ValueError("it is not a prefix of this model")
    return StoredPrefix(path, np.array(mapped), plain)


def _make_room(root: Path, needed: int, most: int) -> None:
    """Remove the least recently used files of all models until `needed` bytes fit, and what killed processes left.

    Raises:
        OSError: a file cannot be read, or so many bytes never fit.
    """
    if needed > most:
        raise OSError(f"it takes {format_bytes(needed)}, and the limit is {format_bytes(most)}")
    sizes: dict[Path, int] = {}
    for folder in [entry for entry in root.iterdir() if entry.is_dir()]:
        remove_abandoned_files(folder)
        for path in folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                sizes[path] = path.stat().st_size
    remove_oldest(sizes, most - needed, Path.unlink)
    if shutil.disk_usage(root).free < 2 * needed:
        raise OSError("too little free space on the disk")


def common_prefix(first: TokenIds, second: TokenIds) -> int:
    """Number of equal tokens at the beginning of both arrays."""
    size = min(first.size, second.size)
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if different.size else size
