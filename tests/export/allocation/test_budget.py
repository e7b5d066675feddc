"""Budgets as users write them, and the bytes that plans are charged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgerun.errors import InputError
from edgerun.export.allocation.format_candidates import planned_linears
from edgerun.export.allocation.plan_costs import Budget, Measure, bytes_read, parse_budget, weight_count
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.export.checkpoint.layer_weights import FusedLinear
from edgerun.models.manifest import WeightFormat
from support.tiny_models import write_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    return read_config(write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", "qwen2", hidden_size=96))


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("3.5bpw", Budget(3.5, Measure.BITS)),
        (" 300 MB ", Budget(300, Measure.MEGABYTES)),
        ("9ms", Budget(9, Measure.MILLISECONDS)),
        ("300MB@file", Budget(300, Measure.MEGABYTES, in_file=True)),
        ("3.5bpw@FILE", Budget(3.5, Measure.BITS, in_file=True)),
        ("20.5MS@4", Budget(20.5, Measure.MILLISECONDS, 4)),
    ],
)
def test_a_budget_is_parsed(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget
    assert parse_budget(str(budget)) == budget


@pytest.mark.parametrize(
    "text", ["", "3.5", "bpw", "-3bpw", "0MB", "nanbpw", "1e3MB", "9ms@0", "9ms@file", "3bpw@4", "3 GB", f"{10**400}MB"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a budget"):
        parse_budget(text)


def test_bytes_are_counted_as_packed(config: DecoderConfig) -> None:
    """Blocks are whole, and each has 8 bytes besides its codes; an embedding is counted as in the file."""
    assert bytes_read(FusedLinear("layers.0.o", (), (10,), 96), WeightFormat(4, 64)) == 10 * (2 * 32 + 2 * 8)
    assert bytes_read(FusedLinear("head", (), (10,), 96), WeightFormat(2, 32)) == 10 * (3 * 8 + 3 * 8)
    embedding = FusedLinear("embedding", (), (10,), 96)
    assert bytes_read(embedding, WeightFormat(8, 32, zero_points=True)) == 10 * (96 + 12 + 3)
    assert bytes_read(FusedLinear("head", (), (10,), 96), WeightFormat(32)) == 3840
    assert Budget(4, Measure.BITS).limit(config) == weight_count(config) / 2


def test_a_shared_matrix_counts_once(config: DecoderConfig) -> None:
    names = [linear.name for linear in planned_linears(config)]
    assert "embedding" not in names
    assert weight_count(config) == sum(linear.weight_count for linear in planned_linears(config))
    assert "embedding" in [linear.name for linear in planned_linears(replace(config, tied_head=False))]
