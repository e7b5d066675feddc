"""The database file of the conversations: opening, transactions, damage.

One connection serves all threads of a process, one at a time; other processes may have the file open as well. A file
that turns out to be damaged is set aside under another name, and a new one takes its place with what could be read.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

from ...errors import ConversationError
from ...models.file_system import is_in_use, locked, move
from ...models.user_folders import make_private_file, make_private_folder
from .schema import VERSION, is_of_conversations, migrate, salvage, version_of

_Result = TypeVar("_Result")

_BUSY_S: Final = 30.0
"""How long a change waits for changes of other processes."""
_OPENING_S: Final = 60.0
"""How long opening waits for another process that opens, migrates or salvages the same file."""
_ATTEMPTS: Final = 3
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_HINTS: Final = {
    **dict.fromkeys(_DAMAGED, ("it is damaged, and so is what was made of it", "restore it from a backup")),
    sqlite3.SQLITE_FULL: ("the disk is full", "free some space and try again"),
    sqlite3.SQLITE_IOERR: ("the disk refused to read or write", "look at the disk's health and free space"),
    sqlite3.SQLITE_READONLY: ("it may only be read", "give yourself the permission to write it and its folder"),
    sqlite3.SQLITE_PERM: ("it may not be opened", "give yourself the permission to write it and its folder"),
    sqlite3.SQLITE_CANTOPEN: ("it cannot be opened", "give yourself the permission to write it and its folder"),
    sqlite3.SQLITE_BUSY: ("another program has been writing to it for long", "try again"),
    sqlite3.SQLITE_LOCKED: ("another program has been writing to it for long", "try again"),
}
_SETTINGS: Final = ("synchronous = full", "foreign_keys = on", "secure_delete = on")
_LOG: Final = ("-wal", "-shm")
"""Ends of the names of a database's log and of the index of the log."""
IN_MEMORY: Final = Path(":memory:")
"""SQLite's name for a database in memory, which is gone when it is closed; nothing of it is written to a disk."""


