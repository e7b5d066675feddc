"""A tiny language model that can say yes and no, for tests of scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer

from support.tiny_models import exported, write_checkpoint, write_json

TEMPLATE: Final = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}-\n{% endif %}{% endif %}"
)
"""A chat template with something that only answers without thoughts begin with, as Qwen3's."""


def write_reranker(folder: Path, family: str = "qwen3", seed: int = 13) -> Path:
    """Write a random checkpoint whose tokenizer has a token for `yes` and one for `no`; the bundle is beside it."""
    source = write_checkpoint(folder / "checkpoint", family, seed=seed, max_position_embeddings=1024)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    for number, word in enumerate(("yes", "no")):
        vocabulary[word] = vocabulary.pop(f"<|extra {number}|>")
    added = Tokenizer.from_str(json.dumps(tokenizer))
    added.add_tokens([AddedToken(word, normalized=False) for word in ("yes", "no")])
    added.save(str(source / "tokenizer.json"))
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(source / "tokenizer_config.json", {**settings, "chat_template": TEMPLATE})
    exported(source, folder / "bundle")
    return source
