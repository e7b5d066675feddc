"""Quantization plans: format candidates, the linears that a plan covers, and TOML files that users read and edit.

    [linears]
    "layers.0.qkv" = "int4/64 k-quant"  # 0.19 MB, KL 0.0031

A format is written as `edge-run inspect` shows it: bits, block size and suffixes. The quantization method may follow;
without one the default method of the bits is used.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ...errors import InputError
from ...models.json_file import shown
from ...models.manifest import Method, WeightFormat
from ...models.regular_file import os_errors_as, read_regular
from ...models.user_text import decode_text
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.layout import fused_linears
from ..quantization.codes import kernel_bits

BASE_FORMATS: Final = tuple(
    WeightFormat(bits, block)
    for bits, block in ((2, 128), (2, 64), (4, 128), (4, 64), (4, 32), (8, 128), (8, 64), (8, 32))
)
"""Bits and block sizes to choose from. 2 bits in blocks of 32 are left out: they read 4 bits per weight and are slower
than 4 bits in blocks of 32."""
FILE_FORMATS: Final = tuple(WeightFormat(bits, block) for bits, block in ((3, 64), (3, 32), (5, 64), (5, 32), (6, 64)))
"""Formats that save bytes in the file alone: a pass reads them as 4 or 8 bits (`codes.stored_codes`)."""
EMBEDDING_LINEAR: Final = "embedding"
HEAD_LINEAR: Final = "head"
_FORMATS: Final = {
    str(each): each
    for each in (
        WeightFormat(32),
        *(
            WeightFormat(bits, block, zero_points=points, half_scales=half)
            for bits in (2, 3, 4, 5, 6, 8)
            for block in (32, 64, 128)
            for points in ((False, True) if bits == kernel_bits(bits) else (False,))
            for half in (False, True)
        ),
    )
}
"""Formats that a plan may name, by their spelling."""
_METHODS: Final = {each.value: each for each in Method}
_MAX_BYTES: Final = 1 << 22
"""Largest file that is read; a plan of a thousand layers takes a tenth of it."""
_MAX_NAMED: Final = 3
_HINT: Final = "give a TOML file with a [linears] table"


def format_candidates(
    methods: Mapping[int, Method], zero_points: bool = False, half_scales: bool = False, in_file: bool = False
) -> tuple[WeightFormat, ...]:
    """List the candidates: every base format with the quantization method for its number of bits.

    Args:
        methods: Quantization method by bits.
        zero_points: Whether to add versions with zero points.
        half_scales: Whether all scales are stored in float16.
        in_file: Whether to add the formats that save bytes in the file alone.
    """
    return tuple(
        replace(base, method=methods[base.bits], zero_points=with_points, half_scales=half_scales)
        for base in (*BASE_FORMATS, *(FILE_FORMATS if in_file else ()))
        for with_points in ((False, True) if zero_points and base in BASE_FORMATS else (False,))
    )


def is_allowed(linear: FusedLinear, weight_format: WeightFormat) -> bool:
    """Whether a linear can be stored in a format.

    The operator of experts has neither zero points nor float16 scales, and its blocks divide the columns of both its
    linears. Neither experts nor the embedding and the head have bits that are expanded when the graph is loaded.
    """
    of_operators = weight_format.bits in (32, kernel_bits(weight_format.bits))
    if not linear.experts:
        return of_operators or linear.name not in (EMBEDDING_LINEAR, HEAD_LINEAR)
    plain = of_operators and not (weight_format.zero_points or weight_format.half_scales)
    both = (linear, linear.paired or linear)
    return plain and not any(weight_format.block and each.columns % weight_format.block for each in both)


def allowed_formats(config: DecoderConfig, formats: Sequence[WeightFormat]) -> list[tuple[str, WeightFormat]]:
    """All pairs of a planned linear's name and a format that it can be stored in."""
    return [(linear.name, each) for linear in planned_linears(config) for each in formats if is_allowed(linear, each)]


def planned_linears(config: DecoderConfig) -> Iterator[FusedLinear]:
    """The linears that have a format of their own.

    A tied head stands for the embedding too, and the first linear of experts for the second.
    """
    paired = set()
    for linear in fused_linears(config):
        if linear.paired is not None:
            paired.add(linear.paired.name)
        is_shared = linear.name in paired or (config.tied_head and linear.name == EMBEDDING_LINEAR)
        if not linear.exact and not is_shared:
            yield linear


