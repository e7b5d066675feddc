"""Control vectors: reads llama.cpp's GGUF files of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import CheckpointError
from ...models.gguf_header import AGAIN, read_gguf_header
from ...models.safetensors_file import read_bytes, require_finite
from .steered_model import Array, control

_DIRECTION: Final = re.compile(r"direction\.([1-9]\d{0,4})")
_FLOAT32: Final = 0
"""Number of the tensor type in ggml."""


def read_control_vector(path: Path, layers: int, hidden_size: int) -> dict[str, Array]:
    """Read a control vector, whose tensor `direction.N` is added to the output of layer N, counted from 0.

    Args:
        path: the GGUF file.
        layers: number of layers of the model.
        hidden_size: size of its hidden states.

    Returns:
        The inputs of the graph that it sets.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or is not a control vector for the model.

    Source: llama.cpp, common/common.cpp and src/llama-adapter.cpp.
    """
    inputs: dict[str, Array] = {}
    for name, stored in read_gguf_header(path).tensors.items():
        found = _DIRECTION.fullmatch(name)
        if found is None or int(found[1]) >= layers or stored.shape != (hidden_size,) or stored.type != _FLOAT32:
            what = f"{path} has {name} of the shape {list(stored.shape)} and type {stored.type}"
            hint = (
                f"control vectors for this model have direction.1 to direction.{layers - 1}, {hidden_size} float32 each"
            )
            raise CheckpointError(what, hint)
        values = read_bytes(stored.file, stored.offset, 4 * hidden_size, name, AGAIN).view("<f4")
        inputs[control(int(found[1]))] = require_finite(name, values.astype(np.float32), AGAIN)
    return inputs
