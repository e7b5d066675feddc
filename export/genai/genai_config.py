"""genai_config.json: what ONNX Runtime GenAI has to be told of a model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from ...models.bundle import GRAPH_NAME
from ...models.json_file import is_finite, is_whole
from ..checkpoint.config import DecoderConfig
from ..checkpoint.json_fields import read_json
from ..graph import inputs_outputs

_TYPES: Final = frozenset(
    ("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo", "phi3", "qwen2", "qwen3", "smollm3")
)
"""Families that GenAI knows by their name in config.json; any other is run as a `decoder`."""
_DRAWING: Final = ("temperature", "top_k", "top_p", "repetition_penalty")


def genai_config(folder: Path, config: DecoderConfig, context: int, inputs: Sequence[str]) -> dict[str, Any]:
    """The contents of the file; what ends a text and how text is drawn are as the checkpoint's own files have it.

    Args:
        folder: with config.json, tokenizer.json and, where the checkpoint has them, generation_config.json and
            tokenizer_config.json.
        config: the model's numbers.
        context: positions the graph serves.
        inputs: the graph's.
    """
    generation = _said(folder / "generation_config.json")
    tokens = _said(folder / "config.json") | generation
    texts = [name for name in inputs if not name.startswith("past_key_values.")]
    return {
        "model": {
            "type": config.family if config.family in _TYPES else "decoder",
            **_special_tokens(tokens, _end_of_turn(folder)),
            "vocab_size": config.vocab_size,
            "context_length": context,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": GRAPH_NAME,
                "head_size": config.head_dim,
                "hidden_size": config.hidden_size,
                "num_attention_heads": config.heads,
                "num_hidden_layers": config.layers,
                "num_key_value_heads": config.kv_heads,
                "inputs": {
                    **{name: name for name in texts},
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": inputs_outputs.LOGITS,
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": generation.get("do_sample") is True,
            "max_length": context,
            # The graph writes its rows into the buffers it is given.
            "past_present_share_buffer": True,
            **{name: generation[name] for name in _DRAWING if is_finite(generation.get(name))},
        },
    }


def _special_tokens(tokens: Mapping[str, Any], turn: int | None) -> dict[str, int | list[int]]:
    """Ids by the names GenAI wants. It takes a missing one for 0, so each that is not known is one that ends a text."""
    ends = _ids(tokens.get("eos_token_id"))
    if turn is not None and turn not in ends:
        ends.append(turn)
    named: dict[str, int | list[int]] = {}
    if ends:
        named["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for name in ("bos_token_id", "pad_token_id"):
        if ids := _ids(tokens.get(name)) or ends:
            named[name] = ids[0]
    return named


def _end_of_turn(folder: Path) -> int | None:
    """The tokenizer's own end of text; where the configuration has another, this one ends a chat model's turn."""
    named = _said(folder / "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if not isinstance(text, str):
        return None
    found: int | None = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(text)
    return found


def _ids(listed: Any) -> list[int]:
    """An id, or those in a list."""
    return [int(token) for token in (listed if isinstance(listed, list) else [listed]) if is_whole(token, 0)]


def _said(path: Path) -> dict[str, Any]:
    """The settings of a file, none if there is none; null is as good as absent."""
    if not path.is_file():
        return {}
    return {name: value for name, value in read_json(path).items() if value is not None}
