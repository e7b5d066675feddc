"""Embeddings equal the pooled hidden states of the float64 decoder."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import edgerun
from edgerun import BundleError, ContextError, Engine, InputError
from edgerun.edge.cli.main import main
from edgerun.export import FP32, INT8, ExportRecipe, export_checkpoint
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.models.manifest import GraphLayout
from support.layout_reference import Decoder
from support.layouts import LAYOUTS, write_layout
from support.tiny_models import write_bundle, write_checkpoint, write_json

TEXTS = ["the other thing", "an", "in the other thing and the other " * 10]
"""The last one takes several passes."""


def hidden_states(source: Path, token_ids: list[int]) -> np.ndarray:
    """The naive decoder's states before its LM head, float64 `[n, d]`: the only ones that give its logits."""
    config = read_config(source)
    weights = Checkpoint(source)
    logits = reference_logits(weights, config, np.asarray(token_ids), 256)
    head = weights.read("model.embed_tokens.weight").astype(np.float64)
    return np.linalg.lstsq(head, logits.T, rcond=None)[0].T


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def pooling(source: Path, **modes: bool) -> None:
    """Write the config of sentence-transformers into a checkpoint."""
    (source / "1_Pooling").mkdir(exist_ok=True)
    write_json(source / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **modes})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("hidden"), weights=ExportRecipe(FP32, hidden_states=True))


@pytest.mark.parametrize("mean", [None, False, True], ids=["no config", "last token", "mean"])
def test_embeddings_are_the_pooled_states_of_the_naive_decoder(tmp_path: Path, mean: bool | None) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    if mean is not None:
        pooling(source, pooling_mode_mean_tokens=mean, pooling_mode_lasttoken=not mean, pooling_mode_cls_token=False)
    recipe = ExportRecipe(FP32, hidden_states=True)
    exported = export_checkpoint(source, tmp_path / "bundle", recipe).bundle
    with edgerun.load(exported, threads=1) as engine:
        found = engine.embed(TEXTS)
        assert (found.dtype, found.shape) == (np.float32, (3, 64))
        assert max(len(engine.tokenizer.encode(text, add_special_tokens=True)) for text in TEXTS) > 128
        for text, embedding in zip(TEXTS, found, strict=True):
            states = hidden_states(source, engine.tokenizer.encode(text, add_special_tokens=True))
            expected = unit(states.mean(axis=0) if mean else states[-1])
            np.testing.assert_allclose(embedding, expected, atol=2e-5)
    # Exporting again over the bundle works: its pooling is one of the files that a bundle may have.
    export_checkpoint(source, tmp_path / "bundle", recipe)


def test_a_quantized_model_of_another_family_has_nearly_those_of_the_float_one(tmp_path: Path) -> None:
    exported = write_bundle(tmp_path, "qwen3", weights=ExportRecipe(INT8, hidden_states=True))
    with edgerun.load(exported, threads=1) as engine:
        for text, embedding in zip(TEXTS, engine.embed(TEXTS), strict=True):
            token_ids = engine.tokenizer.encode(text, add_special_tokens=True)
            states = hidden_states(tmp_path / "checkpoint", token_ids)
            assert float(embedding @ unit(states[-1])) > 0.999


def test_hidden_states_change_neither_weights_nor_answers(tiny_bundle: Path, bundle: Path) -> None:
    assert (bundle / "model.onnx.data").read_bytes() == (tiny_bundle / "model.onnx.data").read_bytes()
    with edgerun.load(bundle, threads=1) as engine, edgerun.load(tiny_bundle, threads=1) as other:
        assert engine.generate("the other", max_tokens=20).text == other.generate("the other", max_tokens=20).text


def test_answers_and_embeddings_do_not_disturb_each_other(bundle: Path) -> None:
    with edgerun.load(bundle, threads=1) as engine:
        texts = [engine.generate(text, max_tokens=8).text for text in TEXTS[:2]]
        expected = engine.embed(TEXTS)
        np.testing.assert_array_equal(engine.embed(TEXTS[::-1]), expected[::-1])
        wrong: list[object] = []

        def embed() -> None:
            wrong.extend(index for index in range(10) if not np.array_equal(engine.embed(TEXTS), expected))

        thread = threading.Thread(target=embed)
        thread.start()
        for index in range(10):
            assert engine.generate(TEXTS[index % 2], max_tokens=8).text == texts[index % 2]
        thread.join()
        assert not wrong
        assert engine.embed([]).shape == (0, 64)


