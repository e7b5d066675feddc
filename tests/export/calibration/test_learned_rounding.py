"""Rounding learned layer by layer, after GPTQ with gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from edgerun.edge.cli.main import main
from edgerun.export import Method, WeightFormat
from edgerun.export.calibration.calibration_text import split_texts
from edgerun.export.calibration.output_moments import OutputMoments
from edgerun.export.check.contract_session import ContractSession
from edgerun.export.checkpoint.source import RowRange
from edgerun.export.quantization.codes import dequantized, in_blocks, unpack_codes
from edgerun.export.quantization.methods import QUANTIZERS
from support.tiny_models import WORDS, write_checkpoint

torch = pytest.importorskip("torch", reason="needs the train extra")
torch.set_num_threads(1)  # two test processes share the cores
FORMATS = (
    WeightFormat(4, 32),
    WeightFormat(4, 64, half_scales=True),
    WeightFormat(2, 32, zero_points=True),
    WeightFormat(8, 32),
)


def matrix_of(weight_format: WeightFormat, rows: int = 6, columns: int = 80):
    from edgerun.export.calibration.learned_rounding import LearnedMatrix

    weights = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    start = QUANTIZERS[Method.K_QUANT](weights, weight_format, None)
    return weights, start, LearnedMatrix(start, weights, weight_format)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_numbers_begin_at_the_quantized_matrix(weight_format: WeightFormat) -> None:
    _, start, learned = matrix_of(weight_format)
    np.testing.assert_array_equal(learned.rows().packed, start.packed)
    np.testing.assert_array_equal(learned.rows().scales, start.scales)
    expected = dequantized(start, 80, weight_format)
    np.testing.assert_allclose(learned.matrix().detach().numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_gradients_of_codes_and_scales_are_those_of_a_dense_reference(weight_format: WeightFormat) -> None:
    """The error sum(e G e) of e = x (W^ - W)T, by hand: its gradient at W^ is 2 G eT x."""
    weights, start, learned = matrix_of(weight_format)
    random = np.random.default_rng(1)
    inputs, mixture = random.standard_normal((50, 80)), random.standard_normal((6, 6))
    moments = mixture @ mixture.T
    errors = torch.from_numpy(inputs) @ (learned.matrix().double() - torch.from_numpy(weights).double()).T
    (errors @ torch.from_numpy(moments) * errors).sum().backward()

    exact = dequantized(start, 80, weight_format).astype(np.float64)
    at_matrix = 2 * moments @ (inputs @ (exact - weights).T).T @ inputs
    blocks = in_blocks(at_matrix.astype(np.float32), weight_format)
    np.testing.assert_allclose(learned.codes.grad, blocks * start.scales[..., None], rtol=1e-4, atol=1e-4)
    # A matrix is linear in its scales, so the gradient at a factor of one is the matrix's own share.
    of_factors = (blocks * in_blocks(exact.astype(np.float32), weight_format)).sum(axis=-1)
    np.testing.assert_allclose(learned.factors.grad, of_factors, rtol=1e-3, atol=1e-2)


def test_codes_leave_their_places_only_where_a_step_takes_them() -> None:
    weight_format = WeightFormat(4, 32)
    _, start, learned = matrix_of(weight_format)
    with torch.no_grad():
        learned.codes[0, 0, 0] += 1
        learned.codes[1, 0, 0] += 100
    before, after = (unpack_codes(each.packed, 4).astype(int) for each in (start, learned.rows()))
    assert after[1, 0, 0] == 15
    assert after[0, 0, 0] == min(before[0, 0, 0] + 1, 15)
    assert (before != after).sum() <= 2


def test_text_beyond_the_calibration_text_is_for_learning_alone() -> None:
    texts = list(np.random.default_rng(0).integers(0, 300, (200, 50)))
    plain, split = split_texts(texts, "a file", 64), split_texts(texts, "a file", 64, most=4000)
    sizes = [sum(map(len, part)) for part in (split.held_out, split.calibration, split.more)]
    assert sizes == [1000, 3000, 6000]
    assert plain.more == ()
    parts = [text.tobytes() for part in (split.held_out, split.calibration, split.more) for text in part]
    assert sorted(parts) == sorted({text.tobytes() for text in texts})
    little = split_texts(texts, "a file", 64, most=20000)
    assert sum(map(len, little.more)) >= 10000 // 16 - 50


def words(seed: int, count: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def log_probabilities(bundle: Path, tokens: list[int]) -> np.ndarray:
    """Those of the graph as it runs, at all positions of texts of 64 tokens."""
    session, found = ContractSession(bundle, 64), []
    for text in np.array(tokens[: len(tokens) // 64 * 64]).reshape(-1, 64):
        session.reset()
        found.append(session.forward(text, np.arange(64)).astype(np.float64))
    logits = np.concatenate(found)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_an_export_by_learned_rounding_is_nearer_to_the_float_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    source, text = write_checkpoint(tmp_path / "checkpoint"), tmp_path / "text.txt"
    text.write_text(words(0, 5000), encoding="utf-8")
    options = ["--weights", "int4", "--head", "int8", "--calibration", str(text), "--method"]
    assert main(["export", str(source), str(tmp_path / "float"), "--weights", "fp32"]) == 0
    for name, method in (("yaqa", "yaqa"), ("learned", "learned"), ("again", "learned")):
        assert main(["export", str(source), str(tmp_path / name), *options, method]) == 0
    data = {name: next((tmp_path / name).glob("*.data")).read_bytes() for name in ("yaqa", "learned", "again")}
    assert len(data["learned"]) == len(data["yaqa"])
    graphs = [(tmp_path / name / "model.onnx").read_bytes() for name in ("yaqa", "learned")]
    assert graphs[0] == graphs[1]  # so speed is the same
    assert data["learned"] == data["again"] != data["yaqa"]
    held_out = Tokenizer.from_file(str(source / "tokenizer.json")).encode(words(1, 1600)).ids
    exact, *others = (log_probabilities(tmp_path / name, held_out) for name in ("float", "yaqa", "learned"))
    yaqa, learned = ((np.exp(exact) * (exact - each)).sum(axis=1).mean() for each in others)
    assert learned < 0.95 * yaqa
    moments = OutputMoments.of  # without an error that is a number, GPTQ's codes stay

    def unknown(self: OutputMoments, rows: RowRange) -> np.ndarray | None:
        found = moments(self, rows)
        return np.full_like(found, np.nan) if rows.name.startswith("states.") and found is not None else found

    with monkeypatch.context() as patched:
        patched.setattr(OutputMoments, "of", unknown)
        patched.setattr("edgerun.export.calibration.learned_rounding.STEPS", 1)
        assert main(["export", str(source), str(tmp_path / "unknown"), *options, "learned"]) == 0
    assert next((tmp_path / "unknown").glob("*.data")).read_bytes() != data["learned"]
    monkeypatch.setattr("edgerun.export.calibration.output_moments.find_spec", lambda _: None)
    assert main(["export", str(source), str(tmp_path / "none"), *options, "learned"]) == 2
    assert "--method learned needs PyTorch" in capsys.readouterr().err
