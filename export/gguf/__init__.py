"""GGUF files, llama.cpp's format, as a source of models: their weights under Hugging Face names, settings, tokenizer.

`container` reads the file's header, `metadata` its keys, `settings` makes of them what config.json would say, `names`
maps tensors, `blocks` decodes their types, `vocabulary` builds the tokenizer and `model` puts it all together.
"""

from .gguf_model import is_gguf, open_gguf

__all__ = ["is_gguf", "open_gguf"]
