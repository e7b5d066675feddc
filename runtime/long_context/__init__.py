"""Attention for narrow passes over long contexts on the CPU."""
