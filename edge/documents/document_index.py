"""The index of a folder of documents: a database of its passages, which follows what changes in the folder."""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from ...errors import CancelledError, EdgeError, InputError
from ...models.file_system import locked, remove
from ...models.progress import Progress, silent
from ...models.regular_file import open_regular
from ...models.user_folders import cache_folder, make_private_file, make_private_folder
from ...runtime.encoders.encoder import Encoder
from ...runtime.prefill import never
from ..conversations.database import is_damage
from ..conversations.records import Passage
from .document_text import document_text, split_passages

_Result = TypeVar("_Result")

MAX_FILE_BYTES: Final = 8 << 20
"""Largest file that is read."""
MAX_TOTAL_BYTES: Final = 256 << 20
"""Most bytes of text of one folder, which have at most half a million passages."""
MAX_FILES: Final = 100_000
"""Most files of one folder that are looked at."""
_TOO_MANY: Final = "beyond the limit of a folder"
_LEFT_OUT: Final = frozenset({"node_modules", "__pycache__"})
"""Folders that are left out, besides hidden ones."""
_VERSION: Final = 1
"""Version of the tables and of how text is split, which is in the name of the file."""
_SETTINGS: Final = ("PRAGMA journal_mode = wal", "PRAGMA synchronous = normal", "PRAGMA foreign_keys = on")
_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS file (number INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, size INTEGER NOT NULL, "
    "modified INTEGER NOT NULL, digest BLOB, text TEXT, skipped TEXT)",
    "CREATE TABLE IF NOT EXISTS passage (number INTEGER PRIMARY KEY, start INTEGER NOT NULL, length INTEGER NOT NULL, "
    "line INTEGER NOT NULL, file INTEGER NOT NULL REFERENCES file ON DELETE CASCADE)",
    "CREATE INDEX IF NOT EXISTS passage_file ON passage (file)",
    "CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (name, text, content = '', "
    "tokenize = 'porter unicode61 remove_diacritics 2')",
    "CREATE TABLE IF NOT EXISTS vector (passage INTEGER PRIMARY KEY REFERENCES passage ON DELETE CASCADE, "
    "model TEXT NOT NULL, elements BLOB NOT NULL)",
)
_PASSAGE: Final = (
    "SELECT passage.number, name, line, substr(text, start + 1, length) FROM passage "
    "JOIN file ON file.number = passage.file"
)
_LACKING: Final = "LEFT JOIN vector ON vector.passage = passage.number WHERE vector.model IS NOT ?"
_COUNT_LACKING: Final = f"SELECT count(*) FROM passage {_LACKING}"  # noqa: S608
_SAME: Final = "UPDATE file SET size = ?, modified = ? WHERE name = ? AND digest = ?"
_ADD_FILE: Final = "INSERT INTO file (name, size, modified, digest, text, skipped) VALUES (?, ?, ?, ?, ?, ?)"
_ADD_PASSAGE: Final = "INSERT INTO passage (file, start, length, line) VALUES (?, ?, ?, ?)"
_ADD_WORDS: Final = "INSERT INTO words (rowid, name, text) VALUES (?, ?, ?)"
_RANKED: Final = "SELECT rowid FROM words WHERE words MATCH ? AND rank MATCH 'bm25(2.0, 1.0)' ORDER BY rank LIMIT ?"
"""BM25, in which a word in the name of a file counts twice. Source: Robertson and Zaragoza 2009, as FTS5 has it."""
_EMBEDDED: Final = 16
"""Passages whose vectors are made in one transaction, which other processes wait for if they write, too."""
_COMPARED: Final = 4_096
"""Vectors that are in memory at a time."""
_BUSY_S: Final = 30.0
_KEPT_S: Final = 30 * 86_400
_KEPT: Final = re.compile(r"[0-9a-f]{32}(-[0-9]+\.sqlite3)?")
"""Names of the folders of attached files, and of indexes; nothing else is ever removed."""
_SETTLED_NS: Final = 2_000_000_000
"""A file that changed less long ago may change again without another time or size, so it is read again next time."""
_UNSPACED: Final = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Characters of Japanese and Chinese, which has no spaces between words: each one is indexed as a word."""
_CHARACTER: Final = re.compile(f"([{_UNSPACED}])")
_WORD: Final = re.compile(f"[{_UNSPACED}]+|[^\\W{_UNSPACED}]+")
_MOST_WORDS: Final = 64


@dataclass(frozen=True)
class IndexUpdate:
    """What an update found."""

    documents: int
    """Number of documents in the index."""
    read: int
    """Number of files that were read, because they are new or have changed."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Numbers of files that are left out, by the reason."""


