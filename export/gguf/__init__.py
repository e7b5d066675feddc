"""Reading GGUF files, llama.cpp's format, as models to export.

`models/gguf_header.py` parses the file's header and gives typed access to its keys, `config_json` and `gguf_tokenizer`
turn them into the files of a Hugging Face checkpoint, `tensor_types` decodes weights, and `gguf_model` is the
`ModelSource` made of these.
"""