def test_token_ids_are_embedded_as_they_are(bundle: Path) -> None:
    with edgerun.load(bundle, threads=1) as engine:
        expected = engine.embed(TEXTS)
        token_ids = [engine.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
        np.testing.assert_array_equal(engine.embed(token_ids), expected)
        np.testing.assert_array_equal(engine.embed([TEXTS[0], tuple(token_ids[1])]), expected[:2])
        for wrong in ([5, 300], [-1]):
            with pytest.raises(InputError, match="text 1 has a token id that the model does not; they are 0 to 299"):
                engine.embed(["a", wrong])


def test_embedding_can_be_cancelled_before_every_pass(bundle: Path) -> None:
    with edgerun.load(bundle, threads=1) as engine:
        asked: list[None] = []

        def cancelled() -> bool:
            asked.append(None)
            return len(asked) == 4

        with pytest.raises(edgerun.EdgeError, match="the embedding was cancelled"):
            engine.embed(TEXTS, cancelled=cancelled)
        assert engine.embed(TEXTS, cancelled=lambda: False).shape == (3, 64)


def test_what_cannot_be_embedded_is_refused(engine: Engine, bundle: Path) -> None:
    with pytest.raises(InputError, match=r"export the model with --hidden-states") as refused:
        engine.embed(["a"])
    # Clients of the server read it, whom folders of this machine do not concern.
    assert refused.value.what == (
        f"{engine.bundle.folder.name} does not give hidden states, which embeddings are made of"
    )
    with edgerun.load(bundle, threads=1) as other:
        with pytest.raises(InputError, match="text 1 is empty; give at least one character"):
            other.embed(["a", ""])
        with pytest.raises(ContextError, match="text 0 has 300 tokens and the context has room for 256; split it"):
            other.embed(["!" * 300])
        with pytest.raises(InputError, match="texts is 'the other thing'; it must be a list, each item "):
            other.embed("the other thing")
    with pytest.raises(edgerun.EdgeError, match="closed"):
        other.embed(["a"])


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        (
            {"pooling_mode_cls_token": True},
            "asks for the pooling cls; edge-run supports lasttoken and mean here",
        ),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "asks for the pooling mean and lasttoken"),
        ({}, "asks for the pooling of nothing"),
    ],
)
def test_another_pooling_is_refused_by_the_export(tmp_path: Path, modes: dict[str, bool], said: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    pooling(source, **modes)
    with pytest.raises(InputError, match=said):
        export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32, hidden_states=True))
    assert not (tmp_path / "bundle").exists()
    export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32))
    assert not (tmp_path / "bundle" / "pooling.json").exists()


def test_damaged_weights_are_an_error(bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    exported = export_checkpoint(source, tmp_path / "b", ExportRecipe(FP32, hidden_states=True)).bundle
    model = onnx.load(exported / "model.onnx", load_external_data=False)
    output = next(node for node in model.graph.node if node.output[0] == "hidden_states")
    output.op_type = "Log"
    output.input[0] = next(node.output[0] for node in model.graph.node if node.output[0] == "head.rows")
    onnx.save(model, exported / "model.onnx")
    (exported / "edge.json").unlink()
    with edgerun.load(exported, threads=1) as engine, pytest.raises(BundleError, match="zero or not finite"):
        engine.embed(["the other"])


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(name: str) -> Path:
        """A foreign layout whose graph gives the input of its LM head, as GenAI's builder does if asked to."""
        written = write_layout(tmp_path_factory.mktemp("foreign"), LAYOUTS[name])
        (graph,) = written.rglob("*.onnx")
        model = onnx.load(graph, load_external_data=False)
        made = {node.output[0]: node for node in model.graph.node}
        head = made["logits"]
        while head.op_type not in ("MatMul", "MatMulNBits", "Gemm"):
            head = made[head.input[0]]
        model.graph.node.append(helper.make_node("Identity", [head.input[0]], ["hidden_states"], name="hidden"))
        output = helper.make_tensor_value_info("hidden_states", onnx.TensorProto.FLOAT, ["batch", "sequence", 64])
        model.graph.output.append(output)
        onnx.save(model, graph)
        return written

    return folder


@pytest.mark.parametrize("name", ["genai", "optimum"])
@pytest.mark.parametrize("mean", [False, True], ids=["last token", "mean"])
def test_graphs_of_other_tools_that_give_hidden_states(
    foreign: Callable[[str], Path], name: str, mean: bool, tmp_path: Path
) -> None:
    layout, folder = LAYOUTS[name], foreign(name)
    pooling(folder, pooling_mode_mean_tokens=mean, pooling_mode_lasttoken=not mean)
    with edgerun.load(folder, threads=1, cache=False, context=200) as engine:
        token_ids = engine.tokenizer.encode(TEXTS[2], add_special_tokens=True)
        decoder = Decoder.of(layout)
        head = decoder.weights["model.embed_tokens.weight"]
        states = np.linalg.lstsq(head, decoder.forward(token_ids).T, rcond=None)[0].T
        expected = unit(states.mean(axis=0) if mean else states[-1])
        np.testing.assert_allclose(engine.embed([TEXTS[2]])[0], expected, atol=2e-5)


def test_the_command_exports_them_and_says_where_it_cannot(
    tmp_path: Path, foreign: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    pooling(source, pooling_mode_mean_tokens=True)
    assert main(["export", str(source), str(tmp_path / "out"), "--weights", "int8", "--hidden-states"]) == 0
    assert (tmp_path / "out" / "pooling.json").is_file()
    assert "--hidden-states" in json.loads((tmp_path / "out" / "edge.json").read_text(encoding="utf-8"))["command"]
    with edgerun.load(tmp_path / "out", threads=1) as engine:
        assert engine.embed(["a", "b"]).shape == (2, 64)
    capsys.readouterr()
    assert main(["export", str(foreign("genai")), str(tmp_path / "other"), "--hidden-states"]) == 2
    assert "--hidden-states needs a checkpoint of a family that edge-run exports itself" in capsys.readouterr().err
    with pytest.raises(InputError, match="--hidden-states needs edge-run's own layout"):
        ExportRecipe(FP32, layout=GraphLayout.GENAI, hidden_states=True)
