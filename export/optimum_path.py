"""Exporting checkpoints of other families through Hugging Face Optimum.

Optimum traces the checkpoint's PyTorch model to an ONNX graph of standard operators in a subprocess. That graph is then
upgraded like any other (`upgrade`). Nothing is downloaded, and no code of the checkpoint is run.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..errors import CheckpointError, DestinationError
from ..models.atomic import temporary_folder
from ..models.json_file import read_json_object
from ..models.progress import Progress
from ..models.regular_file import os_errors_as
from .architectures import supported_families
from .destination import ExportResult, require_apart
from .recipe import ExportRecipe
from .upgrade.pipeline import require_expressible, upgrade_model

_MODULE: Final = "optimum.exporters.onnx"
_TASK: Final = "text-generation-with-past"
_STAGE: Final = "exporting with Optimum"


def needs_optimum(source: Path) -> bool:
    """Whether a source is a checkpoint folder of a family that is not supported here, and Optimum is installed."""
    try:
        if not (source / "config.json").is_file() or importlib.util.find_spec(_MODULE) is None:
            return False
    except ModuleNotFoundError:
        return False
    config = read_json_object(source / "config.json", CheckpointError, "download the checkpoint again")
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type not in supported_families()


def export_by_optimum(
    source: Path, destination: Path, recipe: ExportRecipe, progress: Progress, command: str
) -> ExportResult:
    """Export a checkpoint with Optimum to a temporary folder, and upgrade the graph it wrote.

    The temporary folder takes the model's size in float32 and lies beside the destination.

    Raises:
        CheckpointError: Optimum cannot export the checkpoint.
        InputError: the recipe has a quantization method, zero points or float16 scales.
        DestinationError: the disk beside the destination refused a write.
        EdgeError: whatever `upgrade_model` raises.
    """
    started = time.perf_counter()
    require_expressible(recipe, "checkpoint exported through Optimum")
    require_apart(source, destination)
    parent = next(folder for folder in destination.absolute().parents if folder.is_dir())
    unwritable = os_errors_as(
        DestinationError, f"{parent} cannot be written", "free space there, or choose another folder"
    )
    with unwritable, temporary_folder(parent, "optimum") as folder:
        progress(_STAGE, 0.0)
        _run_optimum(source, folder)
        progress(_STAGE, 1.0)
        result = upgrade_model(folder, destination, recipe, progress, command=command)
        return replace(result, seconds=time.perf_counter() - started)


def _run_optimum(source: Path, folder: Path) -> None:
    options = ["--model", str(source), "--task", _TASK, "--framework", "pt", "--dtype", "fp32", "--device", "cpu"]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(  # noqa: S603 -- runs this interpreter with an installed module
        [sys.executable, "-m", _MODULE, *options, str(folder)],
        env={**os.environ, **offline},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        messages = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = messages[-1] if messages else f"it exited with status {done.returncode}"
        raise CheckpointError(
            f"Optimum cannot export {source}: {reason}",
            "export another checkpoint, or use a model that is already exported",
        )
