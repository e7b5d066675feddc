"""A real model that says what a test wants: every token of its answers determines the next one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Tokenizer

from edgerun.export import FP32, ExportRecipe, export_checkpoint
from support.tiny_models import (
    SPECIAL_TOKENS,
    tiny_config,
    tiny_weights,
    write_checkpoint,
    write_json,
    write_weights,
)

_END: Final = SPECIAL_TOKENS[0]
_HIDDEN: Final = 512


_TEMPLATE: Final = (
    "{# <think></think> <tool_call> #}"
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'user' }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}"
    "{% endfor %}"
    "{% if messages[-1].role == 'tool' %}<|told|>{% elif tools %}<|asked|>{% else %}<|assistant|>{% endif %}"
)
CALLS: Final = [
    "<think>",
    "Paris and Rome",
    "</think>",
    "I look.\n",
    "<tool_call>",
    '{"name": "get_weather", ',
    '"arguments": {"city": ',
    '"Paris"',
    "}}",
    "</tool_call>\n<tool",
    '_call>{"name": "get_weather", "arguments": {"city": "Rome"}}',
    "</tool_call>\n",
]
"""The pieces of an answer with reasoning, text and two calls."""
_SCRIPTS: Final = {
    "<|asked|>": CALLS,
    "<|told|>": ["It is sunny ", "in both."],
    "<|assistant|>": ["No fun", "ctions", ":", " <tool_call>{", '"name"', ": ", '"get_weather"}'],
}
WEATHER: Final[Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def write_calling_bundle(folder: Path, context: int = 2048, template: str = _TEMPLATE) -> Path:
    """Write a bundle that calls `get_weather` twice where it is offered a tool, and then says what the weather is."""
    special = ["<|asked|>", "<|told|>", "<think>", "</think>", "<tool_call>"]
    return write_scripted_bundle(folder, _SCRIPTS, template, special, context)


def write_endless_caller(folder: Path) -> Path:
    """Write a bundle that calls `get_weather` twice, whatever it has been told."""
    asks = _TEMPLATE.replace("{% if messages[-1].role == 'tool' %}<|told|>{% elif tools %}", "{% if tools %}")
    return write_calling_bundle(folder, template=asks)


def write_scripted_bundle(
    folder: Path,
    scripts: Mapping[str, Sequence[str]],
    template: str,
    special: Sequence[str] = (),
    context: int = 2048,
) -> Path:
    """Write a bundle whose answers are given, and return its folder.

    The layers add nothing to the embedding of a token, and the LM head has the next token's row for it.

    Args:
        folder: where to write.
        scripts: pieces of answers, by the last special token of the prompt. Each piece is one token, which no other
            answer has.
        template: the chat template.
        special: further special tokens, which the template or the answers have.
        context: number of tokens of the longest conversation.
    """
    source = write_checkpoint(
        folder / "checkpoint",
        vocab_size=300,
        hidden_size=_HIDDEN,
        tie_word_embeddings=False,
        max_position_embeddings=context,
    )
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    pieces = [piece for script in scripts.values() for piece in script]
    assert len(set(pieces)) == len(pieces)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces if piece not in special])
    tokenizer.save(str(source / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    assert size <= _HIDDEN
    config = tiny_config(
        vocab_size=size, hidden_size=_HIDDEN, tie_word_embeddings=False, max_position_embeddings=context
    )
    tensors = tiny_weights(config)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor[:] = 0.0
    tensors["model.norm.weight"][:] = 1.0
    tensors["model.embed_tokens.weight"][:] = np.eye(size, _HIDDEN)
    head = np.zeros((size, _HIDDEN), np.float32)
    for begin, script in scripts.items():
        chain = [tokenizer.token_to_id(piece) for piece in (begin, *script, _END)]
        for token, following in pairwise(chain):
            head[following, token] = 1.0
    tensors["lm_head.weight"][:] = head
    write_weights(source, tensors)
    write_json(source / "config.json", config)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(source / "tokenizer_config.json", {**settings, "chat_template": template})
    return export_checkpoint(source, folder / "bundle", ExportRecipe(FP32)).bundle
