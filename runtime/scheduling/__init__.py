"""Which answers of an engine are generated, and which one runs the next pass."""
