"""The package's source: its modules, what they import, and how much code they hold."""

from __future__ import annotations

import ast
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("edge", "export", "runtime", "models")
"""From the top floor down."""


class Source(NamedTuple):
    """What tests ask of a module."""

    imports: list[tuple[str, ...]]
    """Absolute module paths, also of imports inside functions; inside the package they start with 'edgerun'."""
    code_lines: int
    """Number of lines that are neither blank nor comment nor docstring."""
    classes: int
    models_of_engines: list[int]
    """Lines that read the attribute `model` of an engine."""


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def name_of(path: Path) -> tuple[str, ...]:
    """The module's dotted name below `edgerun`, a package by the name of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


@cache
def source_of(path: Path) -> Source:
    """Parse a module, once."""
    package = ("edgerun", *path.relative_to(ROOT).parent.parts)
    text = path.read_text(encoding="utf-8")
    imports: list[tuple[str, ...]] = []
    texts: set[int] = set()
    classes, models = 0, []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imports += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            imports += [(*module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Attribute) and ast.unparse(node).endswith("engine.model"):
            models.append(node.lineno)
        classes += isinstance(node, ast.ClassDef)
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    code = sum(number not in texts and bool(line) and not line.startswith("#") for number, line in lines)
    return Source(imports, code, classes, models)


def modules_imported(path: Path, known: Collection[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Modules and packages of edge-run that a file imports, or takes names from."""
    inside = [module[1:] for module in source_of(path).imports if module[0] == "edgerun"]
    prefixes = ([module[:end] for end in range(len(module), 0, -1)] for module in inside)
    return {found for each in prefixes if (found := next((name for name in each if name in known), None))}
