"""Static graphs of plain operators, for NPUs."""
