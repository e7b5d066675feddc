"""Earlier conversations of a model, kept on disk: an append-only log of token sequences, and the index made from it.

The log is a header and records, each with its length and checksum; a process killed while it appends leaves a piece
at the end that nobody reads and the next one cuts off. What is older than the bound allows goes when the log is written
anew, whole, under another identity. A damaged log is set aside (one, the latest) and what can be read of it stays in
use. Everybody who touches the log holds a lock for that moment; who cannot get it does without. The index is a file
that never changes, is found by looking for it, and can be made again from the log.

The bound holds for all of it: a token takes four bytes in the log, eight in the index and four in a log set aside. (On
Windows, where a file in use cannot be removed, an old index may stay until its last reader ends.) Nothing here raises
for what it finds on disk, or fails to write: conversations are a help, never a need.
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ....models.atomic import write_atomically
from ....models.lock import locked
from .history_index import HEADER_BYTES, TOKEN_LIMIT, WORD, Covered, HistoryIndex, Tokens, encode

_HEADER: Final = struct.Struct("<8s16s")
"""Magic, and the log's identity: random bytes that change whenever it is written anew."""
_MAGIC: Final = b"edgehlg1"
_RECORD: Final = struct.Struct("<4sII")
"""Mark, number of tokens, and the CRC-32 of that number and the tokens; the tokens follow as little-endian uint32."""
_MARK: Final = b"\xed\x9e\x70\xff"  # as a number no token is as large
_LOG: Final = "log"
_SET_ASIDE: Final = "log.damaged"
_LOCK: Final = "lock"
_INDEX: Final = "index-"
_WAIT_S: Final = 0.25
_LEAST_BYTES: Final = 64 << 10


class _Log(NamedTuple):
    identity: bytes
    records: list[tuple[int, int]]
    """Where each record's tokens start, and how many bytes they are, oldest first."""
    end: int
    """Where the last record ends; what is beyond was never finished."""
    damaged: bool


