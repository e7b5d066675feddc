"""Weights in few bits: the operators' packing, and the ways of choosing codes and scales."""
