"""Speculative decoding: drafting, pruning, verification. Token ids only, never text."""
