"""What is typed after `edge-run export`, as the recipe that it asks for."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError
from ...models.manifest import Method, WeightFormat

if TYPE_CHECKING:
    from ...export import DraftRequest

AUTO = "auto"


class WeightChoice(str, Enum):
    """How `--weights`, `--head` and `--draft-weights` are spelled."""

    FP32 = "fp32"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    MIXED = "mixed"

    def in_blocks_of(self, block: int, zero_points: bool = False, powers_of_two: bool = False) -> WeightFormat:
        """The format this names; fp32 has no blocks, and a mix is no format.

        Raises:
            InputError: it is a mix.
        """
        if self is WeightChoice.MIXED:
            raise InputError("only --weights can be mixed", "give fp32, int8, int4 or int2")
        if self is WeightChoice.FP32:
            return WeightFormat(32)
        bits = int(self.value.removeprefix("int"))
        return WeightFormat(bits, block, zero_points=zero_points, powers_of_two=powers_of_two)


class MethodChoice(str, Enum):
    """How `--method` is spelled."""

    RTN = "rtn"
    K_QUANT = "k-quant"
    HQQ = "hqq"
    GPTQ = "gptq"
    AWQ = "awq"
    AWQ_K_QUANT = "awq+k-quant"
    AWQ_GPTQ = "awq+gptq"

    @property
    def rounding(self) -> Method:
        """The method that chooses codes and scales."""
        return Method(self.value.removeprefix("awq+")) if self is not MethodChoice.AWQ else Method.RTN

    @property
    def folded(self) -> bool:
        """Whether columns are scaled before."""
        return self.value.startswith("awq")


class LayersChoice(str, Enum):
    """How `--draft-layers` is spelled."""

    AUTO = "auto"


def calibration_file(typed: Path | None) -> Path | None:
    """The file that `--calibration` names; None for `self`, the model's own words."""
    return None if typed is None or typed == Path("self") else typed


def draft_request(
    source: Path | None, vocabulary: str | None, layers: LayersChoice | None, form: WeightFormat | None
) -> DraftRequest | None:
    """What the options about drafts ask for.

    Raises:
        InputError: they do not go together, or the vocabulary is no number.
    """
    from ...export import DraftRequest

    if source is not None and layers is not None:
        raise InputError("--draft and --draft-layers each make a draft", "give one of them")
    if source is None and layers is None:
        if vocabulary is None and form is None:
            return None
        raise InputError("no draft is named", "add --draft CHECKPOINT, or --draft-layers auto")
    if source is None and form is not None:
        raise InputError("a draft of the target's layers has the target's weights", "leave --draft-weights out")
    return DraftRequest(source, None if vocabulary is None else _tokens(vocabulary), form)


def _tokens(typed: str) -> int:
    if typed == AUTO:
        return 0
    if not typed.isascii() or not typed.isdigit() or int(typed) == 0:
        raise InputError(f"--draft-vocab {typed!r} is no number of tokens", "give one, or auto")
    return int(typed)
