"""Bit allocation: quantization plans within a budget of quality, bytes and time."""
