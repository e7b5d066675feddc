"""What the documents say agrees with the code."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType

import pytest

from edgerun.edge.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    path for folder in ("*", "docs/**/*", "*/README", "models/bundled/*") for path in sorted(ROOT.glob(f"{folder}.md"))
]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = [line for line in readme.splitlines() if line.endswith(".venv/bin/pytest")]
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_every_command_of_the_readme_has_a_spelling_for_powershell() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    for command in commands:
        assert (
            command.replace("python3", "python").replace(" &&", ";").replace(".venv/bin/", ".venv\\Scripts\\") in lines
        )


def test_the_oldest_python_is_the_same_everywhere() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    oldest = settings["project"]["requires-python"].removeprefix(">=")
    listed = [name.rpartition(" ")[2] for name in settings["project"]["classifiers"] if "Python :: 3." in name]
    assert listed[0] == settings["tool"]["mypy"]["python_version"] == oldest
    assert settings["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert f"With Python {oldest} or later" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/rooms/*.md")), ids=lambda page: page.stem)
def test_the_page_of_a_room_names_a_dozen_modules_that_exist(page: Path) -> None:
    named = set(re.findall(r"`(?:[a-z0-9_]+/)*([a-z0-9_]+\.py)`", page.read_text(encoding="utf-8")))
    existing = {
        path.name
        for room in ("edge", "export", "runtime", "models", "tests/support")
        for path in ROOT.glob(f"{room}/**/*.py")
    }
    assert named <= existing | {"server.py"}
    assert len(named) <= 12


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)", text, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.add(next(name for n in count() if (name := f"{slug}-{n}" if n else slug) not in found))
    return found


@pytest.mark.parametrize(
    "path",
    ["README.md", "docs/guide/export.md", "docs/guide/formats.md", "edge/cli/export.py", "edge/cli/command_line.py"],
)
def test_models_to_export_are_named_with_their_organization(path: str) -> None:
    """Placeholders are in capitals, and files have the suffix of their kind."""
    text = (ROOT / path).read_text(encoding="utf-8")
    named = re.findall(r"(?:edge-run export|--draft) ([\w./-]+)", text)
    assert named
    wrong = [
        name
        for name in named
        if not (name.isupper() or "/" in name or name.endswith((".gguf", ".onnx")) or name in ("mtp", "none"))
        and not name.startswith("-")
    ]
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{document.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{document.name}: {link}"


@pytest.mark.parametrize(
    "command", ["run", "complete", "export", "bench", "tune", "verify", "pull", "models", "rpc", "serve", "train-draft"]
)
def test_the_user_guide_names_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help", "--no-cache"}
    guide = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "guide").glob("*.md"))
    assert {option for option in options if option not in guide} == set()


LISTED = re.compile(r"^([a-z_.]+):([A-Za-z_.]+)", re.MULTILINE)
"""A line of a call path in docs/how-it-works.md: module and function."""
MAX_FIRST, MAX_FURTHER = 10, 5


def documented_paths() -> tuple[list[str], list[str]]:
    """The calls to the first token and to every further one, as `module:function`."""
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").partition("## The path of a token")[2]
    first, further = (LISTED.findall(block) for block in text.split("```")[1:4:2])
    return [f"{module}:{name.split('.')[-1]}" for module, name in first], [
        f"{module}:{name.split('.')[-1]}" for module, name in further
    ]


def function_of(frame: FrameType) -> str | None:
    """A frame of edge-run's as `module:function`; None for one of another package, or inside a function."""
    module = frame.f_globals.get("__name__", "")
    name = frame.f_code.co_name
    return None if not module.startswith("edgerun.") or name.startswith("<") else f"{module[8:]}:{name}"


def calls_of(run: Callable[[], object]) -> tuple[list[str], list[list[str]]]:
    """The functions of edge-run that `run` calls, in order, and what is on the stack at every forward pass."""
    calls: list[str] = []
    stacks: list[list[str]] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (name := function_of(frame)) is None:
            return
        calls.append(name)
        if name.endswith(":forward"):
            stack, at = [], frame
            while at is not None:
                if (found := function_of(at)) is not None:
                    stack.append(found)
                at = at.f_back  # type: ignore[assignment]
            stacks.append(stack[::-1])

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls, stacks


def test_the_path_of_a_token_is_the_documented_one(capsys: pytest.CaptureFixture[str]) -> None:
    first, further = documented_paths()
    assert len(first) <= MAX_FIRST
    assert len(further) <= MAX_FURTHER
    calls, stacks = calls_of(lambda: main(["-p", "list files", "--spec", "off", "-n", "3", "--no-cache"]))
    assert capsys.readouterr().out
    # Drafts and measurements have passes of their own; plain decoding of a prompt without a cache has none of them.
    ours = [stack for stack in stacks if "runtime.generation:generate" in stack]
    until = calls[: calls.index("runtime.sampling.sampler:choose") + 1]
    assert [until.index(name) for name in first] == sorted(until.index(name) for name in first)
    entry = {"edge.cli.main:main", "edge.cli.command_line:run_command"}
    assert set(ours[0]) - entry <= set(first)
    assert set(ours[-1]) - entry - set(first[:2]) <= set(further)
    assert calls[-1 - calls[::-1].index("runtime.sampling.sampler:choose")] == further[-1]
