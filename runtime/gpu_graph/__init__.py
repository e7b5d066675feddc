"""Variants of decoder graphs for GPUs, made from any graph over the same weights."""
