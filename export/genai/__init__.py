"""Output for ONNX Runtime GenAI."""
