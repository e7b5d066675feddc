"""A GGUF file as the source of a model to export."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...errors import CheckpointError, InputError
from ...models.gguf_header import AGAIN, GgufHeader, StoredTensor, read_gguf_header
from ...models.manifest import WeightFormat
from ...models.safetensors_file import read_bytes, require_finite
from ..checkpoint.config import parse_config
from ..checkpoint.layout import expected_tensors
from ..checkpoint.source import Float32Array, ModelSource, QuantizedRows, RowRange, UInt8Array, ranges_of_rows
from ..quantization.codes import nearest_rows
from ..quantization.k_quant import k_quant_rows
from .config_json import ROPE_FACTORS, architecture, config_settings
from .gguf_tokenizer import GgufTokenizer
from .mmproj import Mmproj, find_mmproj
from .tensor_types import TENSOR_TYPES, TensorType, type_name

_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix.lower() == ".gguf"


@contextmanager
def open_gguf(path: Path) -> Iterator[ModelSource]:
    """Open a GGUF file, or the first part of a split model, until the context ends.

    Raises:
        CheckpointError: the file is damaged, or its model is not supported.
        InputError: the `gguf` package is not installed.
    """
    try:
        import gguf.quants  # noqa: F401, PLC0415 -- an extra, imported when used
    except ModuleNotFoundError as error:
        raise InputError(f"GGUF files need the package {error.name}", 'pip install "edge-run[gguf]"') from error
    header = _read_all_parts(path)
    with tempfile.TemporaryDirectory(prefix="edge-run-") as folder:
        model = GgufModel(header, Path(folder))
        model.write_config_files()
        yield model


class GgufModel(ModelSource):
    """The tensors of a GGUF file by their Hugging Face names."""

    def __init__(self, header: GgufHeader, folder: Path) -> None:
        """Map tensor names and settings, without reading weights.

        Raises:
            CheckpointError: the model is not supported, or the file lacks or adds a tensor or a setting.
        """
        self.folder = folder
        self._path, self._header = header.path, header
        self._family = architecture(self._header)
        self._tensors: dict[str, StoredTensor] = {}
        self._gguf_names: dict[str, str] = {}
        embedding, factors = (header.tensors.get(name) for name in ("token_embd.weight", ROPE_FACTORS))
        if embedding is None:
            raise header.missing("token_embd.weight", AGAIN)
        if factors is not None:
            self._tensors[ROPE_FACTORS], self._gguf_names[ROPE_FACTORS] = factors, ROPE_FACTORS
        divisors = None if factors is None else self.read(ROPE_FACTORS)
        self._settings = config_settings(self._header, header.tensors.keys(), embedding.shape[0], divisors)
        self._find_tensors()
        projector = find_mmproj(self._path, self._family)
        self.vision: GgufTower | None = None if projector is None else GgufTower(projector, folder)
        """The vision tower in a file beside this one."""

    def _find_tensors(self) -> None:
        """Find the tensors of the model by the names that llama.cpp's converter gives them."""
        from gguf import MODEL_ARCH, get_tensor_name_map  # noqa: PLC0415 -- an extra, imported when used

        config = parse_config(self._settings)
        modules = get_tensor_name_map(MODEL_ARCH[self._family.upper()], config.layers)
        for name, shape in expected_tensors(config):
            module, _, kind = name.rpartition(".")
            gguf_name = f"{modules.get_name(module)}.{kind}"
            if (tensor := self._header.tensors.get(gguf_name)) is not None:
                is_conv = len(shape) == 3 and len(tensor.shape) == 2
                self._tensors[name] = (
                    tensor._replace(shape=(tensor.shape[0], 1, tensor.shape[1])) if is_conv else tensor
                )
                self._gguf_names[name] = gguf_name
        others = self._header.tensors.keys() - self._gguf_names.values()
        if others:
            raise CheckpointError(
                f"{self._path} holds {min(others)[:60]!r}, "
                f"which is not part of a {self._family} model with {config.layers} layers",
                "export the model's Hugging Face checkpoint instead",
            )

    def write_config_files(self) -> None:
        """Write config.json, tokenizer.json and the other small files of a checkpoint to `folder`.

        Raises:
            CheckpointError: the tokenizer is damaged or not supported.
        """
        vocabulary = GgufTokenizer(self._header, self._settings["vocab_size"])
        tokens = vocabulary.token_ids()
        config = {**self._settings, **tokens}
        if self.vision is not None:
            mmproj = self.vision.mmproj
            config = {**mmproj.seeing_config(config, vocabulary.find(mmproj.placeholder)), **tokens}
            self._write("preprocessor_config.json", mmproj.processor_settings(config))
        self._write("config.json", config)
        self._write("generation_config.json", tokens)
        self._write("tokenizer_config.json", vocabulary.tokenizer_config())
        (self.folder / "tokenizer.json").write_text(vocabulary.tokenizer_json(), encoding="utf-8")
        template = self._header.text("tokenizer.chat_template")
        if template is not None:
            (self.folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor exists with that shape, and that the file is long enough for it."""
        tensor = self._find(name)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self._gguf_names[name]} has shape {list(tensor.shape)}, but the metadata implies {list(shape)}",
                AGAIN,
            )
        self._type_of(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._find(name).shape

    def read(self, name: str) -> Float32Array:
        """Read a whole tensor as float32."""
        shape = self._find(name).shape
        return self.read_rows(RowRange(name, 0, _as_matrix(shape)[0])).reshape(shape)

    def read_rows(self, rows: RowRange) -> Float32Array:
        """Read rows of a matrix, or of a vector as a matrix of one column, as float32."""
        weights = self._type_of(rows.name).decode(self._raw_rows(rows))
        if rows.name.endswith("soft_emb_norm.weight") or (
            self._family == "gemma3" and rows.name.endswith("norm.weight")
        ):
            weights = weights - 1  # llama.cpp stores what Gemma's norms scale by, which is 1 + weight
        return require_finite(self._gguf_names[rows.name], weights, AGAIN)

    def row_ranges(self, name: str) -> Iterator[RowRange]:
        """Yield ranges of about a million weights."""
        return ranges_of_rows(name, *self.shape(name))

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        """The codes of the file where it has them in that format, else the rows quantized anew."""
        tensor_type, name, raw = self._type_of(rows.name), self._gguf_names[rows.name], self._raw_rows(rows)
        stored = tensor_type.codes(raw, weight_format)
        if stored is None:
            weights = require_finite(name, tensor_type.decode(raw), AGAIN)
            return (nearest_rows if weight_format.bits == 8 else k_quant_rows)(weights, weight_format)
        require_finite(name, stored.scales, AGAIN)
        if stored.offsets is not None:
            require_finite(name, stored.offsets, AGAIN)
        return stored

    def stored_format(self, name: str) -> WeightFormat:
        """The format that is nearest to the tensor's type."""
        return self._type_of(name).nearest_format

    def _raw_rows(self, rows: RowRange) -> UInt8Array:
        """Stored bytes of some rows, uint8 [rows, row bytes], in the row order of Hugging Face."""
        counts = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
        count = next((setting for part, setting in counts.items() if part in rows.name), None)
        if self._family != "llama" or count is None:
            return self._stored_rows(rows)
        # Within a head, Hugging Face stores the first channels of all pairs and then the second ones, llama.cpp stores
        # pair after pair. So whole heads are read and their rows are reordered.
        dim = self._find(rows.name).shape[0] // int(self._settings[count])
        first, last = rows.start // dim, -(-rows.stop // dim)
        stored = self._stored_rows(RowRange(rows.name, first * dim, last * dim))
        paired = stored.reshape(last - first, dim // 2, 2, -1).swapaxes(1, 2).reshape(len(stored), -1)
        ordered: UInt8Array = paired[rows.start - first * dim : rows.stop - first * dim]
        return ordered

    def _stored_rows(self, rows: RowRange) -> UInt8Array:
        tensor = self._find(rows.name)
        size = self._type_of(rows.name).row_bytes(_as_matrix(tensor.shape)[1])
        count = (rows.stop - rows.start) * size
        name = self._gguf_names[rows.name]
        return read_bytes(tensor.file, tensor.offset + rows.start * size, count, name, AGAIN).reshape(-1, size)

    def _type_of(self, name: str) -> TensorType:
        """Return the type of a tensor, after checking that the file is long enough for it."""
        tensor, gguf_name = self._find(name), self._gguf_names[name]
        tensor_type = TENSOR_TYPES.get(tensor.type)
        if tensor_type is None:
            raise CheckpointError(
                f"{gguf_name} has type {type_name(tensor.type)}",
                f"supported are {', '.join(known.name for known in TENSOR_TYPES.values())}",
            )
        rows, columns = _as_matrix(tensor.shape)
        if columns % tensor_type.block_weights:
            raise CheckpointError(
                f"{gguf_name} has {columns} columns, "
                f"which is not a multiple of the {tensor_type.name} block size {tensor_type.block_weights}",
                AGAIN,
            )
        if rows * tensor_type.row_bytes(columns) > tensor.available_bytes:
            raise CheckpointError(f"{tensor.file} is truncated: {gguf_name} extends beyond the end of the file", AGAIN)
        return tensor_type

    def _find(self, name: str) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self._path} lacks the tensor {name}", "the file is incomplete: " + AGAIN)
        return tensor

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        text = json.dumps(data, indent=2, ensure_ascii=False)
        (self.folder / name).write_text(text + "\n", encoding="utf-8")


class GgufTower(GgufModel):
    """The tensors of a vision tower in a GGUF file, by their Hugging Face names."""

    def __init__(self, mmproj: Mmproj, folder: Path) -> None:
        """Map tensor names, without reading weights.

        Raises:
            CheckpointError: the file adds a tensor.
        """
        self.folder, self.mmproj = folder, mmproj
        self._path, self._header, self._family = mmproj.header.path, mmproj.header, "clip"
        self._tensors, self._gguf_names = {}, {}
        for gguf_name, tensor in mmproj.header.tensors.items():
            name = mmproj.checkpoint_name(gguf_name)
            self._tensors[name], self._gguf_names[name] = tensor, gguf_name

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor exists with that shape; kernels of patches are one for each frame in the file."""
        if len(shape) < 5:
            super().require(name, shape)
            return
        for each in (name, f"{name}.1")[: shape[2]]:
            super().require(each, (*shape[:2], *shape[3:]))

    def read(self, name: str) -> Float32Array:
        """Read a whole tensor as float32, in the shape that a checkpoint has."""
        weights = super().read(name)
        return np.stack([weights, super().read(f"{name}.1")], axis=2) if f"{name}.1" in self._tensors else weights

    def has_any(self, prefix: str) -> bool:
        """Whether the name of some tensor begins like that."""
        return any(name.startswith(prefix) for name in self._tensors)


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Numbers of rows and columns; a vector counts as one column, so that its elements can be reordered like rows."""
    columns = shape[-1] if len(shape) > 1 else 1
    return math.prod(shape) // columns, columns


def _read_all_parts(path: Path) -> GgufHeader:
    """Read the header of a model, merging the headers of all parts of a split one."""
    first = read_gguf_header(path)
    parts = first.metadata.get("split.count", 1)
    if parts in (0, 1):
        return first
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) != parts or int(named[2]) != 1 or first.metadata.get("split.no") != 0:
        raise CheckpointError(
            f"{path} is one of {str(parts)[:20]} parts", "give the first one, named NAME-00001-of-0000N.gguf"
        )
    tensors = dict(first.tensors)
    for number in range(2, int(named[3]) + 1):
        part = path.with_name(f"{named[1]}-{number:05}-of-{named[3]}{path.suffix}")
        if not part.is_file():
            raise CheckpointError(f"{part.name} is missing from {part.parent}", "download all parts of the model")
        other = read_gguf_header(part)
        if other.metadata.get("split.no") != number - 1 or not tensors.keys().isdisjoint(other.tensors):
            raise CheckpointError(f"{part} is not part {number} of {path.name}", AGAIN)
        tensors.update(other.tensors)
    return GgufHeader(path, first.metadata, tensors)
