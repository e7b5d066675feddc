"""Draft models, from a separate checkpoint or the target's own layers."""
