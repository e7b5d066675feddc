"""A budget for the size of the source: one person must be able to hold it in the head.

Where a test fails, merge or delete before you add. A change that makes a room smaller lowers its figures here.
"""

from __future__ import annotations

import pytest

from support.source_tree import ROOT, modules_imported, name_of, source_of, sources

BUDGET = {
    "edge": (14_736, 110, 243),
    "export": (15_056, 125, 162),
    "runtime": (23_377, 201, 351),
    "models": (3_229, 27, 36),
}
"""Most lines of code (without blank lines, comments and docstrings), modules and classes of each room."""
CLOSURES = {"runtime.decode": 4_128, "runtime.engine": 24_429, "edge.cli.run": 25_583}
"""Most lines of code that a module imports, directly or not."""
HINT = "merge or delete before you add"


@pytest.mark.parametrize("room", BUDGET)
def test_rooms_stay_within_their_budget(room: str) -> None:
    found = [source_of(path) for path in sources() if path.relative_to(ROOT).parts[0] == room]
    size = (sum(source.code_lines for source in found), len(found), sum(source.classes for source in found))
    over = [figure for figure, most in zip(size, BUDGET[room], strict=True) if figure > most]
    assert not over, f"{room} has {size} lines of code, modules and classes of at most {BUDGET[room]}: {HINT}"


@pytest.mark.parametrize("module", CLOSURES)
def test_modules_import_no_more_than_their_budget(module: str) -> None:
    known = {name_of(path): path for path in sources()}
    seen: set[tuple[str, ...]] = set()
    pending = [tuple(module.split("."))]
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += modules_imported(known[name], known)
    lines = sum(source_of(known[name]).code_lines for name in seen)
    assert lines <= CLOSURES[module], f"{module} imports {lines} lines of code: {HINT}"


def test_modules_have_at_most_400_lines() -> None:
    lines = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8").count("\n") for path in sources()}
    long = {path: count for path, count in lines.items() if count > 400}
    assert not long, HINT
