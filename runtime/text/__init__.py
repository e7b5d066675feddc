"""Text and token ids: tokenizer, chat templates, detokenizer, stop sequences."""
