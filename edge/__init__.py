"""Where people meet edge-run: the command line, the terminal chat and the errors they may see."""
