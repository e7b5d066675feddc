"""Draft models made from the target, or fitted to it."""
