"""Checkpoint in, ONNX bundle out: architectures, graph, quantization and parity."""
