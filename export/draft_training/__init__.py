"""Training draft models, and heads on a target's hidden states, for a target; needs the extra `train` (PyTorch)."""
