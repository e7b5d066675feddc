"""Finds the graph of a model on disk, also among several variants."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ..errors import BundleError
from .json_file import read_json_object
from .manifest import DeviceKind
from .variants import GENAI_CONFIG, choose_graph

_HINT: Final = "give an .onnx file or a model folder"
_MAX_DEPTH: Final = 4
"""Levels of folders below a model folder that are searched for graphs."""
_MAX_ENTRIES: Final = 10_000
"""Files and folders that are looked at; a repository with every variant of a model has a few hundred."""


def find_graph(path: Path, variant: str | None, kind: DeviceKind) -> tuple[Path, Path | None, Path]:
    """Find the graph of a model.

    Args:
        path: path of an .onnx file or a folder.
        variant: name of one of several graphs in the folder; None for the one that suits the device best.
        kind: kind of device that the model will run on.

    Returns:
        The graph, the graph for passes without a cache if that is another one, and the configuration's folder.

    Raises:
        BundleError: the path does not exist, or holds no graph that edge-run can run.
        OSError: the path cannot be read.
    """
    try:
        mode = path.stat().st_mode
    except PermissionError:
        raise
    except (OSError, ValueError) as error:  # for example a name that is too long or contains a zero byte
        raise BundleError(f"{path} does not exist", _HINT) from error
    if stat.S_ISDIR(mode):
        files = files_below(path)
        if "pipeline" in genai_decoder(path / GENAI_CONFIG):
            raise BundleError(
                f"{path} is a model cut into stages for an NPU ({GENAI_CONFIG} has a decoder.pipeline)",
                "choose a variant of the model for the CPU",
            )
        folders = [PurePosixPath(file).parent.as_posix() for file in files if PurePosixPath(file).name == GENAI_CONFIG]
        names = {folder: genai_decoder(path / folder / GENAI_CONFIG).get("filename") for folder in folders}
        named = {folder: name for folder, name in names.items() if name and isinstance(name, str)}
        chosen = choose_graph(files, variant, kind=kind, named=named, where=str(path))
        graph = path / chosen.graph
        return graph, None if chosen.prefill is None else path / chosen.prefill, _configuration_folder(graph, path)
    if not stat.S_ISREG(mode) or path.suffix != ".onnx":
        is_gguf = path.suffix.lower() == ".gguf"
        hint = f"edge-run export {path.name} OUT makes a model folder of it" if is_gguf else _HINT
        raise BundleError(f"{path} is not an .onnx file", hint)
    first = path.with_name(path.name.replace("decoder_with_past_model", "decoder_model"))
    return path, first if first != path and first.is_file() else None, _configuration_folder(path, path.parent.parent)


def files_below(folder: Path) -> list[str]:
    """List the POSIX paths of the files in a folder and its subfolders, level by level.

    Of a folder with very many entries only the levels above them are listed.

    Raises:
        BundleError: there are very many entries, and no graph above them.
    """
    found: list[str] = []
    level = [PurePosixPath()]
    seen = 0
    for _ in range(_MAX_DEPTH + 1):
        files: list[str] = []
        below: list[PurePosixPath] = []
        for parent in level:
            for name, is_folder in _entries(folder / parent):
                seen += 1
                if seen > _MAX_ENTRIES:
                    if any(each.endswith(".onnx") for each in found):
                        return found
                    raise BundleError(
                        f"{folder} holds over {_MAX_ENTRIES} files and folders", "give the model's own folder"
                    )
                if not is_folder:
                    files.append((parent / name).as_posix())
                elif not name.startswith("."):
                    below.append(parent / name)
        found += files
        level = below
    return found


def _entries(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield the name of every file, and of every folder with True; links to folders are left out."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder or not os.path.isdir(entry.path):
                yield entry.name, is_folder


def genai_decoder(path: Path, hint: str = "restore it or leave it out") -> dict[str, Any]:
    """Read the decoder section of a genai_config.json; empty without one.

    Raises:
        BundleError: the file cannot be read or is not a JSON object.
    """
    section: Any = read_json_object(path, BundleError, hint) if path.is_file() else {}
    for name in ("model", "decoder"):
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def _configuration_folder(graph: Path, root: Path) -> Path:
    """Return the folder of a graph's configuration: the graph's own, or one above it, up to `root`."""
    own = graph.parent
    candidates = [folder for folder in (own, *own.parents) if folder == own or folder.is_relative_to(root)]
    names = ("config.json", GENAI_CONFIG)
    return next((folder for folder in candidates if any((folder / name).is_file() for name in names)), own)
