"""Text statistics of a model: inputs of its linears, and the divergence that quantization causes."""
