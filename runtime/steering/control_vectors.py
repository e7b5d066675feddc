"""Control vectors: made from pairs of prompts, read from and written to GGUF files as llama.cpp's."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import CheckpointError
from ...models.atomic import write_atomically
from ...models.bundle import Bundle
from ...models.gguf_header import AGAIN, read_gguf_header
from ...models.safetensors_file import read_bytes, require_finite
from ..decode import check_prompt_fits
from ..graph.model_metadata import metadata_of
from ..graph.session import GraphSession, SessionConfig
from ..prefill import prefill
from .steered_model import Array, SteeredModel, control, state

_DIRECTION: Final = re.compile(r"direction\.([1-9]\d{0,4})")
_FLOAT32: Final = 0
"""Number of the tensor type in ggml."""
_UINT32, _STRING = 4, 8
"""Numbers of value types in GGUF."""
_ALIGNMENT: Final = 32


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
    tensors = read_gguf_header(path).tensors
    if not tensors:
        raise CheckpointError(f"{path} has no tensors", AGAIN)
    for name, stored in tensors.items():
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


def mean_differences(
    bundle: Bundle, config: SessionConfig, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> dict[int, Array]:
    """Measure a control vector: the mean difference of the hidden states after each layer over pairs of prompts.

    Args:
        bundle: the model.
        config: how to run it, on the CPU.
        pairs: token ids of prompts, at least one pair: of the direction to steer in, and of the opposite one. What
            counts are the states at the last token (Turner et al. 2023; Rimsky et al. 2024).

    Returns:
        Float32 `[hidden]` by layer, from 1 on. It is not normalized: with strength 1 an answer is moved as far as the
        prompts are apart.

    Raises:
        ContextError: a prompt does not fit the context.
        EdgeError: ONNX Runtime failed.
        InputError: a prompt is empty, or edge-run has not exported the model.
    """
    model = SteeredModel(bundle, bundle.graph)
    size, serialized = model.size, model.serialized((), vectors=True, states=True)
    session = GraphSession(bundle.graph, config, metadata_of(bundle), model=serialized)
    bound = session.bind(session.arena(size.context))
    found = {layer: np.zeros((1, 1, size.hidden_size), np.float32) for layer in range(size.layers)}
    totals = np.zeros((size.layers, size.hidden_size), np.float64)
    for layer, array in found.items():
        bound.observe(state(layer), array)
    for pair in pairs:
        for prompt, sign in zip(pair, (1, -1), strict=True):
            check_prompt_fits(prompt, size.context)
            bound.arena.rewind_to(0)
            prefill(bound, prompt)
            for layer, array in found.items():
                totals[layer] += sign * array[0, 0]
    return {layer: (totals[layer] / len(pairs)).astype(np.float32) for layer in range(1, size.layers)}


def write_control_vector(path: Path, directions: Mapping[int, Array]) -> None:
    """Write a control vector as llama.cpp's cvector-generator does.

    Raises:
        OSError: the file cannot be written.
    """

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    keys = [string("general.architecture") + struct.pack("<I", _STRING) + string("controlvector")]
    keys.append(string("controlvector.layer_count") + struct.pack("<II", _UINT32, len(directions)))
    entries, data = [], b""
    for layer, direction in sorted(directions.items()):
        entries.append(string(f"direction.{layer}") + struct.pack("<IQIQ", 1, direction.size, _FLOAT32, len(data)))
        data += direction.astype("<f4").tobytes()
        data += bytes(-len(data) % _ALIGNMENT)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(keys)) + b"".join([*keys, *entries])
    write_atomically(path, header + bytes(-len(header) % _ALIGNMENT) + data)
