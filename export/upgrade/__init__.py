"""An ONNX language model that another tool exported, rewired to the graph contract."""
