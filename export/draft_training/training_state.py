"""Checkpoints in Hugging Face layout, and the saved state of a training run.

All files are safetensors and JSON, never pickles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from ...models.atomic import write_atomically
from .torch_llama import CausalLM, ModelShape

WEIGHTS_NAME: Final = "model.safetensors"
STATE_TENSORS: Final = "state.safetensors"
STATE_NUMBERS: Final = "state.json"


def write_checkpoint(folder: Path, model: CausalLM, files: Mapping[str, bytes], end_ids: list[int]) -> None:
    """Write a Hugging Face checkpoint; `model.safetensors` is written last.

    Weights are bfloat16. A model that is trained with rounded weights is written with these in float32, since bfloat16
    would change the codes that they stand for.

    Args:
        folder: the folder to write.
        model: the model.
        files: the other files by name, such as `tokenizer.json`.
        end_ids: token ids that end a text.
    """
    dtype = torch.bfloat16 if model.rounding is None else torch.float32
    config = json.dumps(model.shape.to_config(dtype, end_ids), indent=2).encode()
    for name, content in {**files, "config.json": config}.items():
        write_atomically(folder / name, content)
    write_weights(folder, model.stored(), dtype)


def write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write `model.safetensors`, with floating-point tensors in `dtype`."""
    stored = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous().clone()
        for name, tensor in tensors.items()
    }
    write_atomically(folder / WEIGHTS_NAME, save(stored, metadata={"format": "pt"}))


def read_checkpoint(folder: Path, dropout: float = 0.0) -> CausalLM:
    """Read a Hugging Face checkpoint into a float32 model.

    Raises:
        ValueError: the checkpoint is not a llama model with tied embeddings, or has other tensors than its shape.
    """
    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    model = CausalLM(shape, dropout)
    weights = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS_NAME).items()}
    weights.pop("lm_head.weight", None)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{folder / WEIGHTS_NAME} does not fit its config.json: {error}") from error
    return model


def save_state(folder: Path, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Write a training state to one file, so that tensors and numbers always belong together."""
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / STATE_TENSORS, save(flat, metadata={"numbers": json.dumps(numbers)}))
    # A readable copy for people; a resumed run reads the safetensors header only.
    write_atomically(folder / STATE_NUMBERS, json.dumps(numbers, indent=2).encode())


def load_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read the state that `save_state` wrote; None if there is none."""
    path = folder / STATE_TENSORS
    if not path.exists():
        return None
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    numbers: dict[str, Any] = json.loads(header["__metadata__"]["numbers"])
    return load_file(path), numbers
