"""Language model of multimodal Gemma 3 checkpoints; the image part is not exported."""

from dataclasses import replace
from typing import Final

from . import gemma3_text

FAMILY: Final = replace(gemma3_text.FAMILY, nested="text_config", nested_type="gemma3_text")
