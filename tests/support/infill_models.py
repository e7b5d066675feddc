"""Tiny models with tokens for filling in the middle: one of random weights, and one whose suggestions are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken

from support.scripted_model import write_scripted_bundle
from support.tiny_models import exported, tiny_tokenizer, write_checkpoint

QWEN: Final = (
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    "<|endoftext|>",
)
"""The tokens of Qwen2.5-Coder; its tokenizer says that all but the last are not special."""
SUGGESTION: Final = ("return", " a + b", "\n")
"""The pieces of the suggestion of `write_suggesting_bundle`, behind which the model goes on with the next file."""


def write_infill_bundle(folder: Path, **overrides: Any) -> Path:
    """Write a bundle of random weights with the tokens of Qwen2.5-Coder; `overrides` are those of its config.json."""
    source = write_checkpoint(folder / "checkpoint", vocab_size=310, **overrides)
    tokenizer = tiny_tokenizer(300)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in QWEN])
    tokenizer.save(str(source / "tokenizer.json"))
    return exported(source, folder / "bundle")


def write_suggesting_bundle(folder: Path) -> Path:
    """Write a bundle that fills every gap with `SUGGESTION`, and then begins another file."""
    chat = {"<|assistant|>": ["I", " complete", " texts", " only", " and", " nothing", " else"]}
    scripts = {"<|fim_middle|>": [*SUGGESTION, "<|file_sep|>", "junk"], **chat}
    return write_scripted_bundle(folder, scripts, "<|assistant|>", QWEN)