class ConversationDatabase:
    """An open database of conversations.

    Args:
        path: the file, which is created if necessary, or `IN_MEMORY`.
        notice: called with a sentence for the user when a damaged file was set aside.

    Raises:
        ConversationError: the file cannot be read or written, is of a newer version, or is not of conversations.
    """

    def __init__(self, path: Path, notice: Callable[[str], None]) -> None:
        self.path: Final = path
        self._notice = notice
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._file: os.stat_result | None = None
        self._log_file: os.stat_result | None = None
        self._owner: int | None = None
        """The thread that is within a transaction."""
        self._seen = 0
        self._replaced = False
        self.closed = False
        with self._lock:
            self._guarded(lambda _: None)
        self.changed_elsewhere()

    @property
    def in_transaction(self) -> bool:
        """Whether this thread is within a transaction, of which what it reads and writes then is a part."""
        return self._owner == threading.get_ident()

    def read(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Run queries that see one state of the database.

        Raises:
            ConversationError: `work` raised it, or the file cannot be read.
        """
        return self._transaction("BEGIN", work)

    def write(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Make a change: all of it or, if `work` raises, nothing. It is on the disk when this returns.

        Raises:
            ConversationError: `work` raised it, or the file cannot be written.
        """
        return self._transaction("BEGIN IMMEDIATE", work)

    def changed_elsewhere(self) -> bool:
        """Whether another connection has changed the database since the last call."""

        with self._lock:
            before = self._seen
            self._seen = self._guarded(lambda connection: connection.execute("PRAGMA data_version").fetchone()[0])
            replaced, self._replaced = self._replaced, False
        return replaced or before != self._seen

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        with self._lock:
            self.closed = True
            self._disconnect()

    def _transaction(self, begin: str, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        if self.in_transaction and self._connection is not None:
            return work(self._connection)

        def run(connection: sqlite3.Connection) -> _Result:
            if connection.in_transaction:  # Ctrl-C came between a statement and its end
                connection.execute("ROLLBACK")
            with connection:  # which commits, or rolls back
                connection.execute(begin)
                if self._file is not None and not self._is_at_path():
                    # It was set aside while this waited for its lock; a change would be made in the wrong file.
                    raise _ReplacedError(f"{self.path} was replaced several times")
                self._owner = threading.get_ident()
                try:
                    return work(connection)
                finally:
                    self._owner = None

        with self._lock:
            return self._guarded(run)

    def _guarded(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Run `work`, again if the database is replaced or turns out to be damaged; errors in words for users."""
        try:
            for _ in range(_ATTEMPTS - 1):
                try:
                    return work(self._connected())
                except _ReplacedError:
                    continue
                except sqlite3.DatabaseError as error:
                    if not is_damage(error):
                        raise
                    self._set_aside()
            return work(self._connected())
        except sqlite3.DatabaseError as error:
            if (code := _code(error)) is None:  # a mistake in the program
                raise
            what, hint = _HINTS.get(code, (str(error), ""))
            raise ConversationError(f"{self.path}: {what}", hint) from error
        except OSError as error:
            if is_in_use(error):
                raise ConversationError(
                    f"{self.path} is damaged, and other programs use it", "end them, and open the conversations again"
                ) from error
            folder, reason = self.path.parent, error.strerror or error
            raise ConversationError(
                f"conversations cannot be kept in {folder}: {reason}",
                "give yourself the permission to write there, or name another folder with EDGERUN_HOME",
            ) from error

    def _connected(self) -> sqlite3.Connection:
        """The connection, to the file that now has the path: another process may have set the former one aside."""
        if self.closed:
            raise ConversationError("the conversations are closed", "open them again")
        if self._connection is not None and self._is_at_path():
            return self._connection
        if self.path == IN_MEMORY:
            self._connection = connect(self.path)
            self._connection.execute("PRAGMA temp_store = memory")
            migrate(self._connection)
            return self._connection
        self._replaced = self._replaced or self._connection is not None
        self._disconnect()
        make_private_folder(self.path.parent)
        with self._opening():
            self._complete_replacement()
            self._set_stale_log_aside()
            make_private_file(self.path)
            self._file = self.path.stat()
            connection = connect(self.path)
            try:
                self._require_own(connection)
                damage = sqlite3.DatabaseError("quick_check found damage")
                damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
                if any(row[0] != "ok" for row in connection.execute("PRAGMA quick_check(1)")):
                    raise damage
                migrate(connection)
            except BaseException:
                connection.close()
                raise
            self._log_file = _stat(self._beside(_LOG[0]))
            self._connection = connection
        return connection

    def _set_stale_log_aside(self) -> None:
        """Rename a log that belongs to another database than the one that has the path now.

        SQLite would write the pages in it into that database, or delete it if the database is empty.
        """
        log, file = _stat(self._beside(_LOG[0])), _stat(self.path)
        if log is not None and (
            file is None
            or (file.st_size == 0 and log.st_size > 0)
            or (self._log_file is not None and os.path.samestat(log, self._log_file))
        ):
            self._rename_files(self._free_name(), _LOG)

    def _require_own(self, connection: sqlite3.Connection) -> None:
        if not is_of_conversations(connection):
            raise ConversationError(f"{self.path} is a database of another program", "move it elsewhere")
        if (version := version_of(connection)) > VERSION:
            raise ConversationError(
                f"{self.path} was written by a newer edge-run: its version is {version}, this one reads {VERSION}",
                "update edge-run",
            )

    def _is_at_path(self) -> bool:
        if self.path == IN_MEMORY:
            return True
        file = _stat(self.path)
        return file is not None and self._file is not None and os.path.samestat(self._file, file)

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _set_aside(self) -> None:
        """Give the damaged file another name, and put a database with what can be read of it in its place."""
        self._disconnect()
        with self._opening(), ExitStack() as writing:
            if not self._is_at_path():  # another process has just done it
                return
            # Others wait with their changes, if the damage allows it, and make them in the replacement.
            holder = writing.enter_context(closing(sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)))
            with suppress(sqlite3.Error):
                holder.execute("BEGIN IMMEDIATE")
            damaged = self._free_name()
            partial, replacement = self._beside(".partial"), self._beside(".salvaged")
            for left in (partial, replacement):
                left.unlink(missing_ok=True)
            make_private_file(partial)
            with closing(connect(partial, log=False)) as connection:
                migrate(connection)
                conversations, messages = salvage(self.path, connection)
            move(partial, replacement)
            # The log comes first: beside another database it would be lost.
            try:
                self._rename_files(damaged, (*_LOG, ""))
            except OSError as error:
                if not is_in_use(error):
                    raise
                writing.close()  # Windows does not rename open files
                self._rename_files(damaged, (*_LOG, ""))
            self._complete_replacement()
        self._replaced = True
        self._notice(
            f"the file of conversations was damaged and is kept as {damaged}; "
            f"{conversations} conversations with {messages} messages could be read and are here"
        )

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Keep other processes from opening the file, or setting it aside, during the block."""
        path = self._beside(".lock")
        make_private_file(path)
        with locked(path, _OPENING_S):
            yield

    def _complete_replacement(self) -> None:
        """Put a salvaged database in the place of the one that was set aside, also if a killed process began that."""
        replacement = self._beside(".salvaged")
        if replacement.exists():
            if self.path.exists():
                replacement.unlink()
            else:
                move(replacement, self.path)

    def _beside(self, end: str) -> Path:
        return self.path.with_name(self.path.name + end)

    def _free_name(self) -> Path:
        """A name for a damaged file that no file has."""
        stamp = f"{datetime.now().astimezone():%Y-%m-%d-%H%M%S-%f}"
        return self.path.with_name(f"{self.path.stem}.damaged-{stamp}{self.path.suffix}")

    def _rename_files(self, target: Path, ends: Sequence[str]) -> None:
        for end in ends:
            source = self._beside(end)
            if source.exists():
                move(source, target.with_name(target.name + end))


class _ReplacedError(OSError):
    """The file was set aside after it had been opened."""


def connect(path: Path, *, log: bool = True) -> sqlite3.Connection:
    """Open a database for all threads, without implicit transactions.

    Args:
        path: the file.
        log: whether changes are written to a log beside the file, so that reading goes on while another process writes.
    """
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        for setting in (f"journal_mode = {'wal' if log else 'delete'}", *_SETTINGS):
            connection.execute(f"PRAGMA {setting}")
        connection.create_function("holds", 2, _holds, deterministic=True)
    except BaseException:
        connection.close()
        raise
    return connection


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _holds(text: str, word: str) -> bool:
    """Whether a text contains a word; upper and lower case are the same. LIKE knows the case of ASCII alone."""
    return word.lower() in text.lower()


def _code(error: sqlite3.Error) -> int | None:
    """The primary error code of SQLite; None for an error of Python's module."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether an error says that the file is damaged."""
    code = _code(error)
    return str(error).startswith("Could not decode to UTF-8") if code is None else code in _DAMAGED
