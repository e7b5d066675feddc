"""Reading and rewriting ONNX files as protobuf wire format."""
