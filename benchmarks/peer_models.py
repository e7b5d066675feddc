"""Models for other engines, made from the same checkpoints with the engines' own tools, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from artifacts import checkpoint, made_once
from shapes import Shape

_CONVERTER: Final = Path(__file__).with_name("llama_convert.py")
_OPENVINO_BLOCKS: Final = (128, 64, 32)
"""Weights that share a scale in optimum-intel's 4-bit exports, its default first; blocks must divide all rows."""


def genai_model(work: Path, shape: Shape, block: int, python: str) -> Path:
    """The export of a shape's checkpoint by the model builder of ONNX Runtime GenAI."""
    return genai_export(checkpoint(work, shape), work / shape.name / f"genai-int4-{block}", block, python)


def genai_export(source: Path, folder: Path, block: int, python: str) -> Path:
    """The export of a checkpoint by the model builder of ONNX Runtime GenAI, run with the interpreter `python`."""

    def make(part: Path) -> None:
        command = [python, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
        command += ["-i", str(source), "-o", str(part), "--extra_options", f"block_size={block}"]
        run_tool("the GenAI model builder", command)

    return made_once(folder, make)


def optimum_model(work: Path, shape: Shape, python: str) -> Path:
    """Its float32 export by Optimum, run with the interpreter `python`."""

    def make(folder: Path) -> None:
        command = [python, "-m", "optimum.exporters.onnx", "--task", "text-generation-with-past", "--no-post-process"]
        command += ["--model", str(checkpoint(work, shape)), str(folder)]
        run_tool("Optimum's exporter", command)

    return made_once(work / shape.name / "optimum-fp32", make)


def openvino_block(source: Path) -> int:
    """The largest blocks in which optimum-intel can export a checkpoint; -1 for one scale for each row."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    columns = (config["hidden_size"], config["intermediate_size"])
    return next((block for block in _OPENVINO_BLOCKS if not any(each % block for each in columns)), -1)


def openvino_model(source: Path, folder: Path, python: str) -> Path:
    """The export of a checkpoint by optimum-intel, run with the interpreter `python`.

    Linears have symmetric 4-bit weights in blocks of `openvino_block`; the embedding and the LM head have 8 bits, as by
    default.
    """

    def make(part: Path) -> None:
        command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        command += ["--task", "text-generation-with-past", "--weight-format", "int4", "--sym", "--ratio", "1.0"]
        command += ["--group-size", str(openvino_block(source)), "--model", str(source), str(part)]
        run_tool("optimum-intel's exporter", command)

    return made_once(folder, make)


@dataclass(frozen=True)
class LlamaTools:
    """llama.cpp: its source, with what was built from it in `build/bin`, and an interpreter for its converter."""

    source: Path
    python: str

    @property
    def binaries(self) -> Path:
        """Folder of its programs and libraries."""
        return self.source / "build" / "bin"

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which llama-cpp-python loads these libraries."""
        return {"LLAMA_CPP_LIB_PATH": str(self.binaries)}

    def convert(self, source: Path, file: Path, dtype: str) -> Path:
        """A GGUF file of a checkpoint without quantization; `dtype` is f32, f16 or bf16."""

        def make(part: Path) -> None:
            command = [self.python, str(_CONVERTER), str(self.source), str(source)]
            run_tool("llama.cpp's converter", [*command, "--outfile", str(part), "--outtype", dtype])

        return made_once(file, make)

    def quantize(self, source: Path, file: Path, quantization: str, importance: Path | None = None) -> Path:
        """The GGUF file `source` in a format such as Q4_K_M, with an importance matrix or without."""

        def make(part: Path) -> None:
            weighted = [] if importance is None else ["--imatrix", str(importance)]
            program = [str(self.binaries / "llama-quantize"), *weighted]
            run_tool("llama-quantize", [*program, str(source), str(part), quantization, "2"])

        return made_once(file, make)

    def importance(self, model: Path, text: Path, file: Path, context: int) -> Path:
        """The importance matrix of a GGUF file for a text, read in windows of `context` tokens."""

        def make(part: Path) -> None:
            command = [str(self.binaries / "llama-imatrix"), "-m", str(model), "-f", str(text), "-o", str(part)]
            run_tool("llama-imatrix", [*command, "-c", str(context), "--parse-special", "--no-ppl", "-t", "2"])

        return made_once(file, make)

    def benchmark_model(self, work: Path, shape: Shape, quantization: str) -> Path:
        """The shape's checkpoint of random weights in a format."""
        folder = work / shape.name
        file = folder / f"llama-{quantization}.gguf"
        if file.is_file():
            return file
        whole = self.convert(checkpoint(work, shape), folder / "llama-bf16.gguf", "bf16")
        return self.quantize(whole, file, quantization)


def run_tool(name: str, command: Sequence[str]) -> None:
    """Run another project's program, without access to model hubs.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    done = subprocess.run(
        command,
        # GenAI's builder would import modules of the working folder in the place of its own.
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stdout[-2000:]}")
    print(f"{name}: done", file=sys.stderr)
