"""Earlier conversations of a model on disk: an SQLite database of token sequences, and the index made from it.

Every operation holds a lock file and opens the database for itself; if the lock is taken, the operation is skipped. A
damaged database is set aside (the latest one), and the sequences that can be read stay in use. When the size limit is
reached, the oldest sequences are deleted. The index is a separate file that never changes, is found by its name, and
can be made again from the database (docs/decisions/0027-history-store.md).

The size limit covers everything: a token takes four bytes in the database, eight in the index and four in a database
that was set aside. (On Windows, where a file in use cannot be removed, an old index may stay until its last reader
ends.) Problems with the files are reported as warnings and never raised: decoding works without earlier conversations.
"""

from __future__ import annotations

import secrets
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from ....models.atomic import write_atomically
from ....models.lock import locked
from .history_index import HEADER_BYTES, TOKEN_LIMIT, WORD, Covered, HistoryIndex, Tokens, encode

_DATABASE: Final = "history.db"
_SET_ASIDE: Final = "history.db.damaged"
_LOCK: Final = "lock"
_INDEX: Final = "index-"
_WAIT_S: Final = 0.25
_MIN_BYTES: Final = 64 << 10
_PAGE_BYTES: Final = 1024
"""Size of a database page; the smallest databases have a few pages."""
_SCHEMA: Final = f"""
PRAGMA page_size = {_PAGE_BYTES};
PRAGMA auto_vacuum = FULL;
CREATE TABLE sequences (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE store (identity BLOB NOT NULL);
"""
"""Tokens are little-endian uint32. The identity changes whenever sequences are deleted, so that an index of them is
recognized as outdated."""


class _DamagedError(sqlite3.DatabaseError):
    """The database or a sequence in it is damaged."""


_DATABASE_ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
"""Errors of `sqlite3`, which cannot decode its own message if that cites damaged text."""
_ENVIRONMENT_ERRORS: Final = (
    "database is locked",
    "database or disk is full",
    "disk I/O error",
    "unable to open database file",
)
"""Errors that are due to the disk or to permissions, not to the contents of the database."""


