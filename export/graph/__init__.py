"""Building the ONNX graph of a decoder."""
