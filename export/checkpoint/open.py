"""A model to export, opened and found complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..gguf import is_gguf, open_gguf
from .config import DecoderConfig, read_config
from .layout import expected_tensors
from .safetensors_files import Checkpoint
from .source import ModelSource
from .tokenizer_files import require_config_files, require_tokenizer


@contextmanager
def open_source(source: Path) -> Iterator[tuple[DecoderConfig, ModelSource]]:
    """A model to export, with everything there that is needed.

    Raises:
        CheckpointError: it is damaged, incomplete or not supported.
    """
    if not is_gguf(source):
        yield _complete(read_config(source), Checkpoint(source))
        return
    with open_gguf(source) as model:
        yield _complete(read_config(model.folder), model)


def _complete(config: DecoderConfig, checkpoint: ModelSource) -> tuple[DecoderConfig, ModelSource]:
    for name, shape in expected_tensors(config):
        checkpoint.require(name, shape)
    require_tokenizer(checkpoint.folder, config.vocab_size)
    require_config_files(checkpoint.folder, config.vocab_size)
    return config, checkpoint
