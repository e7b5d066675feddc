"""Decoding strategies and searches: one file each, which the decode loop does not know."""
