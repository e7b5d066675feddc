"""The training recipe of the bundled shell-helper models; needs the `train` extra (PyTorch). See README.md."""
