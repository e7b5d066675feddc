"""Measuring models on this machine: pass times, exactness, comparisons, stored results."""
