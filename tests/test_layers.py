"""The import directions of docs/decisions/0001-layout.md, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("edge", "export", "runtime", "models")
MAY_IMPORT = {
    "edge": {"edge", "errors", "export", "runtime", "models", "version"},
    "export": {"export", "models", "errors"},
    "runtime": {"runtime", "models", "errors"},
    "models": {"models", "errors", "version"},
}
"""`errors` stands for edge.errors, the one module of `edge` that everyone may use."""
ONLY_IN = {
    "onnxruntime": {"runtime/session.py", "runtime/bound.py", "runtime/device.py", "export/session.py"},
    "onnx": {"export/"},
    "huggingface_hub": {"models/hub_client.py"},
    "torch": {"models/training/"},
    "transformers": set(),
}
TOKENS_ONLY = ("runtime/decode.py", "runtime/sampling.py", "runtime/kv.py", "runtime/session.py", "runtime/draft/")


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imports(path: Path) -> list[tuple[str, ...]]:
    """Absolute module paths a file imports; inside the package they start with 'edgerun'."""
    package = ("edgerun", *path.relative_to(ROOT).parent.parts)
    found: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            found += [module, *((*module, alias.name) for alias in node.names)]
    return found


def room_of(module: tuple[str, ...]) -> str | None:
    if module[0] != "edgerun" or len(module) < 2:
        return None
    return "errors" if module[1:3] == ("edge", "errors") else module[1]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_what_lies_below_them(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        target = room_of(module)
        if target in {*ROOMS, "errors", "version"} and module != ("edgerun", "edge"):
            assert target in MAY_IMPORT[room], f"{path} imports {'.'.join(module)}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_libraries_stay_in_their_rooms(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    for module in imports(path):
        if module[0] in ONLY_IN:
            assert any(name.startswith(place) for place in ONLY_IN[module[0]]), f"{name} imports {module[0]}"


def test_the_decode_loop_knows_no_text() -> None:
    for path in sources():
        if path.relative_to(ROOT).as_posix().startswith(TOKENS_ONLY):
            assert not any(module[:3] == ("edgerun", "runtime", "text") for module in imports(path)), path


def test_every_package_is_in_the_wheel() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML by itself")
    packages = {
        ".".join(("edgerun", *init.relative_to(ROOT).parent.parts))
        for init in [ROOT / "__init__.py", *(p for room in ROOMS for p in (ROOT / room).rglob("__init__.py"))]
    }
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert packages == set(listed)
