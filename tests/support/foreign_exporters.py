"""Other tools' exports for tests (`foreign_exports`), made once a run by an interpreter that has the tool.

That interpreter is what EDGERUN_OPTIMUM_PYTHON or EDGERUN_GENAI_PYTHON names, else the running one where it has the
packages. EDGERUN_FOREIGN_EXPORTS names a folder that holds what the script made earlier, as OUT/optimum and OUT/genai.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from support.foreign_export_script import LEGACY

SCRIPT = Path(__file__).with_name("foreign_exports.py")


class Exporter(Enum):
    """A tool that writes models; the value is its name for the script."""

    OPTIMUM = "optimum"
    GENAI = "genai"

    @property
    def interpreter(self) -> str | None:
        """The Python that has it."""
        modules = {Exporter.OPTIMUM: ("optimum.onnx",), Exporter.GENAI: ("onnxruntime_genai", "transformers")}[self]
        named = os.environ.get(f"EDGERUN_{self.name}_PYTHON")
        return named or (sys.executable if all(_has(module) for module in modules) else None)

    def forms(self, family: str) -> tuple[str, ...]:
        """Folders it makes of a family."""
        if self is Exporter.GENAI:
            return "fp32", "int4"
        return ("with_past", "separate", "merged") if family in LEGACY else ("with_past",)


@dataclass(frozen=True)
class ForeignModel:
    """What one tool made of one family."""

    folder: Path

    def form(self, name: str) -> Path:
        """The export of that name."""
        return self.folder / name

    def tokens(self, record: str = "greedy") -> list[int]:
        """The tokens of record after the prompt: transformers' (`greedy`), or onnxruntime-genai's own (`int4`)."""
        tokens: list[int] = json.loads((self.folder / f"{record}.json").read_text(encoding="utf-8"))
        return tokens


class ForeignExports:
    """All exports, each tool's made when it is first asked for."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._made: dict[Exporter, Path] = {}

    def of(self, exporter: Exporter, family: str) -> ForeignModel:
        """One family's; skips the test where the tool is not at hand."""
        if exporter not in self._made:
            self._made[exporter] = self._make(exporter)
        return ForeignModel(self._made[exporter] / family)

    def _make(self, exporter: Exporter) -> Path:
        if ready := os.environ.get("EDGERUN_FOREIGN_EXPORTS"):
            return Path(ready) / exporter.value
        out = self._folder / exporter.value
        run_in(exporter, str(SCRIPT), exporter.value, str(self._tokenizer), str(out))
        return out


def run_in(exporter: Exporter, *arguments: str) -> str:
    """Run Python with these arguments where the tool is and return what it printed; skips the test without the tool."""
    interpreter = exporter.interpreter
    if interpreter is None:
        pytest.skip(f"needs {exporter.value}: name an interpreter that has it in EDGERUN_{exporter.name}_PYTHON")
    done = subprocess.run([interpreter, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
