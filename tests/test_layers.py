"""The import directions of docs/decisions/0001-layout.md, read from the source.

`edge -> export -> runtime -> models -> errors.py`: a room imports from itself and from the rooms below it.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest

from support.source_tree import ROOMS, ROOT, modules_imported, name_of, source_of, sources

GROUND = ("errors", "telemetry", "version")
ONLY_IN = {
    "onnxruntime": ("runtime/graph/", "runtime/devices/", "export/check/", "runtime/kv/device_buffers.py"),
    "onnx": ("export/",),
    "huggingface_hub": ("models/hub/client.py",),
    "mcp": ("edge/tools/",),
    "msgspec": ("edge/service/", "edge/server/", "edge/rpc/", "edge/app/", "edge/conversations/", "edge/tools/"),
    "torch": ("export/draft_training/", "export/calibration/gradients.py", "export/calibration/learned_rounding.py"),
    "transformers": (),
}
TOKENS_ONLY = ("runtime/decode.py", "runtime/sampling/", "runtime/kv/", "runtime/graph/", "runtime/speculation/")
MOST_TOP_MODULES = {"runtime": 12, "export": 8}
SAME_JOB = {
    "main": "the entry point of a room",
    "parity": "compares a graph that was written with what it was made from: an export, an upgrade",
    "pipeline": "the steps of an export, of an upgrade",
}
"""Module names that several rooms have because they do the same job there."""

BY_NAME = {("edge", "cli"), ("runtime", "strategies")}
"""Packages whose modules are imported by their names, from a table."""


def test_every_module_is_imported() -> None:
    """Commands are imported by their names (edge/cli/command_line.py), and so are strategies."""
    known = {name_of(path): path for path in sources()}
    imported = {each for path in known.values() for each in modules_imported(path, known)}
    packages = {name for name, path in known.items() if path.name == "__init__.py"}
    unused = known.keys() - imported - packages
    assert {".".join(name) for name in unused if name[:2] not in BY_NAME} == set()


def test_rooms_import_only_what_lies_below_them() -> None:
    above = {room: {("edgerun", each) for each in ROOMS[:number]} for number, room in enumerate(ROOMS)}
    imported = [(path, module) for path in sources() for module in source_of(path).imports]
    assert [each for each in imported if each[1][:2] in above[each[0].relative_to(ROOT).parts[0]]] == []


def test_the_ground_floor_imports_nothing_of_edge_run() -> None:
    for name in GROUND:
        assert not [module for module in source_of(ROOT / f"{name}.py").imports if module[0] == "edgerun"]


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = {name_of(path): path for path in sources()}
    graph = {name: modules_imported(path, known) - {name} for name, path in known.items()}
    # A package's own names come from its modules, which do not need the package to be finished.
    graph = {name: {each for each in found if each != name[:-1]} for name, found in graph.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(".".join(name) for name in error.args[1]))


def test_modules_of_one_name_do_the_same_job() -> None:
    names = Counter(
        name_of(path)[-1] for path in sources() if path.name != "__init__.py" and "architectures" not in path.parts
    )
    assert {name for name, count in names.items() if count > 1} <= set(SAME_JOB)


@pytest.mark.parametrize(("room", "most"), MOST_TOP_MODULES.items())
def test_rooms_have_few_modules_at_their_top(room: str, most: int) -> None:
    modules = sorted(path.name for path in (ROOT / room).glob("*.py") if path.name != "__init__.py")
    assert len(modules) <= most, modules


def test_heavy_libraries_stay_in_their_rooms() -> None:
    imported = [
        (path.relative_to(ROOT).as_posix(), module[0]) for path in sources() for module in source_of(path).imports
    ]
    assert [each for each in imported if each[1] in ONLY_IN and not each[0].startswith(ONLY_IN[each[1]])] == []


def test_the_decode_loop_knows_no_text() -> None:
    for path in sources():
        if path.relative_to(ROOT).as_posix().startswith(TOKENS_ONLY):
            assert not any(module[:3] == ("edgerun", "runtime", "text") for module in source_of(path).imports), path


def test_the_engine_is_the_face_of_its_model() -> None:
    """What edge/ needs of a loaded model is an attribute of `Engine`."""
    reached = [(path, source_of(path).models_of_engines) for path in (ROOT / "edge").rglob("*.py")]
    assert [each for each in reached if each[1]] == []


def test_every_package_is_in_the_wheel() -> None:
    packages = {
        ".".join(("edgerun", *init.relative_to(ROOT).parent.parts))
        for init in [ROOT / "__init__.py", *(p for room in ROOMS for p in (ROOT / room).rglob("__init__.py"))]
    }
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert packages == set(listed)
