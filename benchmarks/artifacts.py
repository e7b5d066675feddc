"""Models for benchmarks, made once and kept in a working folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from checkpoints import Shape, write_checkpoint
from edgerun.export import ExportRecipe, ExportRequest, WeightFormat, export_checkpoint, upgrade_model


def checkpoint(work: Path, shape: Shape, tokenizer: Path | None = None) -> Path:
    """A checkpoint of the shape with random weights, and the tokenizer of a folder or a byte-level one."""
    return _once(
        work / _name(shape, tokenizer) / "checkpoint",
        lambda folder: write_checkpoint(shape, folder, tokenizer=tokenizer),
    )


def bundle(work: Path, shape: Shape, block: int, tokenizer: Path | None = None) -> Path:
    """Its edge-run bundle, with 4-bit weights in blocks of `block`."""

    def make(folder: Path) -> None:
        export_checkpoint(
            ExportRequest(checkpoint(work, shape, tokenizer), folder, ExportRecipe(body=WeightFormat(4, block)))
        )

    return _once(work / _name(shape, tokenizer) / f"edge-run-int4-{block}", make)


def _name(shape: Shape, tokenizer: Path | None) -> str:
    return shape.name if tokenizer is None else f"{shape.name}-tokenizer-{tokenizer.resolve().name}"


def genai_model(work: Path, shape: Shape, block: int, python: str) -> Path:
    """Its export by the model builder of ONNX Runtime GenAI, run with the interpreter `python`."""

    def make(folder: Path) -> None:
        command = [python, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
        command += ["-i", str(checkpoint(work, shape)), "-o", str(folder), "--extra_options", f"block_size={block}"]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=offline, capture_output=True, encoding="utf-8", check=False)
        if done.returncode:
            raise RuntimeError(f"the GenAI model builder failed:\n{done.stderr[-2000:]}")

    return _once(work / shape.name / f"genai-int4-{block}", make)


def optimum_model(work: Path, shape: Shape, python: str) -> Path:
    """Its float32 export by Optimum, run with the interpreter `python`."""

    def make(folder: Path) -> None:
        command = [python, "-m", "optimum.exporters.onnx", "--task", "text-generation-with-past", "--no-post-process"]
        command += ["--model", str(checkpoint(work, shape)), str(folder)]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=offline, capture_output=True, encoding="utf-8", check=False)
        if done.returncode:
            raise RuntimeError(f"Optimum's exporter failed:\n{done.stderr[-2000:]}")

    return _once(work / shape.name / "optimum-fp32", make)


def upgraded(model: Path, recipe: ExportRecipe) -> Path:
    """The upgrade of a foreign ONNX model, in a folder beside it."""
    return _once(
        model.with_name(f"{model.name}-upgraded-{recipe.body or 'as-stored'}".replace("/", "-")),
        lambda folder: upgrade_model(ExportRequest(model, folder, recipe)),
    )


def _once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Make `folder` if it does not exist, under another name first so that an interrupted run leaves no partial one."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        make(part)
        part.rename(folder)
    return folder
