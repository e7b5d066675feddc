"""Random damage to the files of a folder, of every kind that people and disks do; a seed repeats it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from support.unusual_files import remove, replace_by_pipe, replace_by_sparse_file

NESTED: Final = "[" * 3000 + "]" * 3000
UNUSUAL: Final[Sequence[Any]] = (
    *(None, True, False, -1, 0, 1, 2, 7, 300, 301, 1 << 31, 1 << 63, 1 << 70, 10**30, -(1 << 63)),
    *(0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "x",
        "x" * 3000,
        "0",
        "nan",
        "../../etc/passwd",
        "/dev/zero",
        "\ud800",
        "\0",
        "\x1b[31mred",
        "{{ 1 }}",
        "a b",
    ),
    *([], {}, [[]], [None], [1, 2, 3], ["a"], {"a": {}}, {"content": 5}, [{"name": 1}], list(range(2000))),
)
"""Values of other types and sizes than settings have."""

_MAX_BYTES: Final = 1 << 26


class Damage:
    """Damages files of a folder.

    Args:
        folder: the folder.
        seed: the same seed does the same.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.done: list[str] = []
        """What was done."""

    def file(self, *suffixes: str) -> Path:
        """A random regular file of the folder, with one of these suffixes if there are any; none made huge before."""
        found = (path for path in sorted(self.folder.rglob("*")) if path.is_file() and not path.is_symlink())
        files = [path for path in found if path.stat().st_size <= _MAX_BYTES]
        chosen = [path for path in files if not suffixes or path.suffix in suffixes]
        return self.random.choice(chosen or files)

    def flip(self, path: Path) -> None:
        """Change a few bytes, in half of the cases near the beginning."""
        with suppress(OSError), path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            for _ in range(self.random.choice((1, 1, 2, 8, 64))):
                at = self.random.randrange(max(1, min(size, self.random.choice((64, 4096, size or 1)))))
                file.seek(at)
                file.write(self.random.randbytes(self.random.choice((1, 1, 4, 8))))

    def overwrite_number(self, path: Path) -> None:
        """Write an unusual integer somewhere near the beginning."""
        with suppress(OSError), path.open("r+b") as file:
            file.seek(self.random.randrange(4096))
            number = self.random.choice((0, 1, 255, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 64) - 1))
            file.write(number.to_bytes(8, "little")[: self.random.choice((4, 8))])

    def truncate(self, path: Path) -> None:
        """Cut the end off."""
        with suppress(OSError):
            os.truncate(path, self.random.choice((0, 1, 8, int(path.stat().st_size * self.random.random()))))

    def change_json(self, path: Path) -> None:
        """Replace, remove or add a value somewhere in a JSON file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return
        parent: Any = data
        while isinstance(parent, (dict, list)) and parent:
            key: Any = self.random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            inner = parent[key]
            if not isinstance(inner, (dict, list)) or not inner or self.random.random() < 0.4:
                self._change_entry(parent, key)
                break
            parent = inner
        path.write_text(json.dumps(data), encoding="utf-8")

    def _change_entry(self, parent: Any, key: Any) -> None:
        kind = self.random.random()
        if kind < 0.2:
            del parent[key]
        elif kind < 0.3 and isinstance(parent, dict):
            parent[self.random.choice(("", "x", "\ud800", "a" * 500))] = parent[key]
        elif kind < 0.4 and isinstance(parent[key], (int, float)):
            parent[key] = parent[key] * self.random.choice((-1, 2, 1000, 10**9)) + self.random.choice((-1, 0, 1))
        else:
            parent[key] = self.random.choice(UNUSUAL)

    def write_nonsense(self, path: Path) -> None:
        """Put other contents into a file."""
        contents = (b"", b"{}", b"[]", b"null", b"\xff\xfe{\0}\0", NESTED.encode(), b'{"a":' * 2000, b"\0" * 4096)
        with suppress(OSError):
            path.write_bytes(self.random.choice((*contents, self.random.randbytes(300))))

    def replace_file(self, path: Path) -> None:
        """Put something else in the place of a file."""
        replacements: tuple[Callable[[Path], object], ...] = (
            replace_by_pipe,
            lambda path: replace_by_sparse_file(path, 8 << 30),
            lambda path: (remove(path), path.mkdir()),
            lambda path: (remove(path), path.symlink_to(path.name)),
            lambda path: (remove(path), path.symlink_to("/dev/zero")),
            lambda path: (remove(path), path.symlink_to("nothing")),
            lambda path: (remove(path), path.symlink_to(".")),
            _replace_by_socket,
            remove,
        )
        self.random.choice(replacements)(path)

    def put_nan(self, path: Path) -> None:
        """Make some or all weights NaN or infinite."""
        values = np.fromfile(path, np.float32)
        if values.size:
            value = self.random.choice((np.nan, np.inf, -np.inf, 1e38))
            start = self.random.randrange(values.size)
            values[start : start + self.random.choice((1, 1000, values.size))] = value
            path.write_bytes(values.tobytes() + path.read_bytes()[values.nbytes :])

    def apply(self, kinds: Sequence[tuple[str, tuple[str, ...]]], count: int) -> None:
        """Do `count` random things: names of methods with the suffixes of the files that they damage."""
        for _ in range(count):
            name, suffixes = self.random.choice(kinds)
            path = self.file(*suffixes)
            getattr(self, name)(path)
            self.done.append(f"{name} {path.relative_to(self.folder)}")


def recompute_digests(folder: Path) -> None:
    """Write the digests of the files as they are into edge.json, as somebody who tampers with a bundle would."""
    manifest = folder / "edge.json"
    with suppress(OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        if not manifest.is_file() or manifest.stat().st_size > 1 << 20:
            return
        data = json.loads(manifest.read_text(encoding="utf-8"))
        for name in list(data["files"]):
            path = folder / name
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 26:
                content = path.read_bytes()
                data["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest.write_text(json.dumps(data), encoding="utf-8")


def _replace_by_socket(path: Path) -> None:
    remove(path)
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def fresh_copy(source: Path, place: Path) -> Path:
    """A copy of a folder in the place of an earlier one."""
    if place.exists():
        shutil.rmtree(place)
    shutil.copytree(source, place, symlinks=True)
    return place
