"""Baseline plans by a rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.export.allocation.format_candidates import BASE_FORMATS
from edgerun.export.allocation.plan_costs import BYTES_READ, Budget, Measure, plan_cost
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.export.report.compared_plans import rule_linears, rule_plans
from support.tiny_models import write_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    return read_config(write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", "qwen2", hidden_size=96))


def test_the_rule_favours_head_and_outer_layers(config: DecoderConfig) -> None:
    favoured = rule_linears(replace(config, layers=24))
    assert favoured[:3] == ["head", "layers.0.qkv", "layers.0.down"]
    assert {"layers.23.down", "layers.5.qkv", "layers.8.qkv"} <= set(favoured)
    assert not {"layers.3.qkv", "layers.4.down"} & set(favoured)


@settings(max_examples=20)
@given(st.floats(2.0, 12.0))
def test_rule_plans_are_within_the_limit(config: DecoderConfig, bits: float) -> None:
    limit = Budget(bits, Measure.BITS).limit(config)
    for plan in rule_plans(config, BASE_FORMATS, BYTES_READ, limit):
        assert plan_cost(plan, BYTES_READ, config) <= limit
        assert plan["head"].bits >= max(each.bits for each in plan.values())
