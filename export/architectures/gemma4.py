"""Language model of multimodal Gemma 4 checkpoints; images and sound are not exported."""

from dataclasses import replace
from typing import Final

from . import gemma4_text

FAMILY: Final = replace(gemma4_text.FAMILY, nested="text_config", nested_type="gemma4_text")
