"""Draft models: from a separate checkpoint, or made of the target's own layers."""
