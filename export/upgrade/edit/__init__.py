"""Editing an ONNX graph in place, with its weights left in their files."""
