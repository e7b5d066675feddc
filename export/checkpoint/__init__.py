"""Reading a checkpoint: its configuration, tensors, tokenizer and layout."""