def completed_plan(config: DecoderConfig, plan: Mapping[str, WeightFormat]) -> dict[str, WeightFormat]:
    """Complete the formats of `planned_linears` to every linear, in the order of the graph."""
    formats = dict(plan)
    if config.tied_head:
        formats[EMBEDDING_LINEAR] = formats[HEAD_LINEAR]
    for linear in fused_linears(config):
        if linear.paired is not None:
            formats[linear.paired.name] = formats[linear.name]
    return {linear.name: WeightFormat(32) if linear.exact else formats[linear.name] for linear in fused_linears(config)}


def write_plan(
    plan: Mapping[str, WeightFormat], notes: Mapping[str, str] | None = None, heading: Sequence[str] = ()
) -> str:
    """Write a plan as text.

    Args:
        plan: Format of each linear, by its name.
        notes: Comments by the name of a linear.
        heading: Comment lines at the top.
    """
    lines = [f"# {_one_line(line)}" for line in heading]
    lines.append("[linears]")
    width = max((len(name) for name in plan), default=0) + 2
    values = {name: f'"{spelled(weight_format)}"' for name, weight_format in plan.items()}
    widest = max(map(len, values.values()), default=0)
    for name, value in values.items():
        note = _one_line((notes or {}).get(name, ""))
        quoted = f'"{name}"'
        lines.append(f"{quoted:{width}} = {value:{widest}}  # {note}" if note else f"{quoted:{width}} = {value}")
    return "\n".join(lines) + "\n"


def read_plan(file: Path, config: DecoderConfig) -> dict[str, WeightFormat]:
    """Read a plan for every linear of a model.

    A tied embedding may be left out; if it is given, its format must be its head's.

    Raises:
        InputError: The file cannot be read, is not TOML, or does not fit the model: a linear is missing or unknown, or
            a format is not one.
    """
    table = _table(file)
    known = {linear.name: linear for linear in fused_linears(config)}
    needed = [linear.name for linear in planned_linears(config)]
    if unknown := [name for name in table if name not in known]:
        raise InputError(f"{file} names {_listed(unknown)} that the model does not have", _names_hint(needed))
    if missing := [name for name in needed if name not in table]:
        raise InputError(f"{file} lacks {_listed(missing)} of the model", _names_hint(needed))
    plan = {name: _parsed(file, name, value) for name, value in table.items()}
    for name, weight_format in plan.items():
        if not is_allowed(known[name], weight_format):
            hint = (
                "give head and embedding 2, 4 or 8 bits, and experts blocks that divide their columns and plain scales"
            )
            raise InputError(f"{file} gives {name} the format {weight_format}, which it cannot have", hint)
    for linear in known.values():
        other = linear.paired
        if other is not None and plan.get(other.name, plan[linear.name]) != plan[linear.name]:
            raise InputError(
                f"{file} gives {linear.name} and {other.name} two formats, but one operator multiplies by both",
                f"leave {other.name} out",
            )
    if config.tied_head and plan.get(EMBEDDING_LINEAR, plan[HEAD_LINEAR]) != plan[HEAD_LINEAR]:
        raise InputError(
            f"{file} gives embedding and head two formats, but they share one matrix", "leave the embedding out"
        )
    return completed_plan(config, plan)


def spelled(weight_format: WeightFormat) -> str:
    """A format with its method, as `read_plan` reads it."""
    return f"{weight_format} {weight_format.method.value}" if weight_format.method is not None else str(weight_format)


def _table(file: Path) -> dict[str, object]:
    try:
        with os_errors_as(InputError, f"{file} cannot be read", "give the file of a plan"):
            text = decode_text(read_regular(file, _MAX_BYTES), str(file))
        table = tomllib.loads(text).get("linears")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not a quantization plan: {error}", _HINT) from error
    if not isinstance(table, dict):
        raise InputError(f"{file} is not a quantization plan: it has no table [linears]", _HINT)
    return table


def _parsed(file: Path, name: str, value: object) -> WeightFormat:
    named, _, method = value.partition(" ") if isinstance(value, str) else ("", "", "")
    weight_format, chosen = _FORMATS.get(named), _METHODS.get(method.strip())
    if weight_format is None or (method.strip() and (chosen is None or weight_format.bits == 32)):
        raise InputError(
            f"{file} gives {name} the unknown format {shown(value)}",
            'write "fp32", "int4/64" or "int4/64 gptq": 2, 3, 4, 5, 6 or 8 bits in blocks of 32, 64 or 128',
        )
    return replace(weight_format, method=chosen)


def _names_hint(needed: Sequence[str]) -> str:
    return f"the linears are {', '.join(needed[:5])} and so on, to {needed[-1]}"


def _listed(names: Sequence[str]) -> str:
    some = ", ".join(shown(name) for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"the linear{'s' if len(names) > 1 else ''} {some}{more}"


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
