"""Checkpoints of the recipe: Hugging Face folders with its tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from ..export.draft_training.torch_llama import CausalLM
from ..export.draft_training.training_loop import read_checkpoint, write_checkpoint
from .tokenizer import CHAT_TEMPLATE, ChatCodec, tokenizer_config


def save_model(folder: Path, model: CausalLM, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face folder with the recipe's tokenizer; see `write_checkpoint`."""
    texts = {
        "generation_config.json": json.dumps({"eos_token_id": 0, "pad_token_id": 0, "do_sample": False}, indent=2),
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": tokenizer_config(model.shape.max_position_embeddings),
        "chat_template.jinja": CHAT_TEMPLATE.rstrip("\n"),
    }
    write_checkpoint(folder, model, {name: text.encode() for name, text in texts.items()}, [ChatCodec.end])


def load_model(folder: Path, dropout: float = 0.0) -> tuple[CausalLM, ChatCodec]:
    """Read a Hugging Face folder into a float32 model and its tokenizer."""
    return read_checkpoint(folder, dropout), ChatCodec.from_folder(folder)
