"""The KV cache of one token sequence."""
