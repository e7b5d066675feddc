"""The APIs of the server, one module each."""

from typing import Final

from . import anthropic, llamacpp, ollama, openai, rerank

PROTOCOLS: Final = (openai, rerank, anthropic, ollama, llamacpp)
"""The modules of the APIs, whose `routes` makes the paths of one."""