class HistoryStore:
    """Finished token sequences of one model, in a folder of their own.

    Args:
        folder: folder for this model alone; created with the first sequence, private to the user.
        max_bytes: maximum size of all files in the folder, at least 64 KiB.
        warn: called with a message of one line when something is wrong with the files.

    Raises:
        ValueError: `max_bytes` is too small.
    """

    def __init__(self, folder: Path, max_bytes: int, warn: Callable[[str], None]) -> None:
        if max_bytes < _MIN_BYTES:
            raise ValueError(f"a history of {max_bytes} bytes is too small; the minimum is {_MIN_BYTES}")
        self._folder = folder
        self._path = folder / _DATABASE
        self._max_pages = (max_bytes - HEADER_BYTES - 2 * WORD) // 4 // _PAGE_BYTES
        self._warn = warn
        self.index: HistoryIndex | None = None
        """Index of the sequences, which may lack the latest; None if there is none."""
        self._open_index()

    def append(self, token_ids: Sequence[int]) -> bool:
        """Store a finished sequence, or the end of a very long one; returns whether it was stored.

        To store a growing conversation, append its new tokens: a sequence need not start where a conversation starts.

        Raises:
            ValueError: a token is negative or 2**31 - 2 or more.
        """
        if not len(token_ids):
            return True
        if min(token_ids) < 0 or max(token_ids) >= TOKEN_LIMIT:
            raise ValueError(f"token ids must be 0 to {TOKEN_LIMIT - 1}")
        max_tokens = self._max_pages // 2 * (_PAGE_BYTES - 64) // WORD
        tokens = np.asarray(token_ids[-max_tokens:], "<u4").tobytes()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._append(tokens, check=False)
            except _DATABASE_ERRORS:
                self._append(tokens, check=True)
        except (OSError, *_DATABASE_ERRORS) as error:
            self._warn(f"this conversation is not stored: {error}")
            return False
        return True

    def sequences(self) -> list[Tokens]:
        """The stored sequences, oldest first; empty if the store is in use."""
        try:
            return self._read()[0] if self._path.exists() else []
        except (OSError, *_DATABASE_ERRORS) as error:
            self._warn(f"earlier conversations cannot be read: {error}")
            return []

    def is_indexed(self) -> bool:
        """Whether the index has all sequences."""
        try:
            if not self._path.exists():
                return True
            with self._database() as database:
                return self.index is not None and self.index.covered == _covered(database)
        except (OSError, *_DATABASE_ERRORS):
            return True

    def reindex(self) -> bool:
        """Index all sequences, 0.5 s for a million tokens; returns whether the index has them all.

        Other threads run meanwhile and use the old index until the new one is complete.
        """
        try:
            if not self._path.exists():
                return True
            sequences, covered = self._read()
            encoded = encode(sequences, covered)
            with self._database() as database:
                if _covered(database).identity != covered.identity:
                    return False  # another process deleted sequences and indexes the others
                self._remove_indexes()
                path = self._folder / f"{_INDEX}{secrets.token_hex(8)}"
                write_atomically(path, encoded)
                self.index = HistoryIndex(path)
        except (OSError, ValueError, *_DATABASE_ERRORS) as error:
            self._warn(f"earlier conversations are not indexed: {error}")
            return False
        return True

    def _append(self, tokens: bytes, *, check: bool) -> None:
        with self._database(check=check) as database:
            _insert(database, tokens)
            if _pages(database) > self._max_pages:
                database.rollback()
                self._delete_oldest(database)
                _insert(database, tokens)

    def _read(self) -> tuple[list[Tokens], Covered]:
        with self._database(check=True) as database:
            rows = database.execute("SELECT tokens FROM sequences ORDER BY id").fetchall()
            return [np.frombuffer(tokens, "<u4") for (tokens,) in rows], _covered(database)

    @contextmanager
    def _database(self, *, check: bool = False) -> Iterator[sqlite3.Connection]:
        """Lock and open the database, created, repaired and shortened if necessary; commit at the end of the block."""
        with locked(self._folder / _LOCK, _WAIT_S):
            try:
                database = self._open(check=check)
            except _DamagedError as damage:
                database = self._replace(damage)
            with closing(database):
                if _pages(database) > self._max_pages:
                    self._delete_oldest(database)
                yield database
                database.commit()

    def _open(self, *, check: bool) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=_WAIT_S)
        try:
            database.text_factory = bytes  # damaged text is not decoded
            # Without waiting for the disk: a killed process damages nothing, and a power failure may cost the history.
            database.execute("PRAGMA synchronous = OFF")
            if not _pages(database):
                database.executescript(_SCHEMA)
                database.execute("INSERT INTO store VALUES (?)", (secrets.token_bytes(16),))
                database.commit()
            if check:
                _check(database)
            _covered(database)
        except _DATABASE_ERRORS as error:
            database.close()
            if str(error) in _ENVIRONMENT_ERRORS or isinstance(error, _DamagedError):
                raise
            raise _DamagedError(str(error)) from error
        return database

    def _replace(self, damage: _DamagedError) -> sqlite3.Connection:
        """Set the database aside and make a new one of the sequences that can be read."""
        sequences = _readable(self._path)
        self._remove_indexes()
        if self._path.stat().st_size <= self._max_pages * _PAGE_BYTES:
            self._path.replace(self._folder / _SET_ASIDE)
        self._folder.joinpath(f"{_DATABASE}-journal").unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        self._warn(f"{self._path} is damaged ({damage}); {len(sequences)} conversations could be read and stay in use")
        database = self._open(check=False)
        for tokens in sequences:
            _insert(database, tokens)
        database.commit()
        return database

    def _delete_oldest(self, database: sqlite3.Connection) -> None:
        """Delete the oldest sequences until half of the pages are free, so that deletions are rare.

        The index goes too, because of the size limit and because it contains the deleted sequences.
        """
        self._remove_indexes()
        while _pages(database) > self._max_pages // 2:
            (count,) = database.execute("SELECT count(*) FROM sequences").fetchone()
            oldest = "SELECT id FROM sequences ORDER BY id LIMIT ?"
            if not database.execute(f"DELETE FROM sequences WHERE id IN ({oldest})", (count // 8 + 1,)).rowcount:  # noqa: S608  a constant
                break
        database.execute("UPDATE store SET identity = ?", (secrets.token_bytes(16),))
        database.commit()

    def _open_index(self) -> None:
        for path in self._indexes():
            try:
                self.index = HistoryIndex(path)
            except FileNotFoundError:  # noqa: PERF203
                continue  # another process has just replaced it by a newer one
            except (OSError, ValueError) as error:
                self._warn(f"the index of earlier conversations cannot be read: {path.name}: {error}")
            else:
                return

    def _indexes(self) -> list[Path]:
        return sorted(self._folder.glob(f"{_INDEX}*"))

    def _remove_indexes(self) -> None:
        """Remove the indexes and the unfinished index files of killed processes."""
        for path in [*self._indexes(), *self._folder.glob(f".{_INDEX}*")]:
            try:
                path.unlink(missing_ok=True)
            except PermissionError:  # noqa: PERF203
                continue  # Windows: another process has it open


def _insert(database: sqlite3.Connection, tokens: bytes) -> None:
    database.execute("INSERT INTO sequences (tokens, crc) VALUES (?, ?)", (tokens, zlib.crc32(tokens)))


def _pages(database: sqlite3.Connection) -> int:
    """Number of pages in use, those of the current transaction included."""
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    (free,) = database.execute("PRAGMA freelist_count").fetchone()
    return int(pages) - int(free)


def _covered(database: sqlite3.Connection) -> Covered:
    """Identity of the database and id of its last sequence: what an index made now covers."""
    row = database.execute("SELECT identity, (SELECT max(id) FROM sequences) FROM store").fetchone()
    if row is None or not isinstance(row[0], bytes) or len(row[0]) != 16 or not isinstance(row[1] or 0, int):
        raise _DamagedError("its identity is missing")
    return Covered(row[0], row[1] or 0)


def _check(database: sqlite3.Connection) -> None:
    """Check the structure of the database and the checksums of all sequences.

    Raises:
        _DamagedError: something is damaged.
    """
    if database.execute("PRAGMA quick_check(1)").fetchone() != (b"ok",):
        raise _DamagedError("its structure is inconsistent")
    if not all(_is_valid(*row) for row in database.execute("SELECT tokens, crc FROM sequences")):
        raise _DamagedError("the checksum of a conversation is wrong")
    # A damaged header can make the database read-only.
    database.execute("UPDATE store SET identity = identity")


def _is_valid(tokens: object, crc: object) -> bool:
    return isinstance(tokens, bytes) and len(tokens) % WORD == 0 and zlib.crc32(tokens) == crc


def _readable(path: Path) -> list[bytes]:
    """The intact sequences of a damaged database, up to the first page that cannot be read."""
    sequences: list[bytes] = []
    try:
        with closing(sqlite3.connect(path)) as database:
            for row in database.execute("SELECT tokens, crc FROM sequences ORDER BY id"):
                if _is_valid(*row):
                    sequences.append(row[0])  # noqa: PERF401  those before an error are kept
    except _DATABASE_ERRORS:
        pass
    return sequences
