"""The package's source: its modules, what they import, and how much code they hold."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("edge", "export", "runtime", "models")
"""From the top floor down."""


def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def name_of(path: Path) -> tuple[str, ...]:
    """The module's dotted name below `edgerun`, a package by the name of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


@cache
def imports(path: Path) -> list[tuple[str, ...]]:
    """Absolute module paths a file imports, also inside functions; inside the package they start with 'edgerun'."""
    package = ("edgerun", *path.relative_to(ROOT).parent.parts)
    found: list[tuple[str, ...]] = []
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            found += [(*module, alias.name) for alias in node.names]
    return found


def modules_imported(path: Path, known: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Modules and packages of edge-run that a file imports, or takes names from."""
    found = set()
    for module in imports(path):
        inside = module[1:] if module[0] == "edgerun" else ()
        for end in range(len(inside), 0, -1):
            if inside[:end] in known:
                found.add(inside[:end])
                break
    return found


@cache
def code_lines(path: Path) -> int:
    """Number of lines that are neither blank nor comment nor docstring."""
    texts: set[int] = set()
    for node in ast.walk(syntax_tree(path)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                texts.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return sum(
        number not in texts and bool(line.strip()) and not line.strip().startswith("#") for number, line in lines
    )
