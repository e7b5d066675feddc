"""What the documents say is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgerun.edge.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("*/README.md"))]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = [line for line in readme.splitlines() if line.endswith(".venv/bin/pytest")]
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name}: {target}"


@pytest.mark.parametrize("command", ["run", "export", "bench", "tune", "verify", "pull", "models"])
def test_the_user_guide_names_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help", "--no-cache"}
    guide = (ROOT / "docs" / "user-guide.md").read_text(encoding="utf-8")
    assert {option for option in options if option not in guide} == set()
