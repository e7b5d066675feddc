"""Checking an exported graph against a float64 reference."""
