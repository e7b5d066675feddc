"""edge-run: an on-device language-model runtime on ONNX Runtime."""
