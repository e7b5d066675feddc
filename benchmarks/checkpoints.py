"""Writes a Hugging Face checkpoint of a known model's shape with random weights.

Speed and memory depend on shapes and not on weights, so benchmarks need no download. Weights are drawn and written a
few megabytes at a time, so that large models need little memory.

    python benchmarks/checkpoints.py qwen2.5-0.5b OUT
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import BinaryIO, Final

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shapes import INITIAL_STD, SHAPES, Shape

_CHUNK_VALUES: Final = 4 << 20
_DTYPES: Final = {"float32": ("F32", np.dtype(np.float32)), "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16))}
_END_OF_TEXT: Final = "<|endoftext|>"
_CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def write_checkpoint(
    shape: Shape, folder: Path, *, dtype: str = "bfloat16", seed: int = 0, tokenizer: Path | None = None
) -> None:
    """Write a complete checkpoint into `folder`, creating it.

    `dtype` is `float32` or `bfloat16`; `tokenizer` is a folder whose tokenizer files are copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(shape, folder / "model.safetensors", dtype, seed)
    _write_json(folder / "config.json", shape.config(dtype))
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "do_sample": False})
    _write_tokenizer(shape, folder, tokenizer)


def _write_weights(shape: Shape, path: Path, dtype: str, seed: int) -> None:
    """Stream the weights into a safetensors file, which the safetensors library writes from whole arrays only."""
    label, stored = _DTYPES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dims in shape.tensors():
        start, end = end, end + math.prod(dims) * stored.itemsize
        header[name] = {"dtype": label, "shape": dims, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for name, dims in shape.tensors():
            _write_tensor(file, name, math.prod(dims), stored, rng)


def _write_tensor(file: BinaryIO, name: str, size: int, stored: np.dtype[np.generic], rng: np.random.Generator) -> None:
    if name.endswith("norm.weight"):
        file.write(np.ones(size, stored).tobytes())
        return
    for start in range(0, size, _CHUNK_VALUES):
        values = rng.standard_normal(min(_CHUNK_VALUES, size - start), dtype=np.float32)
        values *= INITIAL_STD
        file.write(values.astype(stored, copy=False).tobytes())


def _write_tokenizer(shape: Shape, folder: Path, given: Path | None) -> None:
    """Copy the given tokenizer, or Qwen2.5's if it fits and is in the data folder; else write a byte-level one."""
    real = Path(os.environ.get("EDGERUN_DATA", "")) / "tokenizers" / "qwen2.5"
    if given is None and os.environ.get("EDGERUN_DATA") and shape.name.startswith("qwen2.5") and real.is_dir():
        given = real
    if given is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (given / name).is_file():
                shutil.copyfile(given / name, folder / name)
        return
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merge = (alphabet[0], alphabet[1])  # llama.cpp cannot load a tokenizer without merges
    vocab = {token: i for i, token in enumerate([_END_OF_TEXT, *alphabet, "".join(merge)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[merge]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END_OF_TEXT])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": _END_OF_TEXT,
            "pad_token": _END_OF_TEXT,
            "model_max_length": shape.context,
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Write a random-weights Hugging Face checkpoint of a known model's shape.",
        epilog="example: python benchmarks/checkpoints.py qwen2.5-0.5b /tmp/qwen --dtype float32",
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder whose tokenizer is copied")
    options = parser.parse_args()
    write_checkpoint(
        SHAPES[options.shape], options.out, dtype=options.dtype, seed=options.seed, tokenizer=options.tokenizer
    )
    size = (options.out / "model.safetensors").stat().st_size
    print(f"{options.out}: {options.shape}, {options.dtype}, {size / 2**20:.0f} MiB of weights")


if __name__ == "__main__":
    main()
