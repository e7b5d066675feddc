"""Weight quantization: the operators' packing, and methods of choosing codes and scales."""
