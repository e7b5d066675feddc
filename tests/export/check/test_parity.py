"""The parity check of every export accepts correct graphs and rejects wrong ones."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import helper

from edgerun.errors import ExportError
from edgerun.export import FP32, INT4, INT8, ExportRecipe, WeightFormat, export_checkpoint
from edgerun.export.check.contract_session import TOLERANCE, ContractSession
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.graph import decoder as graph_module
from edgerun.export.graph.initializers import Initializers
from edgerun.models.manifest import GraphLayout
from support.tiny_models import write_bundle, write_checkpoint


def named(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def drop_norm(model: onnx.ModelProto) -> None:
    node = named(model, "layers.0.query.normed")
    node.op_type = "Identity"
    del node.input[1:], node.attribute[:]


def swap_gate_and_up(model: onnx.ModelProto) -> None:
    node = named(model, "layers.1.gate")
    node.output[0], node.output[1] = node.output[1], node.output[0]


def change_epsilon(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 1e-3


def swap_sine_and_cosine(model: onnx.ModelProto) -> None:
    node = named(model, "layers.0.attended")
    node.input[7], node.input[8] = node.input[8], node.input[7]


def use_wrong_residual(model: onnx.ModelProto) -> None:
    named(model, "asked.residual").input[0] = named(model, "layers.0.mlp_norm").output[3]


def interleave_rotation(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.attribute.append(helper.make_attribute("rotary_interleaved", 1))


def leave_inputs_in_floats(model: onnx.ModelProto) -> None:
    for name in ("layers.0.o", "layers.1.down"):
        attributes = named(model, name).attribute
        attributes.remove(next(each for each in attributes if each.name == "accuracy_level"))


MISWIRED = (drop_norm, swap_gate_and_up, change_epsilon, swap_sine_and_cosine, use_wrong_residual, interleave_rotation)
DIFFERS = r"differs from the reference by .*, 0\.00\d+ is allowed"
SLOW = "no fast kernel on this machine for some of {}: 2 products of a pass would expand their matrices"


@pytest.mark.parametrize(
    ("defect", "weight_format", "message"),
    [
        *((defect, weight_format, DIFFERS) for defect in MISWIRED for weight_format in (FP32, INT8, INT4)),
        *((leave_inputs_in_floats, each, SLOW.format(each)) for each in (INT8, WeightFormat(2, 64))),
    ],
)
def test_a_wrong_or_slow_graph_is_rejected(tmp_path, monkeypatch, capfd, defect, weight_format, message: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "qwen3")
    build_graph = graph_module.build_graph

    def build_wrong_graph(*arguments):
        model = build_graph(*arguments)
        defect(model)
        return model

    monkeypatch.setattr("edgerun.export.bundle_writer.build_graph", build_wrong_graph)
    with pytest.raises(ExportError, match=message):
        export_checkpoint(source, tmp_path / "bundle", ExportRecipe(weight_format))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert "onnxruntime" not in capfd.readouterr().err


@pytest.mark.parametrize("defect", ["codes", "zero points"])
def test_swapped_codes_and_wrong_zero_points_are_rejected(tmp_path, monkeypatch, defect: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")

    class Wrong(Checkpoint):
        def quantized(self, rows, weight_format):
            right = super().quantized(rows, weight_format)
            if defect == "zero points":
                return right._replace(zero_points=right.zero_points ^ 1)
            return right._replace(packed=(right.packed >> 4 | right.packed << 4).astype(np.uint8))

    # Only the graph gets the wrong codes, not the reference.
    target = "edgerun.export.bundle_writer.Initializers"
    monkeypatch.setattr(target, lambda _, *rest: Initializers(Wrong(source), *rest))
    recipe = ExportRecipe(WeightFormat(4, 32, zero_points=defect == "zero points"))
    with pytest.raises(ExportError, match="differs from the reference"):
        export_checkpoint(source, tmp_path / "bundle", recipe)


def test_wrong_low_bit_kernels_are_detected(tmp_path, monkeypatch) -> None:
    """With a broken kernel, the graph with float activations is correct but the shipped one is not."""
    source = write_checkpoint(tmp_path / "checkpoint")
    forward = ContractSession.forward

    def noisy_forward(self: ContractSession, tokens, logits_for):
        logits = forward(self, tokens, logits_for)
        if self.is_shipped_graph:
            logits = logits + np.random.default_rng(0).normal(0, logits.std(), logits.shape).astype(np.float32)
        return logits

    initialize = ContractSession.__init__

    def construct(self: ContractSession, bundle, capacity, graph=None) -> None:
        initialize(self, bundle, capacity, graph)
        self.is_shipped_graph = graph is None

    monkeypatch.setattr(ContractSession, "__init__", construct)
    monkeypatch.setattr(ContractSession, "forward", noisy_forward)
    with pytest.raises(ExportError, match=r"correlate by only 0\.\d+ with the reference's on this machine"):
        export_checkpoint(source, tmp_path / "bundle", ExportRecipe(INT8))


def test_fewer_bits_give_a_higher_kl(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "qwen2")
    exact, int8, int4 = (
        export_checkpoint(source, tmp_path / "bundle", ExportRecipe(weight_format))
        for weight_format in (FP32, INT8, INT4)
    )
    assert all(each.parity.max_abs_diff < TOLERANCE / 20 for each in (exact, int8, int4))
    assert exact.parity.mean_kl < 1e-9
    assert exact.parity.mean_kl < int8.parity.mean_kl < int4.parity.mean_kl
    assert exact.quality is None, "nothing was quantized"
    assert 0 < int8.quality.mean_kl < int4.quality.mean_kl
    assert int8.quality.float_perplexity == int4.quality.float_perplexity
    assert int8.quality.perplexity == pytest.approx(int8.quality.float_perplexity, rel=0.05)


def test_quality_is_measured_on_as_much_of_the_sample_text_as_the_context_holds(tmp_path) -> None:
    source, recipe = write_checkpoint(tmp_path / "checkpoint"), ExportRecipe(INT8, context=16, layout=GraphLayout.GENAI)
    quality = export_checkpoint(source, tmp_path / "bundle", recipe).quality
    assert quality.tokens == 16


def test_other_output_during_log_capture_is_shown(tmp_path, capfd) -> None:
    bundle = write_bundle(tmp_path, weights=INT4)
    session = ContractSession(bundle, 8)
    run = session.run

    def run_with_note(*arguments):
        os.write(2, b"a note\n")
        return run(*arguments)

    session.run = run_with_note
    logits, expanded = session.forward_counting_expansions(np.arange(3), np.arange(3))
    assert logits.shape == (3, 300)
    assert expanded == 0
    assert capfd.readouterr().err == "a note\n"


def test_export_works_without_standard_error(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    program = (
        "import os, pathlib, sys; os.close(2); sys.stderr = None\n"
        "from edgerun.export import ExportRecipe, export_checkpoint\n"
        "export_checkpoint(*map(pathlib.Path, sys.argv[1:]), ExportRecipe())\n"
    )
    subprocess.run([sys.executable, "-c", program, source, tmp_path / "bundle"], check=True, timeout=120)
    assert (tmp_path / "bundle" / "model.onnx").is_file()
