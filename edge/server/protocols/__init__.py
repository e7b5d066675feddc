"""The APIs of the server, one module each."""

from typing import Final

from . import openai

PROTOCOLS: Final = (openai,)
"""The modules of the APIs, whose `routes` makes the paths of one."""
