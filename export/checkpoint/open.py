"""Opens the source of a model and checks that it is complete, with its tokenizer and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ...errors import CheckpointError
from ...models.json_file import is_finite, is_whole, shown
from ...models.regular_file import MAX_JSON_BYTES, read_regular
from ...runtime.text.tokenizer_library import read_tokenizer
from ..gguf import is_gguf, open_gguf
from .config import DecoderConfig, read_config
from .json_fields import read_json
from .layout import expected_tensors, tensor_names
from .safetensors_files import Checkpoint
from .source import ModelSource

_DOWNLOAD_AGAIN: Final = "download the checkpoint again"
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_SAMPLING_SETTINGS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SAVE_TOKENIZER: Final = "save one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"


@contextmanager
def open_source(source: Path) -> Iterator[tuple[DecoderConfig, ModelSource]]:
    """Open a checkpoint folder or a GGUF file until the context ends.

    Yields:
        The model's configuration and its tensors, all of which are present with the right shapes.

    Raises:
        CheckpointError: the model is damaged, incomplete or not supported.
    """
    if not is_gguf(source):
        config = read_config(source)
        yield _check_complete(config, Checkpoint(source, tensor_names(config)))
        return
    with open_gguf(source) as model:
        yield _check_complete(read_config(model.folder), model)


def _check_complete(config: DecoderConfig, checkpoint: ModelSource) -> tuple[DecoderConfig, ModelSource]:
    for name, shape in expected_tensors(config):
        checkpoint.require(name, shape)
    require_tokenizer(checkpoint.folder, config.vocab_size)
    require_config_files(checkpoint.folder, config.vocab_size)
    return config, checkpoint


def require_tokenizer(folder: Path, vocab_size: int) -> None:
    """Check `folder`/tokenizer.json against the model's vocabulary.

    Raises:
        CheckpointError: the file is absent or damaged, or has a token id outside the vocabulary.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} does not contain tokenizer.json", _SAVE_TOKENIZER)
    tokenizer = read_tokenizer(path, lambda why: CheckpointError(f"{path} is not a tokenizer: {why}", _DOWNLOAD_AGAIN))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    last = max(ids, key=ids.__getitem__, default=None)
    if last is not None and ids[last] >= vocab_size:
        raise CheckpointError(
            f"tokenizer.json has token {last!r} with id {ids[last]}, but config.json has vocab_size {vocab_size}",
            "the tokenizer and the weights belong to different models",
        )


def require_config_files(folder: Path, vocab_size: int) -> None:
    """Check tokenizer_config.json, generation_config.json and chat_template.jinja, where the checkpoint has them.

    Raises:
        CheckpointError: a file is not valid JSON or UTF-8, has a setting of the wrong type, or names an end-of-text
            token outside the vocabulary.
    """
    generation = _read_if_present(folder, "generation_config.json")
    for name in _SAMPLING_SETTINGS:
        if generation.get(name) is not None and not is_finite(generation[name]):
            raise CheckpointError(f"generation_config.json: {name} must be a number, found {shown(generation[name])}")
    # The end-of-text ids in generation_config.json take precedence over those in config.json.
    source = "config.json" if generation.get("eos_token_id") is None else "generation_config.json"
    ids = _read_if_present(folder, source).get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(is_whole(token, 0) and token < vocab_size for token in listed):
        raise CheckpointError(
            f"{source}: eos_token_id must be a token id, or a list of token ids, below {vocab_size}, found {shown(ids)}"
        )
    settings = _read_if_present(folder, "tokenizer_config.json")
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None and not isinstance(text, str):
            raise CheckpointError(f"tokenizer_config.json: {name} must be text, found {shown(token)}")
    template = settings.get("chat_template")
    if isinstance(template, list):
        templates = [entry.get("template") for entry in template if isinstance(entry, dict)]
        template = None if all(text is None or isinstance(text, str) for text in templates) else templates
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"tokenizer_config.json: chat_template must be text, found {shown(template)}")
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            read_regular(file, MAX_JSON_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise CheckpointError(f"{file} cannot be read: {reason}", _DOWNLOAD_AGAIN) from error


def _read_if_present(folder: Path, name: str) -> Mapping[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}
