"""Optional data for tests: real tokenizers, prompts and a trained checkpoint, where they are at hand."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from edgerun.models.bundle import Bundle
from edgerun.runtime.text.tokenizer import TextTokenizer


def data_path(name: str) -> Path:
    """A path under the data folder (`EDGERUN_DATA`, else ../shared/data); skips the test when it is not there."""
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    path = Path(os.environ.get("EDGERUN_DATA", default)) / name
    if not path.exists():
        pytest.skip(f"{name} is not at hand")
    return path


@cache
def real_tokenizer(name: str) -> TextTokenizer:
    """A tokenizer of the data folder; skips the test when it is not there."""
    folder = data_path(f"tokenizers/{name}")
    return TextTokenizer(Bundle(folder, folder / "model.onnx", None), 200_000)


def saved_tokenizer(folder: Path, library: Tokenizer) -> TextTokenizer:
    """A tokenizer that was made with the library."""
    library.save(str(folder / "tokenizer.json"))
    return TextTokenizer(Bundle(folder, folder / "model.onnx", None), library.get_vocab_size())
