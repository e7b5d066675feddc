"""Exports of other tools, made once per test run by an interpreter that has the tool.

That interpreter is named by EDGERUN_OPTIMUM_PYTHON or EDGERUN_GENAI_PYTHON, or else the running one if it has the
packages. EDGERUN_FOREIGN_EXPORTS may name a folder of earlier results of `foreign_export_script`, with the subfolders
optimum and genai.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

from support.foreign_export_script import LEGACY

SCRIPT = Path(__file__).with_name("foreign_export_script.py")


class Exporter(Enum):
    """A tool that exports models; the value is its name in the script."""

    OPTIMUM = "optimum"
    GENAI = "genai"

    @property
    def interpreter(self) -> str | None:
        """Path of a Python interpreter that has the tool; None without one."""
        modules = {Exporter.OPTIMUM: ("optimum.onnx",), Exporter.GENAI: ("onnxruntime_genai", "transformers")}[self]
        named = os.environ.get(f"EDGERUN_{self.name}_PYTHON")
        return named or (sys.executable if all(map(_has, modules)) else None)

    def variants(self, family: str) -> tuple[str, ...]:
        """Names of the exports that it makes of a family."""
        if self is Exporter.GENAI:
            return "fp32", "int4"
        return ("with_past", "separate", "merged") if family in LEGACY else ("with_past",)


def expected_tokens(model: Path, source: str = "greedy") -> list[int]:
    """The tokens after the prompt that transformers (`greedy`) or onnxruntime-genai (`int4`) gives."""
    tokens: list[int] = json.loads((model / f"{source}.json").read_text(encoding="utf-8"))
    return tokens


class ForeignExports:
    """All exports; those of a tool are made when the first of them is needed."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._made: set[Exporter] = set()

    def of(self, exporter: Exporter, family: str) -> Path:
        """The folder with the exports of one family; skips the test if the tool is missing."""
        if ready := os.environ.get("EDGERUN_FOREIGN_EXPORTS"):
            return Path(ready) / exporter.value / family
        out = self._folder / exporter.value
        if exporter not in self._made:
            run_in(exporter, str(SCRIPT), exporter.value, str(self._tokenizer), str(out))
            self._made.add(exporter)
        return out / family


def run_in(exporter: Exporter, *arguments: str) -> str:
    """Run the tool's Python with these arguments and return its output; skips the test if the tool is missing."""
    interpreter = exporter.interpreter
    if interpreter is None:
        pytest.skip(f"needs {exporter.value}: name an interpreter that has it in EDGERUN_{exporter.name}_PYTHON")
    result = subprocess.run([interpreter, *arguments], capture_output=True, encoding="utf-8", timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