class DocumentIndex(AbstractContextManager["DocumentIndex"]):
    """The index of a folder or a file, in the cache folder; other processes may have it open as well.

    `with_index` makes one and takes care of damage; without it, methods raise `sqlite3.Error`.

    Args:
        root: the folder or the file.

    Raises:
        InputError: there is none.
        OSError: the index cannot be created.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.path = index_path(root)
        make_private_folder(self.path.parent)
        with locked(self.path.with_suffix(".lock"), _BUSY_S):
            make_private_file(self.path)
            os.utime(self.path)
            _remove_unused(self.path.parent)
            self._database: Final = sqlite3.connect(
                self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            try:
                for statement in (*_SETTINGS, *_TABLES):
                    self._database.execute(statement)
            except sqlite3.Error:
                self._database.close()
                raise

    def update(self, progress: Progress = silent, cancelled: Callable[[], bool] = never) -> IndexUpdate:
        """Read files that are new or have changed, each in a transaction, and drop those that are gone.

        Raises:
            CancelledError: `cancelled` returned True; what has been read stays.
            InputError: the folder is gone.
        """
        found, skipped = self._files()
        rows = self._database.execute("SELECT name, size, modified, skipped FROM file").fetchall()
        with self._database as database:
            database.execute("BEGIN IMMEDIATE")
            for name in {row[0] for row in rows} - found.keys():
                _drop(database, name)
        known = {name: rest for name, *rest in rows if name in found}
        total = sum(size for size, _, reason in known.values() if reason is None)
        read = 0
        for number, (name, (path, status)) in enumerate(found.items()):
            if cancelled():
                raise CancelledError("reading the documents was cancelled")
            progress("reading documents", number / len(found))
            size, modified, reason = known.get(name, (0, 0, None))
            if name not in known or (size, modified) != (status.st_size, status.st_mtime_ns):
                total -= size if reason is None else 0
                reason = self._read(name, path, status, MAX_TOTAL_BYTES - total)
                total += status.st_size if reason is None else 0
                read += reason is None
            if reason is not None:
                skipped[reason] += 1
        progress("reading documents", 1.0)
        (documents,) = self._database.execute("SELECT count(*) FROM file WHERE skipped IS NULL").fetchone()
        return IndexUpdate(documents, read, dict(skipped))

    def search(self, question: str, limit: int) -> list[Passage]:
        """The passages with words of a question that BM25 ranks first; any text is a valid question."""
        if not (query := match_query(question)):
            return []
        return self._passages([row[0] for row in self._database.execute(_RANKED, (query, limit))])

    def embed(self, encoder: Encoder, progress: Progress = silent, cancelled: Callable[[], bool] = never) -> None:
        """Make the vectors that passages lack, a few at a time in a transaction; those of another model are replaced.

        Raises:
            CancelledError: `cancelled` returned True; the vectors that have been made stay.
        """
        model, last = encoder.fingerprint, 0
        (count,) = self._database.execute(_COUNT_LACKING, (model,)).fetchone()
        following = f"{_PASSAGE} {_LACKING} AND passage.number > ? ORDER BY passage.number LIMIT ?"
        for done in range(0, count, _EMBEDDED):
            if cancelled():
                raise CancelledError("reading the documents was cancelled")
            progress("embedding documents", done / count)
            with self._database as database:
                # The transaction begins first, so that a passage does not change while its vector is made.
                database.execute("BEGIN IMMEDIATE")
                rows = database.execute(following, (model, last, _EMBEDDED)).fetchall()
                vectors = _vectors(encoder, [text for *_, text in rows], "document").astype(np.float16)
                values = [(row[0], model, vector.tobytes()) for row, vector in zip(rows, vectors, strict=True)]
                database.executemany("REPLACE INTO vector (passage, model, elements) VALUES (?, ?, ?)", values)
            last = max([last, *(row[0] for row in rows)])

    def nearest(self, encoder: Encoder, question: str, limit: int) -> list[Passage]:
        """The passages whose vectors have the greatest cosine similarity to a question's; `embed` makes them."""
        if not question.strip():
            return []
        (wanted,) = _vectors(encoder, [question], "query")
        best: list[tuple[float, int]] = []
        vectors = self._database.execute("SELECT passage, elements FROM vector WHERE model = ?", (encoder.fingerprint,))
        while rows := vectors.fetchmany(_COMPARED):
            elements = np.frombuffer(b"".join(row[1] for row in rows), np.float16).reshape(len(rows), -1)
            similarities = (elements.astype(np.float32) @ wanted).tolist()
            best = nlargest(limit, [*best, *zip(similarities, (row[0] for row in rows), strict=True)])
        return self._passages([number for _, number in best])

    def whole(self, most_characters: int, most_files: int) -> list[Passage] | None:
        """All documents from beginning to end; None if they are more than that."""
        counted = "SELECT count(*), total(length(text)) FROM file WHERE text IS NOT NULL"
        files, characters = self._database.execute(counted).fetchone()
        if files > most_files or characters > most_characters:
            return None
        rows = self._database.execute("SELECT name, text FROM file WHERE text IS NOT NULL ORDER BY name")
        return [Passage(self._source(name), 1, text) for name, text in rows if text.strip()]

    def __exit__(self, *_error: object) -> None:
        self._database.close()

    def _passages(self, numbers: Sequence[int]) -> list[Passage]:
        marks = ", ".join("?" * len(numbers))
        rows = self._database.execute(f"{_PASSAGE} WHERE passage.number IN ({marks})", numbers)
        found = {number: Passage(self._source(name), line, text) for number, name, line, text in rows}
        return [found[number] for number in numbers if number in found]

    def _source(self, name: bytes) -> str:
        """How users and models read the name of a file."""
        shown = name.decode("utf-8", "replace")
        return shown if self.root.is_file() else f"{self.root.name}/{shown}"

    def _files(self) -> tuple[dict[bytes, tuple[Path, os.stat_result]], Counter[str]]:
        """The regular files by their paths in the folder, in order, and how many are left out; links are not followed.

        Raises:
            InputError: the folder is gone.
        """
        found: dict[bytes, tuple[Path, os.stat_result]] = {}
        skipped: Counter[str] = Counter()
        if not self.root.exists():
            raise InputError(f"{self.root} does not exist any more", "name another folder or file")
        if not self.root.is_dir():
            return {os.fsencode(self.root.name): (self.root, self.root.stat())}, skipped
        for folder, folders, names in os.walk(self.root):
            folders[:] = sorted(each for each in folders if each[0] != "." and each not in _LEFT_OUT)
            for path in (Path(folder, each) for each in sorted(names) if each[0] != "."):
                with suppress(OSError):  # it has just been removed
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and len(found) == MAX_FILES:
                        skipped[_TOO_MANY] += 1
                    elif stat.S_ISREG(status.st_mode):
                        found[os.fsencode(path.relative_to(self.root).as_posix())] = (path, status)
        return found, skipped

    def _read(self, name: bytes, path: Path, status: os.stat_result, room: int) -> str | None:
        """Bring the index up to date with a file; returns why it is left out, or None."""
        digest, text, modified = None, None, status.st_mtime_ns
        shown = name.decode("utf-8", "replace")
        reason = "too large" if status.st_size > MAX_FILE_BYTES else None
        if reason is None and status.st_size > room:
            reason, modified = _TOO_MANY, 0
        try:
            if reason is None:
                with open_regular(path, MAX_FILE_BYTES) as file:
                    data = file.read(MAX_FILE_BYTES)
                    after = os.fstat(file.fileno())
                same = (after.st_size, after.st_mtime_ns) == (len(data), modified)
                modified = modified if same and time.time_ns() - modified >= _SETTLED_NS else 0
                digest, text = hashlib.sha256(data).digest(), document_text(shown, data)
                reason = "not text" if text is None else None
        except OSError:
            reason, modified = "not readable", 0
        with self._database as database:
            database.execute("BEGIN IMMEDIATE")
            if database.execute(_SAME, (status.st_size, modified, name, digest)).rowcount:
                return reason
            _drop(database, name)
            values = (name, status.st_size, modified, digest, text, reason)
            file_number = database.execute(_ADD_FILE, values).lastrowid
            for start, end, line in split_passages(text or ""):
                number = database.execute(_ADD_PASSAGE, (file_number, start, end - start, line)).lastrowid
                database.execute(_ADD_WORDS, (number, _spaced(shown), _spaced((text or "")[start:end])))
        return reason


