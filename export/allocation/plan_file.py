"""A plan as a TOML file that people read and edit: one line for each unit.

    [units]
    "layers.0.qkv" = "int4/64 k-quant"  # 0.19 MB, KL 0.0031

A format is written as `inspect` shows it, bits, block and what comes beside the scales, and may be followed by the
method that chooses the codes; without one the usual method does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ...errors import InputError
from ...models.json_file import shown
from ...models.manifest import Method, WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import fused_linears
from .format_candidates import EMBEDDING_LINEAR, HEAD_LINEAR, chosen_linears, may_have, with_embedding

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FORMS: Final = {
    str(form): form
    for form in (
        WeightFormat(32),
        *(
            WeightFormat(bits, block, zero_points=points, powers_of_two=powers, rank=rank)
            for bits in (2, 4, 8)
            for block in (32, 64, 128)
            for points in (False, True)
            for powers in (False, True)
            for rank in ((0, 16, 32, 64) if bits == 2 else (0,))
        ),
    )
}
"""What a unit of a plan may be, by how it is written."""
_LONGEST: Final = 1 << 22
"""Bytes of a file that can be a plan: a thousand layers take a tenth of it."""
_NAMED_AT_MOST: Final = 3


def write_plan(
    plan: Mapping[str, WeightFormat], notes: Mapping[str, str] | None = None, heading: Sequence[str] = ()
) -> str:
    """The text of a plan's file.

    Args:
        plan: format by unit.
        notes: what to say of a unit beside its format.
        heading: lines to begin with.
    """
    lines = [f"# {_one_line(line)}" for line in heading]
    lines.append("[units]")
    width = max((len(name) for name in plan), default=0) + 2
    values = {name: f'"{spelled(form)}"' for name, form in plan.items()}
    widest = max(map(len, values.values()), default=0)
    for name, value in values.items():
        note = _one_line((notes or {}).get(name, ""))
        quoted = f'"{name}"'
        lines.append(f"{quoted:{width}} = {value:{widest}}  # {note}" if note else f"{quoted:{width}} = {value}")
    return "\n".join(lines) + "\n"


def read_plan(file: Path, config: DecoderConfig) -> dict[str, WeightFormat]:
    """A plan for every unit of a model from its file.

    A tied embedding need not be named; if it is, its format is its head's.

    Raises:
        InputError: the file cannot be read or is no TOML, or does not fit the model: a unit is missing or unknown, or a
            format is none.
    """
    linears = _linears(file)
    known = {linear.name: linear for linear in fused_linears(config)}
    needed = [linear.name for linear in chosen_linears(config)]
    if strange := [name for name in linears if name not in known]:
        raise InputError(f"{file} names {_listed(strange, 'unit')} that the model does not have", _units_hint(needed))
    if missing := [name for name in needed if name not in linears]:
        raise InputError(f"{file} lacks {_listed(missing, 'unit')} of the model", _units_hint(needed))
    plan = {name: _form(file, name, value) for name, value in linears.items()}
    for name, form in plan.items():
        if not may_have(known[name], form):
            raise InputError(
                f"{file} gives {name} the format {form}, which it cannot have",
                "a rank is for the linears of layers, and no larger than they",
            )
    if config.tied_head and plan.get(EMBEDDING_LINEAR, plan[HEAD_LINEAR]) != plan[HEAD_LINEAR]:
        raise InputError(
            f"{file} stores embedding and head in two ways, and they are one matrix", "leave the embedding out"
        )
    return with_embedding(config, plan)


def spelled(form: WeightFormat) -> str:
    """A format with its method, as `read_plan` reads it."""
    return f"{form} {form.method.value}" if form.method is not None else str(form)


def parse_form(text: str) -> WeightFormat | None:
    """The format that is spelled so, or None."""
    name, _, method = text.partition(" ")
    form = _FORMS.get(name)
    if form is None or not method.strip():
        return form
    known = {each.value: each for each in Method}
    if form.bits == 32 or method.strip() not in known:
        return None
    return replace(form, method=known[method.strip()])


def _linears(file: Path) -> dict[str, object]:
    try:
        with file.open("rb") as opened:
            data = opened.read(_LONGEST + 1)
        if len(data) > _LONGEST:
            raise InputError(f"{file} is no plan: it is larger than any")
        table = tomllib.loads(data.decode("utf-8")).get("units")
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}", "give the file of a plan") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is no plan: {error}", "give a TOML file with a [units] table") from error
    if not isinstance(table, dict):
        raise InputError(f"{file} is no plan: it has no table [units]", "give a TOML file with a [units] table")
    return table


def _form(file: Path, name: str, value: object) -> WeightFormat:
    form = parse_form(value) if isinstance(value, str) else None
    if form is None:
        raise InputError(
            f"{file} gives {name} the format {shown(value)}, which is none",
            'write "fp32", or "int4/64", or "int4/64 gptq": 2, 4 or 8 bits, blocks of 32, 64 or 128; of 2 bits also '
            '"int2/64+rank32", with 16, 32 or 64',
        )
    return form


def _units_hint(needed: Sequence[str]) -> str:
    return f"the units are {', '.join(needed[:5])} and so on, to {needed[-1]}"


def _listed(names: Sequence[str], noun: str) -> str:
    some = ", ".join(shown(name) for name in names[:_NAMED_AT_MOST])
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return f"the {noun}{'s' if len(names) > 1 else ''} {some}{more}"


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