class HistoryStore:
    """Finished token sequences of one model, in a folder of their own.

    Args:
        folder: of this model alone; made, private to the user, with the first sequence.
        max_bytes: the most that everything in the folder may take, at least 64 KiB.
        warn: told, in one line, what is wrong with the files; decoding goes on without them.

    Raises:
        ValueError: `max_bytes` is too small.
    """

    def __init__(self, folder: Path, max_bytes: int, warn: Callable[[str], None]) -> None:
        if max_bytes < _LEAST_BYTES:
            raise ValueError(f"a history of {max_bytes} bytes is too small; {_LEAST_BYTES} is the least")
        self._folder = folder
        self._log_bytes = (max_bytes - HEADER_BYTES - 2 * WORD) // 4
        self._warn = warn
        self.index: HistoryIndex | None = None
        """What is known of the sequences, which may lack the latest; None if nothing is."""
        self._open_index()

    def append(self, tokens: Sequence[int]) -> bool:
        """Keep a finished sequence; of a very long one, the end. Whether it could be kept.

        To keep a growing conversation, append what is new of it: a sequence need not start where a text starts.

        Raises:
            ValueError: a token is negative or 2**31 - 2 or more.
        """
        if not len(tokens):
            return True
        if min(tokens) < 0 or max(tokens) >= TOKEN_LIMIT:
            raise ValueError(f"tokens are from 0 to {TOKEN_LIMIT - 1}")
        most = (self._log_bytes // 2 - _RECORD.size) // WORD
        record = _record(np.asarray(tokens[-most:], "<u4").tobytes())
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self._folder / _LOCK, _WAIT_S):
                self._append(record)
        except OSError as error:
            self._warn(f"this conversation is not kept: {error}")
            return False
        return True

    def sequences(self) -> list[Tokens]:
        """What is kept, oldest first; nothing if the store is in use."""
        try:
            if not (self._folder / _LOG).exists():
                return []
            with locked(self._folder / _LOCK, _WAIT_S):
                return _sequences(*self._read())
        except OSError as error:
            self._warn(f"earlier conversations cannot be read: {error}")
            return []

    def is_indexed(self) -> bool:
        """Whether the index knows all sequences."""
        try:
            with (self._folder / _LOG).open("rb") as file:
                header = file.read(_HEADER.size)
                end = file.seek(0, os.SEEK_END)
        except OSError:
            return True
        if self.index is None:
            return False
        covered = self.index.covered
        return header == _MAGIC + covered.identity and end == covered.end

    def reindex(self) -> bool:
        """Make the index know all sequences: 0.5 s for a million tokens, for a quiet moment. Whether it does.

        Other threads run meanwhile, and go on with the old index until the new one is complete.
        """
        try:
            if not (self._folder / _LOG).exists():
                return True
            with locked(self._folder / _LOCK, _WAIT_S):
                data, log = self._read()
            encoded = encode(_sequences(data, log), Covered(log.identity, log.end))
            with locked(self._folder / _LOCK, _WAIT_S):
                if self._identity() != log.identity:
                    return False  # somebody wrote the log anew, and whoever needs its index makes that
                self._remove_indexes()
                path = self._folder / f"{_INDEX}{secrets.token_hex(8)}"
                write_atomically(path, encoded)
                self.index = HistoryIndex(path)
        except (OSError, ValueError) as error:
            self._warn(f"earlier conversations are not indexed: {error}")
            return False
        return True

    def clear(self) -> None:
        """Forget everything, on disk too.

        Raises:
            OSError: not everything could be removed, or the store is in use.
        """
        self.index = None
        if self._folder.exists():
            with locked(self._folder / _LOCK, _WAIT_S):
                for path in self._folder.iterdir():
                    if path.name != _LOCK:
                        path.unlink()

    def _open_index(self) -> None:
        for path in self._indexes():
            try:
                self.index = HistoryIndex(path)
            except FileNotFoundError:  # noqa: PERF203
                continue  # somebody else has just put a newer one in its place
            except (OSError, ValueError) as error:
                self._warn(f"the index of earlier conversations cannot be read: {path.name}: {error}")
            else:
                return

    def _indexes(self) -> list[Path]:
        return sorted(self._folder.glob(f"{_INDEX}*"))

    def _remove_indexes(self) -> None:
        """Remove the indexes, and what a killed process left of a file that it was writing."""
        for path in [*self._indexes(), *self._folder.glob(f".{_INDEX}*"), *self._folder.glob(f".{_LOG}*")]:
            try:
                path.unlink(missing_ok=True)
            except PermissionError:  # noqa: PERF203
                continue  # Windows: somebody has it open

    def _identity(self) -> bytes:
        with (self._folder / _LOG).open("rb") as file:
            return file.read(_HEADER.size)[len(_MAGIC) :]

    def _read(self) -> tuple[bytes, _Log]:
        """The log, made if need be, repaired and within the bound; the lock is held."""
        path = self._folder / _LOG
        data = path.read_bytes() if path.exists() else b""
        log = _parse(data)
        if log.damaged:
            self._warn(f"damaged, set aside and replaced by the {len(log.records)} sequences that can be read: {path}")
            if len(data) <= self._log_bytes:
                path.replace(path.with_name(_SET_ASIDE))
        if log.damaged or not data:
            data, log = self._rewrite(data, log.records)
        if len(data) > log.end:
            os.truncate(path, log.end)
        return self._shortened(data, log) if log.end > self._log_bytes else (data, log)

    def _append(self, record: bytes) -> None:
        data, log = self._read()
        if log.end + len(record) > self._log_bytes:
            self._shortened(data, log)
        with (self._folder / _LOG).open("ab") as file:
            file.write(record)

    def _shortened(self, data: bytes, log: _Log) -> tuple[bytes, _Log]:
        """Drop the oldest sequences: down to half, so that it is seldom done, and the longest new one finds room."""
        first, room = len(log.records), self._log_bytes // 2 - _HEADER.size
        while first and (room := room - _RECORD.size - log.records[first - 1][1]) >= 0:
            first -= 1
        return self._rewrite(data, log.records[first:])

    def _rewrite(self, data: bytes, records: Sequence[tuple[int, int]]) -> tuple[bytes, _Log]:
        """Replace the log by one with these records; its index goes, for the sake of the bound and of what it tells."""
        self._remove_indexes()
        new = _HEADER.pack(_MAGIC, secrets.token_bytes(16))
        new += b"".join(_record(data[start : start + size]) for start, size in records)
        write_atomically(self._folder / _LOG, new)
        return new, _parse(new)


def _sequences(data: bytes, log: _Log) -> list[Tokens]:
    return [np.frombuffer(data, "<u4", size // WORD, start) for start, size in log.records]


def _record(payload: bytes) -> bytes:
    count = len(payload) // WORD
    return _RECORD.pack(_MARK, count, zlib.crc32(payload, count)) + payload


def _parse(data: bytes) -> _Log:
    """What can be read of a log. What is damaged in the middle is skipped, what is missing at the end is no damage."""
    damaged = bool(data) and (len(data) < _HEADER.size or not data.startswith(_MAGIC))
    at = end = _HEADER.size
    records: list[tuple[int, int]] = []
    while (size := _valid(data, at)) is not None or (at := data.find(_MARK, at + 1)) >= 0:
        if size is None:
            continue
        damaged |= at != end
        records.append((at + _RECORD.size, size))
        at = end = at + _RECORD.size + size
    # What was never finished is short, and starts as a record does.
    damaged |= _length(data, end) is not None or not _MARK.startswith(data[end : end + len(_MARK)])
    return _Log(data[len(_MAGIC) : _HEADER.size], records, end, damaged)


def _length(data: bytes, at: int) -> int | None:
    """Bytes of the tokens of the record that starts at `at`; None if there is none, or not all of one."""
    if at + _RECORD.size > len(data):
        return None
    mark, count, _ = _RECORD.unpack_from(data, at)
    return count * WORD if mark == _MARK and at + _RECORD.size + count * WORD <= len(data) else None


def _valid(data: bytes, at: int) -> int | None:
    """The same, of a record whose checksum is right."""
    size = _length(data, at)
    if size is None:
        return None
    _, count, checksum = _RECORD.unpack_from(data, at)
    with memoryview(data)[at + _RECORD.size : at + _RECORD.size + size] as payload:
        return size if zlib.crc32(payload, count) == checksum else None
