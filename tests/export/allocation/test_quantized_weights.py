"""The store of quantized linears returns what its source quantizes, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgerun.export.allocation.format_candidates import format_candidates, planned_linears
from edgerun.export.allocation.quantized_weights import QuantizedLinearStore
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.quantization.methods import DEFAULT_METHODS
from edgerun.export.report.compared_plans import uniform_plan
from edgerun.models.manifest import WeightFormat
from support.tiny_models import write_checkpoint

INT4 = WeightFormat(4, 64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", "qwen2", hidden_size=96)


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> DecoderConfig:
    return read_config(checkpoint)


class _Unreadable(Checkpoint):
    """A source that cannot quantize any more."""

    def quantized(self, *_: object) -> None:
        raise AssertionError("quantized again")


@pytest.mark.parametrize("weight_format", format_candidates(DEFAULT_METHODS, zero_points=True)[::3], ids=str)
def test_rows_are_those_of_the_source(
    tmp_path: Path, checkpoint: Path, config: DecoderConfig, weight_format: WeightFormat
) -> None:
    source = Checkpoint(checkpoint)
    for linear in planned_linears(config):
        QuantizedLinearStore(source, config, tmp_path).make(linear, weight_format)
    store = QuantizedLinearStore(_Unreadable(checkpoint), config, tmp_path)
    view = store.view(uniform_plan(config, weight_format))
    for linear in planned_linears(config):
        for name in linear.weights:
            for rows in source.row_ranges(name):
                part = replace(rows, start=rows.start + 1)
                pairs = zip(view.quantized(part, weight_format), source.quantized(part, weight_format), strict=True)
                for stored, expected in pairs:
                    assert (stored is None) == (expected is None)
                    if expected is not None:
                        np.testing.assert_array_equal(stored, expected)
        exact = np.concatenate([source.read(name) for name in linear.weights])
        assert np.abs(store.weights(linear, weight_format) - exact).mean() < np.abs(exact).mean()


def test_a_tied_embedding_is_its_head(tmp_path: Path, checkpoint: Path, config: DecoderConfig) -> None:
    store = QuantizedLinearStore(Checkpoint(checkpoint), config, tmp_path)
    embedding, *_, head = fused_linears(config)
    store.make(embedding, INT4)
    assert len(list(tmp_path.iterdir())) == 1
    np.testing.assert_array_equal(store.weights(head, INT4), store.weights(embedding, INT4))
