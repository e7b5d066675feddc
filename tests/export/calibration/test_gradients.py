"""Gradients at the outputs of linears, and rounding by them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgerun.edge.cli.main import main
from edgerun.export import Method, WeightFormat
from edgerun.export.allocation.quantized_weights import QuantizedLinearStore
from edgerun.export.bundle_content import SourceModel
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.calibration.collect_statistics import collect_statistics
from edgerun.export.calibration.divergence import PlanEvaluator
from edgerun.export.calibration.layer_graphs import HIDDEN, SUM
from edgerun.export.calibration.layer_runner import LayerRunner
from edgerun.export.calibration.output_moments import OutputMoments
from edgerun.export.calibration.sequential import quantize_sequentially
from edgerun.export.calibration.text_batches import pack_texts
from edgerun.export.checkpoint.layout import fused_linears, head_layout
from edgerun.export.checkpoint.source import RowRange
from edgerun.models.bundle import open_bundle
from edgerun.models.progress import silent
from support.tiny_models import WORDS, source_model, write_checkpoint

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("edgerun.export.calibration.gradients")
GPTQ = WeightFormat(4, 64, method=Method.GPTQ)
DENSE = ("llama", "phi3", "gemma2", "gemma3_text", "granite", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")


def text_of(seed: int, texts: int, length: int = 40) -> CalibrationText:
    return CalibrationText(tuple(np.random.default_rng(seed).integers(0, 300, (texts, length))), (), "random")


def moments_of(folder: Path, text: CalibrationText, **overrides) -> tuple[SourceModel, OutputMoments]:
    model = source_model(folder / "model", **overrides)
    from edgerun.export.calibration.gradients import collect_gradients

    return model, collect_gradients(model, text, folder / "outputs", 0, silent)


@pytest.mark.parametrize("family", DENSE)
def test_graphs_compute_in_pytorch_what_they_compute_in_onnx_runtime(tmp_path: Path, family: str) -> None:
    from edgerun.export.calibration.gradients import run_graph

    runner = LayerRunner(source_model(tmp_path / "model", family))
    batch = pack_texts(text_of(0, 3).calibration)[0]
    hidden = runner.embed(batch)
    for index in range(runner.config.layers):
        for mixes in (True, False):
            feeds = runner.feeds(index, mixes, hidden, batch, runner.matrix)
            graph = runner.half_graph(index, mixes).graph
            found = run_graph(graph, {name: torch.from_numpy(np.asarray(each)) for name, each in feeds.items()})
            hidden = runner.half(index, mixes, feeds[HIDDEN], batch, runner.matrix)[0]
            np.testing.assert_allclose(found[SUM][batch.filled], hidden[batch.filled], atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_moments_are_the_hessian_of_the_divergence(tmp_path: Path, family: str) -> None:
    """The last linear adds to the last hidden states, so the Hessian there follows from finite differences."""
    text = text_of(0, 80)
    model, moments = moments_of(
        tmp_path, text, family=family, **({"final_logit_softcapping": 3.0} if family == "gemma2" else {})
    )
    last, width = f"model.layers.{model.config.layers - 1}.mlp.down_proj.weight", model.config.hidden_size
    found = moments.of(RowRange(last, 0, width))
    assert found is not None
    runner, step = LayerRunner(model), 0.02
    head = runner.matrix(head_layout(model.config))
    hessian = np.zeros(width)
    for batch in pack_texts(text.calibration):
        hidden = runner.embed(batch)
        for index in range(model.config.layers):
            hidden = runner.captured(index, hidden, batch, runner.matrix)[0]
        states = hidden[batch.filled]
        exact = _log_softmax(runner.logits(states, lambda _: head))
        for channel, shift in enumerate(np.eye(width, dtype=np.float32) * step):
            moved = _log_softmax(runner.logits(states + shift, lambda _: head))
            hessian[channel] += 2 / step**2 * (np.exp(exact) * (exact - moved)).sum()
    if family == "llama":  # gemma2 has a norm between the linear and the hidden states
        np.testing.assert_allclose(np.diagonal(found), hessian, rtol=0.2)
    assert np.linalg.eigvalsh(found.astype(np.float64)).min() > -1e-3 * np.diagonal(found).mean()


def _log_softmax(logits) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def test_noise_is_taken_off_the_covariances() -> None:
    from edgerun.export.calibration.gradients import shrunk

    random = np.random.default_rng(0)
    mixture = random.standard_normal((4, 60)) * 0.2

    def moments(tokens: int, shared: float) -> np.ndarray:
        values = random.standard_normal((tokens, 60)) + shared * random.standard_normal((tokens, 4)) @ mixture
        return values.T @ values

    def error(estimate, exact) -> float:
        return float(np.square(estimate / 400 - exact).sum())

    exact = np.eye(60) + mixture.T @ mixture
    first, second = moments(200, 1.0), moments(200, 1.0)
    found = shrunk(torch.from_numpy(first), torch.from_numpy(second)).numpy()
    np.testing.assert_allclose(np.diagonal(found), np.diagonal(first + second))
    assert error(found, exact) < 0.8 * error(first + second, exact)
    uncorrelated = shrunk(torch.eye(5), torch.eye(5))
    np.testing.assert_array_equal(uncorrelated, 2 * torch.eye(5))


def test_gradients_lower_the_divergence(tmp_path: Path) -> None:
    text = text_of(0, 120)
    model, moments = moments_of(tmp_path, text, num_hidden_layers=3)
    statistics = collect_statistics(model, text, tmp_path / "statistics", True, silent).of
    plan = {linear.name: GPTQ for linear in fused_linears(model.config) if linear.name.startswith("layers.")}
    plan |= {name: WeightFormat(32) for name in ("embedding", "head")}
    found = []
    for outputs in (None, moments):
        store = QuantizedLinearStore(model.source, model.config, tmp_path / f"store-{len(found)}", statistics)
        quantize_sequentially(model, text, plan, store, silent, outputs)
        folder = tmp_path / f"evaluator-{len(found)}"
        found.append(PlanEvaluator(model, text_of(1, 20).calibration, store.weights, folder).divergence(plan).mean_kl)
    assert found[1] < 0.95 * found[0]


def test_an_export_by_gradients_from_the_command_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(WORDS, 1200)), encoding="utf-8")
    source = write_checkpoint(tmp_path / "checkpoint")
    options = ["--weights", "int4", "--calibration", str(text), "--calibration-tokens", "1100", "--method"]
    methods = ("gptq", "yaqa", "awq+gptq", "awq+yaqa")
    for method in methods:
        assert main(["export", str(source), str(tmp_path / method), *options, method]) == 0
    weights = [dict(open_bundle(tmp_path / method).manifest.weights) for method in methods]
    assert all(each == weights[0] for each in weights)
    linears = json.loads((tmp_path / "yaqa" / "report.json").read_text(encoding="utf-8"))["linears"]
    assert {linear["kl_alone"] for linear in linears} == {None}  # --report asks for it
    codes = [next((tmp_path / method).glob("*.data")).read_bytes() for method in methods]
    assert len({len(each) for each in codes}) == 1
    assert len(set(codes)) == len(methods)
    monkeypatch.setattr("edgerun.export.calibration.output_moments.find_spec", lambda _: None)
    assert main(["export", str(source), str(tmp_path / "none"), *options, "yaqa"]) == 2
    assert 'install it: pip install "edge-run[train]"' in capsys.readouterr().err


@pytest.mark.parametrize(("family", "method"), [("qwen3_moe", "yaqa"), ("lfm2", "learned")])
def test_models_without_gradients_are_refused(tmp_path: Path, family: str, method: str, monkeypatch, capsys) -> None:
    """Before any text is read: the file is not there."""
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    source = write_checkpoint(tmp_path / "checkpoint", family)
    options = ["--weights", "int4", "--calibration", str(tmp_path / "text.txt"), "--method", method]
    assert main(["export", str(source), str(tmp_path / "bundle"), *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("no gradients of models with experts or recurrent states; choose --method gptq")


def test_a_text_of_one_batch_has_no_halves(tmp_path: Path, monkeypatch) -> None:
    """Seed 3 holds out all but 260 tokens of a text that is hardly long enough."""
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    text, random = tmp_path / "text.jsonl", np.random.default_rng(0)
    words = [" ".join(random.choice(WORDS, count)) for count in (115, 239, 61, 61)]
    lines = [json.dumps({"messages": [{"role": "user", "content": each}]}) for each in words]
    text.write_text("\n".join(lines), encoding="utf-8")
    source = write_checkpoint(tmp_path / "checkpoint")
    options = ["--weights", "int4", "--calibration", str(text), "--context", "512", "--seed", "3", "--method"]
    assert main(["export", str(source), str(tmp_path / "bundle"), *options, "yaqa"]) == 0
    report = json.loads((tmp_path / "bundle" / "report.json").read_text(encoding="utf-8"))
    assert report["calibration"]["tokens"] == 261
