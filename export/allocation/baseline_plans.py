"""The plans that a mixed one is held against: one format for all, and the rule by which others mix.

The rule is that of ONNX Runtime GenAI's model builder, after llama.cpp: head, and what holds v and down in the first
and last eighth of the layers and in every third between, get more bits than the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from .costs import Costs, cost_of
from .format_candidates import HEAD_LINEAR, chosen_linears

_STRIDE: Final = 3


def uniform_plan(config: DecoderConfig, form: WeightFormat) -> dict[str, WeightFormat]:
    """One format for every chosen unit."""
    return {linear.name: form for linear in chosen_linears(config)}


def favoured_linears(config: DecoderConfig) -> list[str]:
    """The units that the rule gives more bits, the head first, then from the outer layers inwards."""
    layers = config.layers
    picked = [
        index
        for index in range(layers)
        if index < layers / 8 or index >= 7 * layers / 8 or (index - round(layers / 8)) % _STRIDE == _STRIDE - 1
    ]
    outwards_first = sorted(picked, key=lambda index: min(index, layers - 1 - index))
    return [HEAD_LINEAR, *(f"layers.{index}.{name}" for index in outwards_first for name in ("qkv", "down"))]


def rule_plans(
    config: DecoderConfig, forms: tuple[WeightFormat, ...], costs: Costs, limit: float
) -> Iterator[dict[str, WeightFormat]]:
    """Plans by the rule within a limit, and as near to it as one format for the rest allows.

    For every pair of formats, the dearer one for the favoured units. What is left over raises units of the rest, from
    the first layer on, to the next format that fits: the rule is held against plans of as many bytes.
    """
    favoured = set(favoured_linears(config))
    rising = sorted(forms, key=lambda form: cost_of(uniform_plan(config, form), costs, config))
    for place, base in enumerate(rising):
        for raised in rising[place + 1 :]:
            plan = {name: raised if name in favoured else base for name in uniform_plan(config, base)}
            if raised.bits > base.bits and cost_of(plan, costs, config) <= limit:
                yield _spent(config, plan, rising[place + 1 :], favoured, costs, limit)


def _spent(
    config: DecoderConfig,
    plan: Mapping[str, WeightFormat],
    dearer: list[WeightFormat],
    favoured: set[str],
    costs: Costs,
    limit: float,
) -> dict[str, WeightFormat]:
    spent = dict(plan)
    for name in plan:
        for form in () if name in favoured else reversed(dearer[:1]):
            trial = {**spent, name: form}
            if cost_of(trial, costs, config) <= limit:
                spent = trial
                break
    return spent
