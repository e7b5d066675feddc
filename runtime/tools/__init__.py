"""Tools: how models write calls of functions, and how their answers are taken apart."""
