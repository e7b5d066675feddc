"""A model of another exporter: its graph, settings and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ...errors import BundleError
from ...models.bundle import TOKENIZER_AND_CONFIG_FILES
from ...models.device_kind import DeviceKind
from ...models.find import find_model
from ...models.graph_files import files_below, find_graph
from ...models.json_file import is_whole, read_json_object
from ...models.manifest import MIN_CONTEXT
from ...models.variants import GENAI_CONFIG

_TOKENIZER: Final = "tokenizer.json"
_GENERATION: Final = "generation_config.json"
_TOKEN_SETTINGS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
_SAMPLING_SETTINGS: Final = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
_RESTORE: Final = "restore it, or copy the whole model again"


@dataclass(frozen=True)
class ForeignModel:
    """A graph, and the folders of its settings and tokenizer, which may be the one above."""

    graph: Path
    """The .onnx file."""
    configured: Path
    """Folder of config.json or genai_config.json."""
    folder: Path
    """Folder of the tokenizer."""

    def file(self, name: str) -> Path | None:
        """Path of a file beside the graph or its settings; None if there is none."""
        places = (self.graph.parent, self.configured, self.folder)
        return next((folder / name for folder in places if (folder / name).is_file()), None)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Contents of config.json; empty if there is none. Multimodal models have the decoder's under `text_config`."""
        config = self._settings("config.json")
        text = config.get("text_config")
        return {**config, **text} if isinstance(text, dict) else config

    @cached_property
    def genai(self) -> Mapping[str, Any]:
        """The `model` section of genai_config.json; empty if there is none."""
        model = self._settings(GENAI_CONFIG).get("model")
        return model if isinstance(model, dict) else {}

    @property
    def input_names(self) -> Mapping[str, str]:
        """Names of the graph's inputs in genai_config.json, by their usual names."""
        decoder = self.genai.get("decoder")
        inputs = decoder.get("inputs") if isinstance(decoder, dict) else None
        listed = inputs if isinstance(inputs, dict) else {}
        return {usual: name for usual, name in listed.items() if isinstance(name, str)}

    @property
    def family(self) -> str:
        """Model type; "unknown" if no settings file names it."""
        for value in (self.config.get("model_type"), self.genai.get("type")):
            if isinstance(value, str) and value:
                return value
        return "unknown"

    @property
    def longest_context(self) -> int | None:
        """Largest number of positions according to the settings; None if they do not say it."""
        for value in (
            self.config.get("max_position_embeddings"),
            self.config.get("n_positions"),
            self.genai.get("context_length"),
        ):
            if is_whole(value, MIN_CONTEXT):
                return int(str(value))
        return None

    @property
    def kv_heads(self) -> int | None:
        """Number of key-value heads according to the settings; None if they do not say it."""
        decoder = self.genai.get("decoder")
        for value in (
            self.config.get("num_key_value_heads"),
            decoder.get("num_key_value_heads") if isinstance(decoder, dict) else None,
            self.config.get("num_attention_heads"),
        ):
            if is_whole(value, 1):
                return int(str(value))
        return None

    @property
    def head_dim(self) -> int | None:
        """Channels of a head according to the settings; None if they do not say it."""
        decoder = self.genai.get("decoder")
        for value in (self.config.get("head_dim"), decoder.get("head_size") if isinstance(decoder, dict) else None):
            if is_whole(value, 1):
                return int(str(value))
        width, heads = self.config.get("hidden_size"), self.config.get("num_attention_heads")
        return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None

    def copy_config_files(self, folder: Path) -> None:
        """Copy tokenizer and config files.

        Stop tokens that only genai_config.json names are added to generation_config.json.

        Raises:
            BundleError: a settings file cannot be read.
            OSError: the disk refused a write.
        """
        for name in TOKENIZER_AND_CONFIG_FILES:
            path = self.file(name)
            if path is not None:
                shutil.copyfile(path, folder / name)
        generation = self._settings(_GENERATION)
        if generation.get("eos_token_id") is not None or not self.genai:
            return
        search = self._settings(GENAI_CONFIG).get("search")
        found = {name: self.genai[name] for name in _TOKEN_SETTINGS if self.genai.get(name) is not None}
        if not generation and isinstance(search, dict):
            found |= {name: search[name] for name in _SAMPLING_SETTINGS if search.get(name) is not None}
        text = json.dumps({**found, **generation}, indent=2) + "\n"
        (folder / _GENERATION).write_text(text, encoding="utf-8")

    def _settings(self, name: str) -> dict[str, Any]:
        path = self.file(name)
        return {} if path is None else read_json_object(path, BundleError, _RESTORE)


def find_foreign_model(source: Path) -> ForeignModel:
    """Find the graph in `source`, and the folders of its settings and tokenizer.

    Args:
        source: an .onnx file, a folder, or a folder with the name of a variant (`folder:q4`).

    Raises:
        BundleError: there is no graph, no single best one, or no tokenizer with it.
    """
    try:
        graph, _, configured = find_graph(find_model(source), None, DeviceKind.CPU)
    except OSError as error:
        raise BundleError(f"{source} cannot be read: {error.strerror or error}", "check its permissions") from error
    folders = (configured, graph.parent, graph.parent.parent)
    folder = next((each for each in folders if (each / _TOKENIZER).is_file()), None)
    if folder is None:
        raise BundleError(
            f"there is no {_TOKENIZER} beside {graph}", "put the model's tokenizer and config.json beside it"
        )
    return ForeignModel(graph, configured, folder)


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
