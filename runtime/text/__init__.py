"""Between text and token ids: tokenizer, chat templates, streaming detokenizer, stop strings."""
