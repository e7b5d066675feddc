"""Reading and rewriting ONNX files at the level of the protobuf wire format."""
