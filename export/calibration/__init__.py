"""Text statistics of a model, and the divergence caused by quantization."""
