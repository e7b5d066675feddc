"""How the bundled shell-helper pair is trained; needs the `train` extra (PyTorch). See README.md beside this file."""
