"""Drafters: lookups and draft models that propose next tokens."""
