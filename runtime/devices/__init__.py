"""Execution providers and the processor of this machine."""
