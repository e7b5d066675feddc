"""Draft models, from a separate checkpoint, and draft heads."""
