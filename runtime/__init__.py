"""The runtime: loads a model and generates answers with it."""
