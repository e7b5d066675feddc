"""Language model of multimodal Ministral 3 checkpoints; the image part is not exported."""

from dataclasses import replace
from typing import Final

from . import ministral3

FAMILY: Final = replace(ministral3.FAMILY, nested="text_config", nested_type="ministral3")
