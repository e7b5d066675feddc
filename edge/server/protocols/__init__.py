"""The APIs of the server, one module each."""

from typing import Final

from . import ollama, openai

PROTOCOLS: Final = (openai, ollama)
"""The modules of the APIs, whose `routes` makes the paths of one."""
