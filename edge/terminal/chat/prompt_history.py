"""What was typed at earlier prompts, in a file that its owner alone can read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from prompt_toolkit.history import History

from ....models.atomic import write_atomically
from ....models.data_folder import data_folder, make_private_file, make_private_folder

_KEPT: Final = 1000
"""Number of messages that are kept."""
_MAX_BYTES: Final = 2 << 20
"""Size from which the file is written anew with the messages that are kept."""
_MAX_MESSAGE: Final = 64 << 10
"""Most characters of a message that is kept."""


def history_path() -> Path:
    """The file of the messages that were typed."""
    return data_folder() / "typed.jsonl"


class PromptHistory(History):
    """The messages that were typed, a JSON string a line. What cannot be read or written is left out.

    Args:
        path: the file.
        writing: whether what is typed now is kept in it.
    """

    def __init__(self, path: Path, *, writing: bool) -> None:
        super().__init__()
        self._path = path
        self._writing = writing

    def load_history_strings(self) -> Iterable[str]:
        """The messages in the file, the newest first."""
        return reversed(self._read())

    def store_string(self, string: str) -> None:
        """Add a message to the file."""
        if not self._writing or len(string) > _MAX_MESSAGE:
            return
        with suppress(OSError):
            make_private_folder(self._path.parent)
            make_private_file(self._path)
            with self._path.open("ab") as file:
                file.write(_line(string))
                size = file.tell()
            if size > _MAX_BYTES:
                kept = self._read()[-_KEPT:]
                while sum(map(len, kept)) > _MAX_BYTES // 2:
                    kept = kept[len(kept) // 2 :]
                write_atomically(self._path, b"".join(map(_line, kept)), private=True)

    def _read(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                lines = file.read(2 * _MAX_BYTES).splitlines()
        except OSError:
            return []
        found = []
        for line in lines[-_KEPT:]:
            with suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, str):
                    found.append(value)
        return found


def _line(message: str) -> bytes:
    return json.dumps(message).encode() + b"\n"
