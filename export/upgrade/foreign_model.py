"""A model of another exporter: its graph, settings and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ...errors import BundleError
from ...models.bundle import TOKENIZER_AND_CONFIG_FILES, Bundle, open_bundle
from ...models.find import find_model
from ...models.graph_files import files_below
from ...models.variants import GENAI_CONFIG

_TOKENIZER: Final = "tokenizer.json"
_GENERATION: Final = "generation_config.json"
_TOKEN_SETTINGS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
_SAMPLING_SETTINGS: Final = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")


def find_foreign_model(source: Path) -> Bundle:
    """Find the graph in `source`, and the folders of its settings and tokenizer.

    Args:
        source: an .onnx file, a folder, or a folder with the name of a variant (`folder:q4`).

    Raises:
        BundleError: there is no graph, no single best one, or no tokenizer with it.
    """
    bundle = open_bundle(find_model(source))
    if bundle.file(_TOKENIZER) is None:
        above = bundle.graph.parent.parent
        if not (above / _TOKENIZER).is_file():
            raise BundleError(
                f"there is no {_TOKENIZER} beside {bundle.graph}", "put the model's tokenizer and config.json beside it"
            )
        bundle = replace(bundle, tokenizer=above)
    return bundle


def holds_graph(source: Path) -> bool:
    """Whether a path is an .onnx file, or a folder that has one and no checkpoint weights.

    Raises:
        BundleError: the path names a variant that its folder does not have, or the folder has very many files.
    """
    source = find_model(source)
    if not source.is_dir():
        return source.suffix == ".onnx"
    if (source / "config.json").is_file() and any(source.glob("*.safetensors")):
        return False
    return any(name.endswith(".onnx") for name in files_below(source))


def family_of(bundle: Bundle) -> str:
    """Model type; "unknown" if no settings file names it."""
    names = (bundle.config.get("model_type"), bundle.genai.get("type"))
    return next((name for name in names if isinstance(name, str) and name), "unknown")


def decoder_inputs(bundle: Bundle) -> Mapping[str, str]:
    """Names of the graph's inputs in genai_config.json, by their usual names."""
    decoder = bundle.genai.get("decoder")
    inputs = decoder.get("inputs") if isinstance(decoder, dict) else None
    return {usual: name for usual, name in inputs.items() if isinstance(name, str)} if isinstance(inputs, dict) else {}


def copy_config_files(bundle: Bundle, folder: Path) -> None:
    """Copy tokenizer and config files.

    Stop tokens that only genai_config.json names are added to generation_config.json.

    Raises:
        BundleError: a settings file cannot be read.
        OSError: the disk refused a write.
    """
    for name in TOKENIZER_AND_CONFIG_FILES:
        path = bundle.file(name)
        if path is not None:
            shutil.copyfile(path, folder / name)
    generation = bundle.json_file(_GENERATION)
    if generation.get("eos_token_id") is not None or not bundle.genai:
        return
    search = bundle.json_file(GENAI_CONFIG).get("search")
    found: dict[str, Any] = {name: bundle.genai.get(name) for name in _TOKEN_SETTINGS}
    if not generation and isinstance(search, dict):
        found |= {name: search.get(name) for name in _SAMPLING_SETTINGS}
    known = {name: value for name, value in found.items() if value is not None}
    (folder / _GENERATION).write_text(json.dumps({**known, **generation}, indent=2) + "\n", encoding="utf-8")
