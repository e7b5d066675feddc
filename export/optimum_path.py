"""Checkpoints of families that edge-run itself does not export, by way of Hugging Face Optimum.

Optimum traces the checkpoint's PyTorch model into an ONNX graph of plain operators, in a process of its own; that graph
is then upgraded like any other (`upgrade`). Nothing is downloaded and no code of the checkpoint is run.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..errors import CheckpointError, DestinationError, InputError
from ..models.json_file import read_json_object
from ..models.manifest import Method
from ..models.progress import Progress
from .architectures.family import supported_families
from .destination import ExportResult, require_apart
from .recipe import ExportRequest
from .upgrade import upgrade_model

_MODULE: Final = "optimum.exporters.onnx"
_TASK: Final = "text-generation-with-past"
_STAGE: Final = "exporting with Optimum"


def needs_optimum(source: Path) -> bool:
    """Whether a source is a checkpoint folder of a family that only Optimum may know, and Optimum is installed."""
    if not (source / "config.json").is_file() or not _is_installed():
        return False
    config = read_json_object(source / "config.json", CheckpointError, "download the checkpoint again")
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type not in supported_families()


def export_by_optimum(request: ExportRequest, progress: Progress) -> ExportResult:
    """Export a checkpoint with Optimum to a temporary folder, and upgrade the graph it wrote.

    The temporary folder takes the model's size in float32 and lies beside the destination.

    Raises:
        CheckpointError: Optimum cannot export the checkpoint.
        InputError: the recipe has a quantization method, zero points or power-of-two scales.
        DestinationError: there is no room beside the destination.
        EdgeError: whatever `upgrade_model` raises.
    """
    started = time.perf_counter()
    source, destination, recipe = request.source, request.destination, request.recipe
    if recipe.method not in (None, Method.RTN):
        raise InputError("a checkpoint exported through Optimum only supports --method rtn", "leave --method out")
    recipe.require_default_scales("checkpoint exported through Optimum")
    require_apart(source, destination)
    place = next(folder for folder in destination.absolute().parents if folder.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".optimum-", dir=place) as folder:
            progress(_STAGE, 0.0)
            _run_optimum(source, Path(folder))
            progress(_STAGE, 1.0)
            result = upgrade_model(replace(request, source=Path(folder)), progress)
            return replace(result, seconds=time.perf_counter() - started)
    except OSError as error:
        raise DestinationError(
            f"{place} cannot be written: {error.strerror or error}",
            "free space there, or choose another folder",
        ) from error


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_MODULE) is not None
    except ModuleNotFoundError:
        return False


def _run_optimum(source: Path, folder: Path) -> None:
    options = ["--model", str(source), "--task", _TASK, "--framework", "pt", "--dtype", "fp32", "--device", "cpu"]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(  # noqa: S603 -- this interpreter, and a module that is installed in it
        [sys.executable, "-m", _MODULE, *options, str(folder)],
        env={**os.environ, **offline},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise CheckpointError(
            f"Optimum cannot export {source}: {said[-1] if said else f'it ended with {done.returncode}'}",
            "export another checkpoint, or run one that is exported already",
        )
