"""Blocks of uniform plans: rows that a block does not divide."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from edgerun.edge.cli.main import main
from edgerun.export.checkpoint.layer_weights import FusedLinear
from edgerun.export.quantization.codes import packed_row_bytes
from edgerun.export.quantization.methods import BLOCKS, QUANTIZED_BITS, with_fitting_blocks
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import WeightFormat
from support.tiny_models import write_checkpoint


@given(columns=st.integers(1, 5000), bits=st.sampled_from(QUANTIZED_BITS), block=st.sampled_from(BLOCKS))
def test_a_pass_reads_no_more_bytes(columns: int, bits: int, block: int) -> None:
    given_format = WeightFormat(bits, block, half_scales=True)
    found = with_fitting_blocks(FusedLinear("down", ("down",), (8,), columns), given_format)
    assert found.block <= block
    assert (found.bits, found.half_scales) == (bits, True)
    assert packed_row_bytes(columns, found) <= packed_row_bytes(columns, given_format)
    if columns % block == 0:
        assert found == given_format


def test_rows_that_fill_no_large_blocks_have_smaller_ones(tmp_path: Path) -> None:
    sizes = {"hidden_size": 320, "intermediate_size": 384, "num_attention_heads": 5, "num_key_value_heads": 1}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", **sizes)
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--weights", "int4", "--block", "128"]) == 0
    weights = open_bundle(tmp_path / "out").manifest.weights
    assert {name: each.block for name, each in weights.items() if name.startswith("layers.0.")} == {
        "layers.0.qkv": 64,
        "layers.0.o": 64,
        "layers.0.gate_up": 64,
        "layers.0.down": 128,
    }
