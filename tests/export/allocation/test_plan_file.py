"""Plan files and budgets as users write them: round trip, refusals, and the bytes that plans are charged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.errors import InputError
from edgerun.export.allocation.format_candidates import (
    FILE_FORMATS,
    completed_plan,
    planned_linears,
    read_plan,
    spelled,
    write_plan,
)
from edgerun.export.allocation.plan_costs import Budget, Measure, bytes_read, parse_budget, weight_count
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.export.checkpoint.layer_weights import FusedLinear
from edgerun.models.manifest import Method, WeightFormat
from support.tiny_models import write_checkpoint

FEW_BITS = st.builds(
    WeightFormat,
    st.sampled_from([2, 4, 8]),
    st.sampled_from([32, 64, 128]),
    zero_points=st.booleans(),
    method=st.none() | st.sampled_from(Method),
)
FORMATS = st.just(WeightFormat(32)) | FEW_BITS
IN_LAYERS = FORMATS | st.sampled_from(FILE_FORMATS)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    return read_config(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@settings(max_examples=30)
@given(st.data(), st.booleans())
def test_a_written_plan_is_read_again(tmp_path_factory, config: DecoderConfig, data, tied: bool) -> None:
    model = replace(config, tied_head=tied)
    names = [linear.name for linear in planned_linears(model)]
    plan = {name: data.draw(IN_LAYERS if name.startswith("layers.") else FORMATS) for name in names}
    notes = {name: data.draw(st.text(max_size=20)) for name in names[::2]}
    file = tmp_path_factory.mktemp("plan") / "plan.toml"
    text = write_plan(plan, notes, ["Plan of a model", data.draw(st.text(max_size=20))])
    file.write_text(text, encoding="utf-8")
    read = read_plan(file, model)
    assert {name: spelled(each) for name, each in read.items()} == {
        name: spelled(each) for name, each in completed_plan(model, plan).items()
    }
    file.write_text(write_plan(read), encoding="utf-8")
    assert read_plan(file, model) == read
    # As editors on Windows save it.
    file.write_bytes(b"\xef\xbb\xbf" + write_plan(read).replace("\n", "\r\n").encode())
    assert read_plan(file, model) == read


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layers.9.qkv": '"int4/64"'},
            "names the linear 'layers.9.qkv' that the model does not have; the linears are layers.0.qkv",
        ),
        ({"layers.0.qkv": None}, "lacks the linear 'layers.0.qkv'"),
        ({"layers.0.qkv": None, "layers.0.o": None}, "lacks the linears 'layers.0.qkv', 'layers.0.o'"),
        ({"head": '"int3/64"'}, "gives head the format int3/64, which it cannot have"),
        ({"head": '"int7/64"'}, "gives head the unknown format 'int7/64'"),
        ({"layers.0.o": '"int5/64+zero-points"'}, "gives layers.0.o the unknown format 'int5/64+zero-points'"),
        ({"head": '"int4/48"'}, "gives head the unknown format 'int4/48'"),
        ({"head": '"int4/64 magic"'}, "the unknown format"),
        ({"head": '"fp32 rtn"'}, "the unknown format"),
        ({"head": "4"}, "gives head the unknown format 4"),
        ({"head": '"int4/64+offsets"'}, "the unknown format"),
        ({"layers.0.o": '"int2/64+rank32"'}, "gives layers.0.o the unknown format 'int2/64+rank32'"),
        ({"embedding": '"int8/64"'}, "gives embedding and head two formats"),
        ({"head": '"int4'}, "is not a quantization plan"),
    ],
    ids=str,
)
def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path, config: DecoderConfig, change, message: str) -> None:
    lines = {linear.name: '"int4/64"' for linear in planned_linears(config)} | change
    file = tmp_path / "plan.toml"
    file.write_text("[linears]\n" + "".join(f'"{name}" = {each}\n' for name, each in lines.items() if each), "utf-8")
    with pytest.raises(InputError) as caught:
        read_plan(file, config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path: Path, config: DecoderConfig) -> None:
    file = tmp_path / "plan.toml"
    contents = {
        **dict.fromkeys((b"", b"linears = 3", b"[linears", b"x = " + b"[" * 5000), "is not a quantization plan"),
        b"\xff\xfe": "is not UTF-8 text",
        b" " * (5 << 20): "files of its kind at most 4194304",
    }
    for content, message in contents.items():
        file.write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_plan(file, config)
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_plan(path, config)


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
