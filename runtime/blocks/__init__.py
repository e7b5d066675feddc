"""Decoding in blocks of masked tokens (block diffusion)."""
