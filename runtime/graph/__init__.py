"""Decoder graphs: inputs and outputs, introspection, probing, sessions and bound passes."""
