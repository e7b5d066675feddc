"""Language model of Qwen3.5 checkpoints with experts; the image part is not exported."""

from dataclasses import replace
from typing import Final

from . import qwen3_5_moe_text

FAMILY: Final = replace(qwen3_5_moe_text.FAMILY, nested="text_config", nested_type="qwen3_5_moe_text")
