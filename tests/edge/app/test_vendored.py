"""The vendored files of the app's page are those that VENDOR.md lists."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

VENDOR = Path(__file__).resolve().parents[3] / "edge" / "app" / "page" / "vendor"
LIST = (VENDOR / "VENDOR.md").read_text(encoding="utf-8")
HASHES = dict(re.findall(r"^\| (\S+) \| \S+ \| `([0-9a-f]{64})` \|$", LIST, re.MULTILINE))
FOLDERS = re.findall(r"^\| (\S+) \| \S+ \| ([0-9.]+) \| [A-Z][^|]+ \|", LIST, re.MULTILINE)
"""Folder and version of each library."""


def test_every_file_is_listed_and_unmodified() -> None:
    found = {
        path.relative_to(VENDOR).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name != "VENDOR.md"
    }
    assert found == HASHES


def test_every_library_has_its_version_and_its_licence() -> None:
    versions = dict(FOLDERS)
    assert set(versions) == {path.name for path in VENDOR.iterdir() if path.is_dir()}
    for name in versions:
        assert "copyright" in (VENDOR / name / "LICENSE").read_text(encoding="utf-8").lower()
    for name, file, pattern in (
        ("dompurify", "purify.es.mjs", r"DOMPurify ([0-9.]+) "),
        ("highlight.js", "core.min.js", r"Highlight\.js v([0-9.]+) "),
        ("marked", "marked.esm.js", r"marked v([0-9.]+) "),
    ):
        (said,) = set(re.findall(pattern, (VENDOR / name / file).read_text(encoding="utf-8")[:500]))
        assert said == versions[name]
