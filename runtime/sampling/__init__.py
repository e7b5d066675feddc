"""Choosing tokens: penalties and biases, filters, random numbers by position."""
