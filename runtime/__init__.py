"""Tokens in, tokens out: session, KV arena, sampling, decode loop, and the text around it."""
