"""Finding attention, norms, activations and rotations in plain operators."""
