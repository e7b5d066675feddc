"""Earlier conversations of a model: an SQLite database, the index made from it, and candidates from its repetitions.

Every operation holds a lock file and opens the database for itself; if the lock is taken, the operation is skipped. A
damaged database is set aside (the latest one), and a new one begins. When the size limit is reached, the oldest
sequences are deleted. The index is a separate file, which says which part of which database it has,
and it can be made again from the database (docs/decisions/0027-history-store.md).

The size limit covers everything: a token takes four bytes in the database, eight in the index and four in a database
that was set aside. No process keeps an index file open, so an outdated one can always be removed, except on Windows
while another process reads it; then no new one is made for now (docs/decisions/0035-indexing-while-idle.md).
Problems with the files are reported as warnings and never raised:
decoding works without earlier conversations.
"""

from __future__ import annotations

import secrets
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

import numpy as np

from ....models.file_system import locked, move
from ....models.regular_file import read_regular
from ..tree import Source
from .history_index import HEADER_BYTES, REACH, WORD, Covered, HistoryIndex, Tokens, encode
from .interface import EARLIER_CONVERSATIONS, Agreement, Candidate, TailDrafter, bucket

_MAX_CANDIDATES: Final = 3
_DATABASE: Final = "history.db"
_SET_ASIDE: Final = "history.db.damaged"
_LOCK: Final = "lock"
_INDEX: Final = "index"
_PART: Final = 128
"""Number of sequences read at a time while indexing: other operations wait 0.25 s for the lock, or are skipped."""
_WAIT_S: Final = 0.25
_PAGE_BYTES: Final = 1024
"""Size of a database page; the smallest databases have a few pages."""
_FEW_TOKENS: Final = 200_000
"""So many are always indexed at the end, which takes a tenth of a second."""
_WORTH: Final = 16
"""More are indexed at the end if at least one in so many is new."""
_SCHEMA: Final = f"""
PRAGMA page_size = {_PAGE_BYTES};
PRAGMA auto_vacuum = FULL;
CREATE TABLE sequences (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE store (identity BLOB NOT NULL);
"""
"""Tokens are little-endian uint32. The identity changes whenever sequences are deleted, so that an index of them is
recognized as outdated."""


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
    """

    def __init__(self, folder: Path, max_bytes: int, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._path = folder / _DATABASE
        self._index_path = folder / _INDEX
        self._max_bytes = max_bytes
        self._max_pages = (max_bytes - HEADER_BYTES - 2 * WORD) // 4 // _PAGE_BYTES
        self._warn = warn
        self.index: HistoryIndex | None = None
        """Index of the sequences, which may lack the latest; None if there is none."""
        try:
            if self._path.exists():
                with self._database() as database:
                    self._open_index(_covered(database))
        except (OSError, *_DATABASE_ERRORS) as error:
            self._warn(f"earlier conversations are not used yet: {error}")

    def append(self, token_ids: Sequence[int]) -> bool:
        """Store a finished sequence, or the end of a very long one; returns whether it was stored.

        To store a growing conversation, append its new tokens: a sequence need not start where a conversation starts.
        """
        if not len(token_ids):
            return True
        max_tokens = self._max_pages // 2 * (_PAGE_BYTES - 64) // WORD
        tokens = np.asarray(token_ids[-max_tokens:], "<u4").tobytes()
        return self._tried(lambda: self._append(tokens), "this conversation is not stored")

    def unindexed_tokens(self) -> int:
        """Number of stored tokens that the index lacks; 0 if the store is in use."""
        try:
            if not self._path.exists():
                return 0
            with self._database() as database:
                known = self.index.covered if self.index is not None else None
                first = known.end if known is not None and known.identity == _covered(database).identity else 0
                query = "SELECT total(length(tokens)) FROM sequences WHERE id > ?"
                return int(database.execute(query, (first,)).fetchone()[0]) // WORD
        except (OSError, *_DATABASE_ERRORS):
            return 0

    def index_rest(self) -> None:
        """Index what the index lacks, if it is worth the time: the engine closes. A later process does the rest."""
        new = self.unindexed_tokens()
        total = new + (0 if self.index is None else len(self.index))
        if new and (total <= _FEW_TOKENS or new * _WORTH >= total):
            self.reindex()

    def reindex(self, pause: Callable[[], None] = lambda: None) -> bool:
        """Index all sequences, about 0.5 s for a million tokens; returns whether the index has them all.

        Other threads and processes can use the store meanwhile. `index` changes when the new one is complete; an index
        that another process has made is used if it has them all.

        Args:
            pause: called between short steps, without the lock; may wait, or raise an error to stop.
        """
        return self._tried(lambda: self._reindex(pause), "earlier conversations are not indexed")

    def _tried(self, operation: Callable[[], bool], failure: str) -> bool:
        """Run an operation, once more if a damaged database was set aside; a failure is a warning, and False."""
        try:
            try:
                return operation()
            except _DATABASE_ERRORS:
                return operation()
        except (OSError, ValueError, MemoryError, *_DATABASE_ERRORS) as error:
            self._warn(f"{failure}: {error}")
            return False

    def _append(self, tokens: bytes) -> bool:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._database() as database:
            _insert(database, tokens)
            if _pages(database) > self._max_pages:
                database.rollback()
                self._delete_oldest(database)
                _insert(database, tokens)
        return True

    def _reindex(self, pause: Callable[[], None]) -> bool:
        if not self._path.exists():
            self.index = None
            return True
        with self._database() as database:
            covered = _covered(database)
            self._open_index(covered)
            if self.index is not None and self.index.covered == covered:
                return True
        encoded = encode(self._read_in_parts(covered, pause), covered, pause)
        with self._database() as database:
            now = _covered(database)
            if now.identity != covered.identity:
                return False  # sequences were deleted meanwhile
            self._open_index(now)
            return self._replace_index(encoded, covered)

    def _read_in_parts(self, covered: Covered, pause: Callable[[], None]) -> list[Tokens]:
        """The intact sequences that an index of `covered` has; the lock is released between parts of them."""
        sequences: list[Tokens] = []
        last = 0
        query = "SELECT id, tokens, crc FROM sequences WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?"
        while last < covered.end:
            pause()
            with self._database() as database:
                rows = database.execute(query, (last + 1, covered.end, _PART)).fetchall()
            if not rows:
                break  # another process has deleted them
            if rows[-1][0] <= last:
                raise sqlite3.DatabaseError("its order is damaged")
            sequences += [np.frombuffer(tokens, "<u4") for _, tokens, crc in rows if _is_valid(tokens, crc)]
            last = rows[-1][0]
        return sequences

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Lock and open the database, created or shortened if necessary; commit at the end of the block.

        Raises:
            sqlite3.Error: the database is damaged, and was set aside; or another of `_DATABASE_ERRORS`.
        """
        with locked(self._folder / _LOCK, _WAIT_S):
            try:
                with closing(sqlite3.connect(self._path, timeout=_WAIT_S)) as database:
                    database.text_factory = bytes  # damaged text is not decoded
                    # Without waiting for the disk: a killed process damages nothing, and a power failure may cost the
                    # history.
                    database.execute("PRAGMA synchronous = OFF")
                    if not _pages(database):
                        database.executescript(_SCHEMA)
                        database.execute("INSERT INTO store VALUES (?)", (secrets.token_bytes(16),))
                    _covered(database)
                    if _pages(database) > self._max_pages:
                        self._delete_oldest(database)
                    yield database
                    database.commit()
            except _DATABASE_ERRORS as error:
                if str(error) not in _ENVIRONMENT_ERRORS:
                    self._set_aside(error)
                raise

    def _set_aside(self, damage: Exception) -> None:
        self._remove_index()
        if self._path.stat().st_size <= self._max_pages * _PAGE_BYTES:
            move(self._path, self._folder / _SET_ASIDE)
        self._folder.joinpath(f"{_DATABASE}-journal").unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        self._warn(f"{self._path} is damaged ({damage}), and a new one begins")

    def _delete_oldest(self, database: sqlite3.Connection) -> None:
        """Delete the oldest sequences until half of the pages are free, so that deletions are rare.

        The index goes too, because of the size limit and because it contains the deleted sequences.
        """
        self._remove_index()
        while _pages(database) > self._max_pages // 2:
            (count,) = database.execute("SELECT count(*) FROM sequences").fetchone()
            oldest = "SELECT id FROM sequences ORDER BY id LIMIT ?"
            if not database.execute(f"DELETE FROM sequences WHERE id IN ({oldest})", (count // 8 + 1,)).rowcount:  # noqa: S608  a constant
                break
        database.execute("UPDATE store SET identity = ?", (secrets.token_bytes(16),))
        database.commit()

    def _open_index(self, covered: Covered) -> None:
        """Use the index file where it has more of the database than the index in memory."""
        if self.index is not None and self.index.covered.identity != covered.identity:
            self.index = None
        known = 0 if self.index is None else self.index.covered.end
        if known == covered.end:
            return
        try:
            index = HistoryIndex(read_regular(self._index_path, self._max_bytes))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._warn(f"the index of earlier conversations cannot be read: {error}")
            self._remove_index()
            return
        if index.covered.identity == covered.identity and known < index.covered.end <= covered.end:
            self.index = index

    def _replace_index(self, encoded: bytes, covered: Covered) -> bool:
        """Write the index file and use it, unless another process has made one that has more."""
        if self.index is not None and self.index.covered.end >= covered.end:
            return True
        if not self._remove_index():
            return False  # it would exceed the size limit beside the outdated one
        # Without waiting for the disk, as for the database: the index has a checksum.
        unfinished = self._index_path.with_name(f".{_INDEX}")
        unfinished.write_bytes(encoded)
        move(unfinished, self._index_path)
        self.index = HistoryIndex(encoded)
        return True

    def _remove_index(self) -> bool:
        """Remove the index file, and the ones of earlier versions of edge-run; returns whether they are gone."""
        try:
            unfinished = self._index_path.with_name(f".{_INDEX}")
            for path in [self._index_path, unfinished, *self._folder.glob(f"*{_INDEX}-*")]:
                path.unlink(missing_ok=True)
        except PermissionError:  # Windows refuses while another process reads the file
            return False
        return True


def _insert(database: sqlite3.Connection, tokens: bytes) -> None:
    database.execute("INSERT INTO sequences (tokens, crc) VALUES (?, ?)", (tokens, zlib.crc32(tokens)))


def _pages(database: sqlite3.Connection) -> int:
    """Number of pages in use, including pages of the current transaction."""
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    (free,) = database.execute("PRAGMA freelist_count").fetchone()
    return int(pages) - int(free)


def _covered(database: sqlite3.Connection) -> Covered:
    """Identity of the database and id of its last sequence: what an index made now covers."""
    row = database.execute("SELECT identity, (SELECT max(id) FROM sequences) FROM store").fetchone()
    if row is None or not isinstance(row[0], bytes) or len(row[0]) != 16 or not isinstance(row[1] or 0, int):
        raise sqlite3.DatabaseError("its identity is missing")
    return Covered(row[0], row[1] or 0)


def _is_valid(tokens: object, crc: object) -> bool:
    return isinstance(tokens, bytes) and len(tokens) % WORD == 0 and zlib.crc32(tokens) == crc


class HistoryDrafter(TailDrafter):
    """Proposes the tokens that followed the longest matches of the end of the sequence in a store's sequences.

    A fixed number of places is examined, so that a lookup takes the same time in any store; of a short match, which has
    many places, they are a sample. Before a store has an index there are no candidates. An index that is made during an
    answer is used from the next `reset`, which begins the next answer.

    Args:
        store: earlier sequences of the model.
        vocab_size: vocabulary size; larger token ids in the store are not proposed.
    """

    source = Source.HISTORY
    prior = EARLIER_CONVERSATIONS
    reach = REACH

    def __init__(self, store: HistoryStore, vocab_size: int) -> None:
        self._store = store
        self._index = store.index
        self._vocab_size = vocab_size

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence, and use the store's latest index from now on."""
        self._index = self._store.index
        super().reset(token_ids)

    def candidates(self, state: tuple[int, ...]) -> list[Candidate]:
        """Up to three: tokens that followed the longest match, most frequent first, then tokens after shorter ones."""
        if self._index is None or not state:
            return []
        candidates: list[Candidate] = []
        counts: dict[int, int] = {}
        # Places with a match of the same length count together, and places of longer matches too.
        for missing, places in groupby(sorted(self._index.find(state)), itemgetter(0)):
            new = []
            for _, _, follower in places:
                if follower < self._vocab_size:
                    if follower not in counts:
                        new.append(follower)
                    counts[follower] = counts.get(follower, 0) + 1
            if not new:
                continue
            total = sum(counts.values())
            if len(counts) == 1:
                agreement = Agreement.ONCE if total == 1 else Agreement.ALWAYS
            else:
                agreement = Agreement.MOSTLY if 2 * max(counts.values()) > total else Agreement.SPLIT
            for token in sorted(new, key=counts.__getitem__, reverse=True):
                candidates.append(Candidate(token, bucket(len(state) - missing, agreement, len(candidates))))
                if len(candidates) == _MAX_CANDIDATES:
                    return candidates
        return candidates
