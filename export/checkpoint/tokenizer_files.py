"""The small files a bundle takes over from its checkpoint: a runtime must be able to read them as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from ...errors import CheckpointError
from ...models.json_file import is_finite, is_whole, shown
from .json_fields import read_json

_AGAIN: Final = "download the checkpoint again"
_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


_SAVE_FAST: Final = "save one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"


def require_tokenizer(folder: Path, vocab_size: int) -> None:
    """Check `folder`/tokenizer.json against the model's vocabulary.

    Raises:
        CheckpointError: it is absent, does not load, or has a token id of `vocab_size` or more.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no tokenizer.json", _SAVE_FAST)
    try:  # the library raises bare Exception for every defect
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} is not a tokenizer: {error}", "download the checkpoint again") from error
    ids = tokenizer.get_vocab(with_added_tokens=True)
    last = max(ids, key=ids.__getitem__, default=None)
    if last is not None and ids[last] >= vocab_size:
        raise CheckpointError(
            f"tokenizer.json has token {last!r} with id {ids[last]}, config.json a vocab_size of {vocab_size}",
            "tokenizer and weights are not of the same model",
        )


def require_config_files(folder: Path, vocab_size: int) -> None:
    """Check what a checkpoint has of tokenizer_config.json, generation_config.json and chat_template.jinja.

    Raises:
        CheckpointError: one is not JSON or not UTF-8, has a setting of the wrong type, or names an end-of-text token
            that the model does not have.
    """
    generation = _read(folder, "generation_config.json")
    for name in _SAMPLING:
        if generation.get(name) is not None and not is_finite(generation[name]):
            raise CheckpointError(f"generation_config.json: {name} must be a number, found {shown(generation[name])}")
    _require_eos(generation, _read(folder, "config.json"), vocab_size)
    _require_texts(_read(folder, "tokenizer_config.json"))
    template = folder / "chat_template.jinja"
    if template.is_file():
        try:
            template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{template} cannot be read: {error}", _AGAIN) from error


def _read(folder: Path, name: str) -> Mapping[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}


def _require_eos(generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> None:
    """What ends a text is asked of generation_config.json first, then of config.json."""
    name = "config.json" if generation.get("eos_token_id") is None else "generation_config.json"
    value = (config if name == "config.json" else generation).get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_whole(token, 0) and token < vocab_size for token in listed):
        raise CheckpointError(
            f"{name}: eos_token_id must be an id, or a list of ids, below {vocab_size}, found {shown(value)}"
        )


def _require_texts(settings: Mapping[str, Any]) -> None:
    for name in _NAMED_TOKENS:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None and not isinstance(text, str):
            raise CheckpointError(f"tokenizer_config.json: {name} must be text, found {shown(token)}")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry.get("template") for entry in template if isinstance(entry, dict)]
        template = None if all(text is None or isinstance(text, str) for text in named) else named
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"tokenizer_config.json: chat_template must be text, found {shown(template)}")
