"""Decoding strategies: one file each, which the decode loop does not know."""
