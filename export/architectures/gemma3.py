"""The language model of the multimodal Gemma 3 checkpoints, whose image part is left out."""

from dataclasses import replace
from typing import Final

from . import gemma3_text

FAMILY: Final = replace(gemma3_text.FAMILY, nested="text_config")
