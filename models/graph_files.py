"""Where the graphs of a model lie on disk: in a folder of one, of many variants, or of folders of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ..errors import BundleError
from .device_kind import DeviceKind
from .json_file import read_json_object
from .variants import GENAI_CONFIG, choose_graph

_HINT: Final = "give an .onnx file or a model folder"
_DEEPEST: Final = 4
"""Folders below a model folder in which graphs are looked for."""


def find_graph(path: Path, variant: str | None, kind: DeviceKind) -> tuple[Path, Path | None, Path]:
    """The graph meant by a path, the graph of first passes if that is another one, and the configuration's folder.

    Args:
        path: of an .onnx file or a folder.
        variant: which of several graphs in the folder; None for what suits the device best.
        kind: what the model is to run on.

    Raises:
        BundleError: there is no such file, no graph, or none that edge-run runs.
        OSError: the disk does not let it be read.
    """
    try:
        mode = path.stat().st_mode
    except PermissionError:
        raise
    except (OSError, ValueError) as error:  # such as a name that is too long, or holds a zero byte
        raise BundleError(f"{path} does not exist", _HINT) from error
    if stat.S_ISDIR(mode):
        files = _files_below(path)
        if "pipeline" in _decoder_of_genai(path):
            raise BundleError(
                f"{path} is a model cut into stages for an NPU ({GENAI_CONFIG} has a decoder.pipeline)",
                "choose a variant of the model for the CPU",
            )
        named = {folder: name for folder in _folders_of_genai(files) if (name := _named_by_genai(path / folder))}
        chosen = choose_graph(files, variant, kind=kind, named=named, where=str(path))
        graph = path / chosen.graph
        return graph, None if chosen.prefill is None else path / chosen.prefill, _configured(graph, path)
    if not stat.S_ISREG(mode) or path.suffix != ".onnx":
        is_gguf = path.suffix.lower() == ".gguf"
        hint = f"edge-run export {path.name} OUT makes a model folder of it" if is_gguf else _HINT
        raise BundleError(f"{path} is not an .onnx file", hint)
    first = path.with_name(path.name.replace("decoder_with_past_model", "decoder_model"))
    return path, first if first != path and first.is_file() else None, _configured(path, path.parent.parent)


def _files_below(folder: Path) -> list[str]:
    """POSIX paths of the files in a folder and the folders in it."""
    found = []
    for root, folders, names in os.walk(folder):
        below = Path(root).relative_to(folder)
        if len(below.parts) >= _DEEPEST:
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [(below / name).as_posix() for name in names]
    return found


def _folders_of_genai(files: Sequence[str]) -> list[str]:
    return [PurePosixPath(file).parent.as_posix() for file in files if PurePosixPath(file).name == GENAI_CONFIG]


def _named_by_genai(folder: Path) -> str | None:
    """The file name of the decoder's graph, as ONNX Runtime GenAI's configuration in a folder gives it."""
    name = _decoder_of_genai(folder).get("filename")
    return name if isinstance(name, str) else None


def _decoder_of_genai(folder: Path) -> dict[str, Any]:
    """The decoder's section of ONNX Runtime GenAI's configuration in a folder; empty without one."""
    path = folder / GENAI_CONFIG
    said: Any = read_json_object(path, BundleError, "restore it or leave it out") if path.is_file() else {}
    for part in ("model", "decoder"):
        said = said.get(part) if isinstance(said, dict) else None
    return said if isinstance(said, dict) else {}


def _configured(graph: Path, root: Path) -> Path:
    """The folder of a graph's configuration: its own, or where it is in a folder of graphs, the one around that."""
    own = graph.parent
    around = [folder for folder in (own, *own.parents) if folder == own or folder.is_relative_to(root)]
    names = ("config.json", GENAI_CONFIG)
    return next((folder for folder in around if any((folder / name).is_file() for name in names)), own)
