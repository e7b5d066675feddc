"""Trains the model in tests/support/infill-model: `python tests/support/train_infill_model.py`, with PyTorch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from edgerun.export.draft_training.torch_llama import CausalLM, ModelShape
from edgerun.export.draft_training.training_loop import write_checkpoint
from support.infill_grammar import TRAINING, hole, tokenizer

FOLDER: Final = Path(__file__).with_name("infill-model")
_SHAPE: Final = ModelShape(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
)
_BATCH: Final = 32
_STEPS: Final = len(TRAINING) // _BATCH
_RATE: Final = 5e-3


def batch(library: Tokenizer, first_seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of programs with a hole, int64 [B, T], and the weight of each token in the loss, float32 [B, T]."""
    rows, weights = [], []
    for seed in range(first_seed, first_seed + _BATCH):
        prefix, line, suffix = hole(seed)
        given = library.encode(f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>").ids
        filled = library.encode(f"{line}<|endoftext|>").ids
        rows.append([*given, *filled])
        weights.append([0.05] * len(given) + [1.0] * len(filled))
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return ids, torch.tensor([row + [0.0] * (length - len(row)) for row in weights])


def main() -> None:
    """Train and write."""
    torch.manual_seed(1)
    library, model = tokenizer(), CausalLM(_SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(_STEPS):
        ids, weights = batch(library, step * _BATCH)
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / _STEPS))
        losses = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights[:, 1:].flatten()).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            print(f"{step + 1} steps, loss {loss.item():.4f}", flush=True)
    files = {
        "tokenizer.json": library.to_str(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>"}),
        "generation_config.json": json.dumps({"eos_token_id": 0, "do_sample": False}),
    }
    write_checkpoint(FOLDER, model, {name: text.encode() for name, text in files.items()}, [0])


if __name__ == "__main__":
    main()