def index_path(root: Path) -> tuple[Path, Path]:
    """A folder or file without links in its path, and the database of its index.

    Raises:
        InputError: there is no such folder or file.
    """
    try:
        root = root.expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{root} cannot be read: {reason}", "name a folder or a file with text") from error
    key = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
    return root, cache_folder() / "documents" / f"{key}-{_VERSION}.sqlite3"


def with_index(root: Path, work: Callable[[DocumentIndex], _Result]) -> _Result:
    """Do some work with the index of a folder or file; once more, with a new index, if it turns out to be damaged.

    Raises:
        InputError: the folder or file does not exist.
        EdgeError: the index cannot be read or written, or `work` raised it.
    """
    _, path = index_path(root)
    try:
        try:
            with DocumentIndex(root) as index:
                return work(index)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            _remove(path)
            with DocumentIndex(root) as index:
                return work(index)
    except (sqlite3.Error, OSError) as error:
        what = f"the index {path} of {root} failed: {error}"
        raise EdgeError(what, "name another folder for indexes with EDGERUN_CACHE") from error


def _remove(path: Path) -> None:
    """Remove an index, or the folder of an attached file."""
    for end in ("-wal", "-shm", ""):
        remove(path.with_name(path.name + end))


def _remove_unused(folder: Path) -> None:
    """Remove indexes and attached files that nobody has used for long: they have the texts of documents."""
    for path in folder.iterdir():
        with suppress(OSError):  # removed meanwhile, or in use
            if _KEPT.fullmatch(path.name) and path.stat().st_mtime < time.time() - _KEPT_S:
                _remove(path)


