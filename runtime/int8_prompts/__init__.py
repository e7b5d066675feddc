"""The int8 prompt graph: a second graph of a model with 8-bit products, which reads prompts faster."""
