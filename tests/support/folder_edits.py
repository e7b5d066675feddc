"""Random damage to the files of a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import onnx
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from support.tiny_models import write_json

_JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3000) | st.floats() | st.sampled_from(("", "x", "%d", "input_ids")),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(("a", "decoder", "model")), inner),
    max_leaves=3,
)


class FileEdit(NamedTuple):
    """A change to a folder."""

    change: Callable[..., None]
    arguments: tuple[Any, ...]
    """The arguments of `change` after the folder."""

    def apply(self, folder: Path) -> None:
        self.change(folder, *self.arguments)


def _set_json(folder: Path, setting: tuple[str, Sequence[str]], value: Any) -> None:
    """Set a value in a JSON file, if the file and the object that holds the value exist."""
    file, keys = setting
    try:
        data = json.loads((folder / file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    parent: Any = data
    for key in keys[:-1]:
        parent = parent.get(key) if isinstance(parent, dict) else None
    if isinstance(parent, dict):
        parent[keys[-1]] = value
        write_json(folder / file, data)


_SETTINGS: Final = (
    *(("config.json", (key,)) for key in ("vocab_size", "num_key_value_heads", "num_attention_heads", "head_dim")),
    *(("config.json", (key,)) for key in ("hidden_size", "max_position_embeddings", "eos_token_id", "text_config")),
    *(("genai_config.json", keys) for keys in (("model",), ("model", "decoder"), ("model", "context_length"))),
    *(("genai_config.json", ("model", "decoder", key)) for key in ("inputs", "outputs", "filename", "head_size")),
    *(("genai_config.json", ("model", "decoder", "inputs", key)) for key in ("input_ids", "past_key_names", "x")),
    *(("genai_config.json", ("model", "decoder", "outputs", key)) for key in ("logits", "present_value_names")),
    *(("tokenizer_config.json", (key,)) for key in ("eos_token", "chat_template")),
    ("generation_config.json", ("eos_token_id",)),
)
_FILES: Final = (
    *("model.onnx", "model.onnx_data", "model.onnx.data", "model.onnx_data_1", "config.json", "genai_config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
)


def _cut(folder: Path, file: str, part: float) -> None:
    for path in folder.rglob(file):
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])


def _remove(folder: Path, file: str) -> None:
    for path in folder.rglob(file):
        path.unlink()


def _change_location(folder: Path, location: str) -> None:
    """Change the file name of all external weights of an intact graph."""
    for path in folder.rglob("model.onnx"):
        model = onnx.ModelProto()
        with suppress(DecodeError):
            model.ParseFromString(path.read_bytes())
            for tensor in model.graph.initializer:
                for entry in tensor.external_data:
                    if entry.key == "location":
                        entry.value = location
            path.write_bytes(model.SerializeToString())


def file_edits() -> st.SearchStrategy[FileEdit]:
    """Generate changes to the files of a model folder."""
    places = ("../../etc/passwd", "/etc/passwd", "missing", "", "config.json", ".", "a\0b", "ä")
    edits = (
        (_set_json, st.sampled_from(_SETTINGS), _JSON),
        (_cut, st.sampled_from(_FILES), st.floats(0, 0.999)),
        (_remove, st.sampled_from(_FILES)),
        (_change_location, st.sampled_from(places)),
    )
    return st.one_of(st.builds(FileEdit, st.just(change), st.tuples(*arguments)) for change, *arguments in edits)
