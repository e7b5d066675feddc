"""What a model does with text: inputs of its linears, and how far few bits move its answers."""
