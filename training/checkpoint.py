"""Checkpoints as Hugging Face folders, and the saved state of a training run.

All files are safetensors and JSON, never pickles.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor

from ..models.atomic import write_atomically
from .model import CausalLM, ModelShape
from .tokenizer import CHAT_TEMPLATE, ChatCodec, tokenizer_config

STATE_TENSORS, STATE_NUMBERS = "state.safetensors", "state.json"


def save_model(folder: Path, model: CausalLM, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face folder; `model.safetensors` is written last.

    Weights are bfloat16. A model that is trained with rounded weights is written with these in float32, since bfloat16
    would change the codes that they stand for.
    """
    shape, dtype = model.shape, torch.bfloat16 if model.rounding is None else torch.float32
    generation = {"eos_token_id": 0, "pad_token_id": 0, "do_sample": False}
    texts = {
        "config.json": json.dumps(shape.to_config(dtype), indent=2),
        "generation_config.json": json.dumps(generation, indent=2),
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": tokenizer_config(shape.max_position_embeddings),
        "chat_template.jinja": CHAT_TEMPLATE.rstrip("\n"),
    }
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
    weights = {name: p.to("cpu", dtype).contiguous().clone() for name, p in model.stored().items()}
    write_atomically(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))


def load_model(folder: Path, dropout: float = 0.0) -> tuple[CausalLM, ChatCodec]:
    """Read a Hugging Face folder into a float32 model and its tokenizer."""
    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    model = CausalLM(shape, dropout)
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    weights.pop("lm_head.weight", None)
    model.load_state_dict(weights)
    return model, ChatCodec.from_folder(folder)


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
