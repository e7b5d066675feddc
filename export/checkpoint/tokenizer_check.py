"""The tokenizer a checkpoint comes with: it must be there, load, and speak of tokens the model has."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from ...errors import CheckpointError

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
