"""Reading safetensors weights of a checkpoint folder, some rows at a time.

An export should need memory only for a part of one tensor.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError
from ...models.json_file import shown
from ...models.manifest import Method, WeightFormat
from ...models.safetensors_file import DOWNLOAD_AGAIN, ITEM_BYTES, SafetensorsTensor, read_safetensors, require_finite
from ..quantization.methods import QUANTIZERS
from .json_fields import read_json
from .source import Float32Array, ModelSource, QuantizedRows, RowRange, ranges_of_rows

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_INTEGERS: Final[Mapping[str, np.dtype[np.signedinteger[Any]]]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4")}
"""Types of integer tensors."""
_NESTED: Final = (("", "language_model."), ("model.", "model.language_model."), ("model.", "model.text_model."))
"""Prefixes of standard names, and what language models in multimodal ones have instead."""
_MXFP4: Final = ("_blocks", "_scales")
"""Suffixes of the tensors with MXFP4 codes and scales.

Codes are [experts, N, K / 32, 16], the first of two in the low nibble of a byte, and scales [experts, N, K / 32]: a
weight is one of sixteen values times 2 ** (scale - 127). Source: OCP Microscaling Formats 1.0.
"""
_FP4_VALUES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4: Final = np.concatenate([_FP4_VALUES, -_FP4_VALUES])
"""The value of each FP4 code; the highest bit is the sign."""
_EXPONENT_BIAS: Final = 127
_EXPERT: Final = re.compile(
    r"(?P<module>.+)\.experts\.(?P<expert>[0-9]{1,6})\.(?P<projection>gate|up|down)_proj\.weight"
)


class Checkpoint(ModelSource):
    """The tensors of a checkpoint folder by name, converted to float32."""

    def __init__(
        self, folder: Path, renamed: Sequence[tuple[str, str]] | None = None, single_file: str = SINGLE_FILE
    ) -> None:
        """Read the headers of all weight files, without the weights.

        Args:
            folder: The checkpoint.
            renamed: Prefixes of tensor names, and those that such names have instead in the files; the first that fits
                applies. None for a language model, whose prefixes are found out.
            single_file: Name of the file with all weights, unless they are in several.

        Raises:
            CheckpointError: the folder has no safetensors weights, or a file is missing, truncated or malformed.
        """
        self.folder = folder
        self._tensors: dict[str, SafetensorsTensor] = {}
        for file in _weight_files(folder, single_file):
            self._tensors.update(read_safetensors(file))
        self._renamed: Final = renamed is not None
        self._prefixes = (_prefixes(self._tensors),) if renamed is None else tuple(renamed)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor exists with that shape and a float type."""
        if self.shape(name) != shape:
            raise CheckpointError(
                f"{name} has shape {list(self.shape(name))}, but config.json implies {list(shape)}",
                "config.json and the weights belong to different models",
            )
        dtype = "BF16" if self.has(f"{name}{_MXFP4[0]}") else self._find(name).dtype
        if dtype not in ITEM_BYTES:
            raise CheckpointError(
                f"{name} has type {dtype}", "supported are F32, F16 and BF16: export the float checkpoint"
            )

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return self._stored_name(name) in self._tensors

    def has_any(self, prefix: str) -> bool:
        """Whether the name of some tensor in the files begins like that."""
        return any(name.startswith(prefix) for name in self._tensors)

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """Read a whole tensor of integers.

        Raises:
            CheckpointError: it does not exist, is of another type or cannot be read.
        """
        tensor = self._find(name)
        if tensor.dtype not in _INTEGERS:
            raise CheckpointError(f"{name} has type {tensor.dtype}, not integers", DOWNLOAD_AGAIN)
        dtype = _INTEGERS[tensor.dtype]
        raw = tensor.read(name, 0, math.prod(tensor.shape) * dtype.itemsize)
        values: npt.NDArray[np.int64] = raw.view(dtype).astype(np.int64).reshape(tensor.shape)
        return values

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; for stacked experts, of the matrix of all experts."""
        if (stack := self._stack(name)) is None:
            return self._find(name).shape
        experts, rows, columns = stack
        return experts * rows, columns

    def read(self, name: str) -> Float32Array:
        """Read a whole tensor as float32."""
        tensor = self._find(name)
        return tensor.items(name, 0, math.prod(tensor.shape)).reshape(tensor.shape)

    def read_rows(self, rows: RowRange) -> Float32Array:
        """Read rows of a matrix as float32."""
        if self.has(f"{rows.name}{_MXFP4[0]}"):
            return require_finite(rows.name, self._mxfp4_rows(rows), DOWNLOAD_AGAIN)
        tensor, stack = self._find(rows.name), self._stack(rows.name)
        if stack is None:
            columns = tensor.shape[1]
            count = (rows.stop - rows.start) * columns
            return tensor.items(rows.name, rows.start * columns, count).reshape(-1, columns)
        _, height, columns = stack
        first, last = rows.start // height, -(-rows.stop // height)
        elements = tensor.items(rows.name, first * height * columns, (last - first) * height * columns)
        matrices = elements.reshape(-1, columns, height).transpose(0, 2, 1).reshape(-1, columns)
        return np.ascontiguousarray(matrices[rows.start - first * height : rows.stop - first * height])

    def row_ranges(self, name: str) -> Iterator[RowRange]:
        """Yield single experts where a float tensor stacks them, else ranges of about a million weights."""
        stack = None if self.has(f"{name}{_MXFP4[0]}") else self._stack(name)
        if stack is None:
            return ranges_of_rows(name, *self.shape(name))
        experts, rows, _ = stack
        return (RowRange(name, expert * rows, (expert + 1) * rows) for expert in range(experts))

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        """Quantize rows of a matrix by the method of the format."""
        return QUANTIZERS[weight_format.method or Method.RTN](self.read_rows(rows), weight_format, None)

    def _stack(self, name: str) -> tuple[int, int, int] | None:
        """Experts of a layer, rows and columns of each, if a tensor stacks them as gpt-oss does; else None.

        Float tensors have shape [experts, K, N], so each expert is transposed.
        """
        if self.has(f"{name}{_MXFP4[0]}"):
            blocks, scales = (self._find(f"{name}{suffix}") for suffix in _MXFP4)
            valid = len(blocks.shape) == 4 and blocks.shape[3] == 16 and scales.shape == blocks.shape[:3]
            if not valid or (blocks.dtype, scales.dtype) != ("U8", "U8"):
                raise CheckpointError(f"{name} does not have the MXFP4 layout of gpt-oss", DOWNLOAD_AGAIN)
            experts, rows, row_blocks, _ = blocks.shape
            return experts, rows, 32 * row_blocks
        tensor = self._find(name)
        # A tensor of stacked experts is named like a module, a convolution's kernels like a weight.
        if len(tensor.shape) != 3 or name.endswith(".weight") or tensor.dtype not in ITEM_BYTES:
            return None
        experts, columns, rows = tensor.shape
        return experts, rows, columns

    def _mxfp4_rows(self, rows: RowRange) -> Float32Array:
        columns, count = self.shape(rows.name)[1], rows.stop - rows.start
        codes, exponents = (
            self._find(f"{rows.name}{suffix}").read(rows.name, rows.start * width, count * width)
            for suffix, width in zip(_MXFP4, (columns // 2, columns // 32), strict=True)
        )
        weights: Float32Array = _FP4[np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, 32)]
        with np.errstate(over="ignore"):  # the caller checks the result for NaN and infinity
            scaled = np.ldexp(weights, exponents.astype(np.int32)[:, None] - _EXPONENT_BIAS)
        return scaled.reshape(-1, columns)

    def _stored_name(self, name: str) -> str:
        for standard, stored in self._prefixes:
            if name.startswith(standard):
                return stored + name.removeprefix(standard)
        return name

    def _find(self, name: str) -> SafetensorsTensor:
        tensor = self._tensors.get(self._stored_name(name)) or self._one_expert(name)
        if tensor is None:
            shown_name = self._stored_name(name) if self._renamed else name
            raise CheckpointError(
                f"{self.folder} lacks the tensor {shown_name}", "the checkpoint is incomplete: " + DOWNLOAD_AGAIN
            )
        return tensor

    def _one_expert(self, name: str) -> SafetensorsTensor | None:
        """The matrix of one expert, such as `mlp.experts.3.up_proj.weight`, in a tensor of all experts of a layer.

        Those of Qwen3.5 and Granite have shape [experts, N, K], with the rows of gate above those of up, so that the
        matrix of each expert lies in one piece. None for other names, and where there is no such tensor.
        """
        if (found := _EXPERT.fullmatch(self._stored_name(name))) is None:
            return None
        module, expert, projection = found["module"], int(found["expert"]), found["projection"]
        parts, stored = (1, ("down", "output")) if projection == "down" else (2, ("gate_up", "input"))
        names = (f"{module}.experts.{stored[0]}_proj", f"{module}.{stored[1]}_linear.weight")
        stack = next((self._tensors[each] for each in names if each in self._tensors), None)
        if stack is None or len(stack.shape) != 3 or stack.dtype not in ITEM_BYTES:
            return None
        experts, all_rows, columns = stack.shape
        rows, rest = divmod(all_rows, parts)
        if rest or expert >= experts:
            return None
        start = (expert * parts + (projection == "up")) * rows * columns * ITEM_BYTES[stack.dtype]
        return SafetensorsTensor(stack.file, stack.dtype, (rows, columns), stack.offset + start)


def _prefixes(names: Collection[str]) -> tuple[str, str]:
    """Return a prefix of the standard tensor names, and the prefix that these names have instead."""
    # Multimodal models contain a language model, with different prefixes before and after transformers 4.52.
    for standard, stored in _NESTED:
        if any(name.startswith(f"{stored}{'' if standard else 'model.'}layers.") for name in names):
            return standard, stored
    # Base models are sometimes saved without the prefix `model.`.
    wrapped = any(name.startswith("model.") for name in names)
    return "model.", "model." if wrapped else ""


def _weight_files(folder: Path, single_file: str) -> list[Path]:
    if (folder / single_file).is_file():
        return [folder / single_file]
    if (index := folder / INDEX_FILE).is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map", DOWNLOAD_AGAIN)
        names = sorted(set(weight_map.values()))
        for name in names:
            if PureWindowsPath(name).name != name:  # Windows paths split at the separators of every system
                raise CheckpointError(f"{index} names a file outside the checkpoint: {shown(name)}", DOWNLOAD_AGAIN)
        for name in names:
            if not os.path.isfile(folder / name):  # Path.is_file raises for names that are too long
                raise CheckpointError(f"shard {name} is missing from {folder}", DOWNLOAD_AGAIN)
        return [folder / name for name in names]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise CheckpointError(
            f"{folder} only contains pickled weights, which can run code when opened",
            "save the checkpoint as safetensors (save_pretrained with safe_serialization=True)",
        )
    raise CheckpointError(f"{folder} does not contain {single_file}", "give the folder of a Hugging Face checkpoint")
