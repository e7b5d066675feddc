"""Structured output: JSON schemas, regexes and grammars that an answer follows."""
