"""Opens the source of a model and checks that it is complete, with its tokenizer and settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ...errors import BundleError, CheckpointError, TemplateError
from ...models.bundle import GRAPH_NAME, Bundle
from ...runtime.options import model_defaults
from ...runtime.text.chat_template import load_template
from ...runtime.text.tokenizer import TextTokenizer
from ..gguf.gguf_model import is_gguf, open_gguf
from .config import DecoderConfig, read_config
from .layout import expected_tensors, tensor_names
from .safetensors_files import Checkpoint
from .source import ModelSource

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
    require_readable(Bundle(checkpoint.folder, checkpoint.folder / GRAPH_NAME, None), config.vocab_size)
    return config, checkpoint


def require_readable(bundle: Bundle, vocab_size: int) -> None:
    """Check that edge-run can read tokenizer, chat template and settings of sampling of a model.

    Raises:
        CheckpointError: a file is absent or damaged, has a setting of the wrong type, or names a token outside the
            vocabulary.
    """
    if bundle.file("tokenizer.json") is None:
        raise CheckpointError(f"{bundle.folder} does not contain tokenizer.json", _SAVE_TOKENIZER)
    try:
        model_defaults(bundle)
        load_template(bundle, TextTokenizer(bundle, vocab_size))
    except (BundleError, TemplateError) as error:
        raise CheckpointError(error.what, "repair the file, or download the checkpoint again") from error