def match_query(question: str) -> str:
    """A query of FTS5 for passages with any word of a question; empty if it has none.

    Every word is a quoted string, so that nothing in the question is syntax of FTS5. Japanese and Chinese are searched
    by pairs of characters.
    """
    parts: dict[str, None] = {}
    for word in _WORD.findall(question):
        if _CHARACTER.match(word) and len(word) > 2:
            parts |= dict.fromkeys(f"{first} {second}" for first, second in pairwise(word))
        else:
            parts[_spaced(word.lower()).strip()] = None
    return " OR ".join(f'"{each}"' for each in list(parts)[:_MOST_WORDS])


def _vectors(encoder: Encoder, texts: Sequence[str], kind: str) -> npt.NDArray[np.float32]:
    """Vectors `[n, d]` of texts with what the model wants before them; of a text that is too long, of its beginning."""
    before, last = str(encoder.prompts.get(kind, "")), encoder.context - 1
    encoded = [encoder.tokenizer.encode(before + text, add_special_tokens=True) for text in texts]
    return encoder.embed([ids if len(ids) <= last else [*ids[:last], ids[-1]] for ids in encoded])


def _drop(database: sqlite3.Connection, name: bytes) -> None:
    """Remove a file and its passages; the table of words has to be told what it indexed."""
    for number, _, _, text in database.execute(f"{_PASSAGE} WHERE name = ?", (name,)).fetchall():
        values = (number, _spaced(name.decode("utf-8", "replace")), _spaced(text))
        database.execute("INSERT INTO words (words, rowid, name, text) VALUES ('delete', ?, ?, ?)", values)
    database.execute("DELETE FROM file WHERE name = ?", (name,))


def _spaced(text: str) -> str:
    """The text with spaces around characters that are words of their own."""
    return text if text.isascii() else _CHARACTER.sub(r" \1 ", text)
