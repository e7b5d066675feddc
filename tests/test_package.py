"""The names of the package, which are imported when they are first used, on all systems; and clones of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import edgerun
from edgerun.models.bundle import open_bundle

LIGHT = {"edgerun", "edgerun.telemetry", "edgerun.version"}


def output_of(program: str) -> list[str]:
    """The words that `program` prints in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True
    ).stdout.split()


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import sys; before = set(sys.modules); import edgerun; print(*sorted(set(sys.modules) - before))"
    assert set(output_of(program)) <= LIGHT | {"__future__"}


def test_answering_on_the_command_line_imports_neither_a_decoder_of_request_bodies_nor_a_prompt() -> None:
    program = (
        "import sys; import edgerun.edge.cli.command_line, edgerun.edge.cli.run; "
        "import edgerun.runtime.engine; print(*sys.modules)"
    )
    imported = output_of(program)
    assert "edgerun.edge.cli.run" in imported
    assert not {"msgspec", "prompt_toolkit", "markdown_it", "edgerun.edge.terminal.chat"} & set(imported)


def test_every_public_name_resolves_and_is_listed() -> None:
    assert set(edgerun.__all__) <= set(dir(edgerun))
    for name in edgerun.__all__:
        assert getattr(edgerun, name) is getattr(edgerun, name)
    assert edgerun.Engine.__module__ == "edgerun.runtime.engine"


def test_names_are_listed_before_they_are_imported() -> None:
    assert set(edgerun.__all__) <= set(output_of("import edgerun; print(*dir(edgerun))"))


def test_a_star_import_brings_every_public_name() -> None:
    program = "import edgerun; names = edgerun.__all__; from edgerun import *; print(*(set(names) - set(globals())))"
    assert output_of(program) == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'edgerun' has no attribute 'engine'"):
        _ = edgerun.engine  # type: ignore[attr-defined]


def test_every_module_is_imported_on_other_platforms() -> None:
    program = ROOT / "tests" / "support" / "simulated_platform.py"
    command = [sys.executable, program, "darwin", "win32"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


ROOT = Path(__file__).parent.parent
BUNDLED = Path("models", "bundled", "shell-helper")


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs git and a clone")
def test_a_clone_with_autocrlf_leaves_the_bundled_model_valid(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    command = ["git", "-c", "core.autocrlf=true", "clone", "--quiet", "--shared", ROOT, clone]
    subprocess.run(command, check=True, capture_output=True)
    for folder in (clone / BUNDLED, clone / BUNDLED / "draft"):
        assert open_bundle(folder).manifest is not None
    texts = [clone / ".ci" / "run", clone / "edge" / "bench" / "prompts.jsonl"]
    assert not any(b"\r" in path.read_bytes() for path in texts)


def test_the_tests_run_in_a_clone_of_any_name(tmp_path: Path) -> None:
    clone = tmp_path / "edge-run"
    (clone / "tests").mkdir(parents=True)
    for name in ("__init__.py", "pyproject.toml"):
        shutil.copy(ROOT / name, clone)
    (clone / "tests" / "test_one.py").write_text("def test_one():\n    pass\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=clone, capture_output=True, encoding="utf-8", check=False)
    assert run.returncode == 0, run.stdout
