"""Opening the source of a model and checking that it is complete."""

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
    """Open a checkpoint folder or a GGUF file until the context ends.

    Yields:
        The model's configuration and its tensors, all of which are present with the right shapes.

    Raises:
        CheckpointError: the model is damaged, incomplete or not supported.
    """
    if not is_gguf(source):
        yield _check_complete(read_config(source), Checkpoint(source))
        return
    with open_gguf(source) as model:
        yield _check_complete(read_config(model.folder), model)


def _check_complete(config: DecoderConfig, checkpoint: ModelSource) -> tuple[DecoderConfig, ModelSource]:
    for name, shape in expected_tensors(config):
        checkpoint.require(name, shape)
    require_tokenizer(checkpoint.folder, config.vocab_size)
    require_config_files(checkpoint.folder, config.vocab_size)
    return config, checkpoint
