"""genai_config.json, the settings file of ONNX Runtime GenAI."""

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
"""Families that GenAI supports by their model_type; others use the type `decoder`."""
_SAMPLING_SETTINGS: Final = ("temperature", "top_k", "top_p", "repetition_penalty")


def genai_config(folder: Path, config: DecoderConfig, context: int, inputs: Sequence[str]) -> dict[str, Any]:
    """Return the settings; special tokens and sampling come from the files of the checkpoint.

    Args:
        folder: holds config.json, tokenizer.json and, where the checkpoint has them, generation_config.json and
            tokenizer_config.json.
        config: the model's architecture.
        context: number of positions that the graph serves.
        inputs: names of the graph's inputs.
    """
    generation = _settings_of(folder / "generation_config.json")
    tokens = _settings_of(folder / "config.json") | generation
    pass_inputs = [name for name in inputs if not name.startswith("past_key_values.")]
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
                    **{name: name for name in pass_inputs},
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
            # The graph writes new keys and values into the buffers that it is given.
            "past_present_share_buffer": True,
            **{name: generation[name] for name in _SAMPLING_SETTINGS if is_finite(generation.get(name))},
        },
    }


def _special_tokens(tokens: Mapping[str, Any], end_of_turn: int | None) -> dict[str, int | list[int]]:
    """Return special token ids by GenAI's names. GenAI reads a missing id as 0, so an end-of-text id replaces it."""
    ends = _ids(tokens.get("eos_token_id"))
    if end_of_turn is not None and end_of_turn not in ends:
        ends.append(end_of_turn)
    special: dict[str, int | list[int]] = {}
    if ends:
        special["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for name in ("bos_token_id", "pad_token_id"):
        if ids := _ids(tokens.get(name)) or ends:
            special[name] = ids[0]
    return special


def _end_of_turn(folder: Path) -> int | None:
    """Return the id of the tokenizer's end token, which ends a turn where config.json has another end-of-text id."""
    eos_token = _settings_of(folder / "tokenizer_config.json").get("eos_token")
    text = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    if not isinstance(text, str):
        return None
    token_id: int | None = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(text)
    return token_id


def _ids(value: Any) -> list[int]:
    """Return a list of token ids from one id or a list."""
    return [int(token) for token in (value if isinstance(value, list) else [value]) if is_whole(token, 0)]


def _settings_of(path: Path) -> dict[str, Any]:
    """Return the settings of a JSON file without null values; empty if the file does not exist."""
    if not path.is_file():
        return {}
    return {name: value for name, value in read_json(path).items() if value is not None}
