"""Encoders: vectors and scores equal those of NumPy, and of transformers; language models are told apart from them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import edgerun
from edgerun import BundleError, ContextError, EdgeError, Encoder, InputError
from edgerun.runtime.encoders.encoder import load_either
from edgerun.runtime.graph.encoder_graph import EncoderGraph
from support.encoders import SIZE, WEIGHTS, encoder_tokenizer, states_of, write_encoder
from support.hub_server import files_of, own_hub
from support.tiny_models import write_json

TEXTS = ["query: what is in the sea", "passage: a", "a fish and another fish 7"]


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def own_ids(encoder: Encoder, text: str) -> list[int]:
    ids = encoder.tokenizer.encode(text, add_special_tokens=True)
    assert (ids[0], ids[-1]) == (2, 3)
    return ids


@pytest.mark.parametrize("types", [True, False], ids=["type ids", "no type ids"])
@pytest.mark.parametrize(
    ("output", "pooling", "expected"),
    [
        ("last_hidden_state", None, lambda states: states.mean(axis=0)),
        ("last_hidden_state", "pooling_mode_mean_tokens", lambda states: states.mean(axis=0)),
        ("last_hidden_state", "pooling_mode_cls_token", lambda states: states[0]),
        ("last_hidden_state", "pooling_mode_lasttoken", lambda states: states[-1]),
        ("sentence_embedding", "pooling_mode_max_tokens", None),
        ("sentence_embedding", "pooling_mode_cls_token", lambda states: states.mean(axis=0)),
    ],
)
def test_vectors_are_pooled_states(
    tmp_path: Path, output: str, pooling: str | None, expected: Callable[[Any], Any] | None, types: bool
) -> None:
    write_encoder(tmp_path, output, pooling=pooling, types=types)
    if expected is None:
        with pytest.raises(
            InputError, match="asks for the pooling pooling_mode_max_tokens; edge-run supports mean and"
        ):
            edgerun.load_encoder(tmp_path)
        return
    with edgerun.load_encoder(tmp_path, threads=1) as encoder:
        found = encoder.embed(TEXTS)
        assert (found.dtype, found.shape) == (np.float32, (3, SIZE))
        for text, vector in zip(TEXTS, found, strict=True):
            np.testing.assert_allclose(vector, unit(expected(states_of(own_ids(encoder, text)))), atol=2e-6)
        # A text's vector does not depend on what is embedded with it.
        np.testing.assert_array_equal(encoder.embed([own_ids(encoder, each) for each in TEXTS[::-1]]), found[::-1])
        assert encoder.embed([]).shape == (0, SIZE)


QUANTIZED = """
    eight, scale, point = DynamicQuantizeLinear(embedded)
    rough = DequantizeLinear(eight, scale, point)
    mixed = MatMul(rough, mix)
"""


@pytest.mark.parametrize("output", ["last_hidden_state", "sentence_embedding", "logits"])
@pytest.mark.parametrize(
    ("changes", "passes"),
    [({}, 4), ({"int64[batch,": "int64[1,"}, 12), ({"    mixed = MatMul(embedded, mix)\n": QUANTIZED}, 12)],
    ids=["an open batch", "a batch of one", "activations quantized together"],
)
def test_texts_of_similar_length_share_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, changes: dict[str, str], passes: int
) -> None:
    texts = ["a" * count for count in (9, 30, 10, 8, 31, 50, 9, 49, 20, 8, 29, 10)]
    one_pass, sizes = EncoderGraph._pass, list[int]()

    def counted(graph: EncoderGraph, given: list[Any]) -> Any:
        sizes.append(len(given))
        return one_pass(graph, given)

    with edgerun.load_encoder(write_encoder(tmp_path, output, changes=changes), threads=1) as encoder:

        def results(given: list[str]) -> Any:
            return encoder.score("bc", given).scores if output == "logits" else encoder.embed(given)

        alone = np.concatenate([results([each]) for each in texts])
        monkeypatch.setattr(EncoderGraph, "_pass", counted)
        np.testing.assert_allclose(results(texts), alone, rtol=0, atol=1e-5)
    assert (len(sizes), sum(sizes)) == (passes, len(texts))


def test_scores_are_those_of_pairs(tmp_path: Path) -> None:
    documents = ["a fish", "", "the other thing. 9"]
    with edgerun.load_encoder(write_encoder(tmp_path, "logits"), threads=1) as encoder:
        found = encoder.score("a query", documents)
        tokenizer, tokens = encoder_tokenizer(), 0
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for document, score in zip(documents, found.scores, strict=True):
            pair = tokenizer.encode("a query", document)
            assert set(pair.type_ids) == {0, 1}
            logit = states_of(pair.ids, pair.type_ids)[0] @ WEIGHTS["head"]
            assert score == pytest.approx(1 / (1 + np.exp(-logit.item())), abs=2e-6)
            tokens += len(pair.ids)
        assert (found.prompt_tokens, found.read_tokens) == (tokens, tokens)
        assert np.unique(found.scores.round(4)).size == 3


def test_what_cannot_be_done_is_one_line(tmp_path: Path, tiny_bundle: Path) -> None:
    folder = write_encoder(tmp_path / "vectors")
    with edgerun.load_encoder(folder, threads=1) as encoder:
        assert encoder.context == 60
        with pytest.raises(
            InputError, match="vectors makes vectors of texts, not scores of pairs; choose another model"
        ):
            encoder.score("a", ["b"])
        with pytest.raises(ContextError, match="text 1 has 62 tokens and the context has room for 60; split it"):
            encoder.embed(["a", "b" * 60])
        with pytest.raises(InputError, match="text 0 has a token id that the model does not"):
            encoder.embed([[9999]])
        with pytest.raises(InputError, match="the text is not valid Unicode"):
            encoder.tokenizer.encode_pair("a", "\ud800")
        with pytest.raises(EdgeError, match="the embedding was cancelled"):
            encoder.embed(TEXTS, cancelled=lambda: True)
    with pytest.raises(EdgeError, match="this encoder is closed"):
        encoder.embed(TEXTS)
    with edgerun.load_encoder(write_encoder(tmp_path / "scores", "logits"), threads=1) as encoder:
        with pytest.raises(InputError, match="scores makes scores of pairs of texts, not vectors"):
            encoder.embed(["a"])
        with pytest.raises(ContextError, match="the pair of document 1 has 64 tokens and the context has room for 60"):
            encoder.score("a", ["b", "c" * 60])
        with pytest.raises(InputError, match="scores takes no instruction; leave it out"):
            encoder.score("a", ["b"], instruction="c")
        with pytest.raises(EdgeError, match="the ranking was cancelled"):
            encoder.score("a", ["b"], cancelled=lambda: True)
    with pytest.raises(BundleError, match=r"is an encoder \(it takes token_type_ids\).*edgerun.load_encoder"):
        edgerun.load(folder)
    with pytest.raises(BundleError, match=r"is not an encoder: it takes .*; encoders take input_ids.*edgerun.load"):
        edgerun.load_encoder(tiny_bundle)
    write_json(folder / "config.json", {})
    with pytest.raises(BundleError, match="leaves the size of its vocabulary open; put the model's config.json"):
        edgerun.load_encoder(folder)


def test_a_layer_behind_the_pooling_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "2_Dense").mkdir()
    write_json(tmp_path / "2_Dense" / "config.json", {})
    with pytest.raises(BundleError, match="lacks the layer of 2_Dense/config.json"):
        edgerun.load_encoder(write_encoder(tmp_path))
    edgerun.load_encoder(write_encoder(tmp_path, "sentence_embedding")).close()


def test_a_model_is_told_by_the_outputs_of_its_graph(tmp_path: Path, tiny_bundle: Path) -> None:
    for output in ("last_hidden_state", "sentence_embedding", "logits"):
        with load_either(str(write_encoder(tmp_path / output, output))) as model:
            assert isinstance(model, Encoder)
    with load_either(str(tiny_bundle), cache=False) as model:
        assert isinstance(model, edgerun.Engine)
    # The same graph of a language model without a cache.
    write_json(tmp_path / "logits" / "config.json", {"architectures": ["BertLMHeadModel"], "vocab_size": 90})
    with pytest.raises(BundleError, match="is an encoder"):
        load_either(str(tmp_path / "logits"))


def test_an_encoder_of_the_hub_comes_with_its_pooling(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", pooling="pooling_mode_cls_token")
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "query: "}})
    with own_hub(tmp_path / "hf") as hub:
        hub.repo("org/vectors", files_of(folder))
        with edgerun.load_encoder("org/vectors", threads=1) as encoder:
            expected = [unit(states_of(own_ids(encoder, text))[0]) for text in TEXTS]
            np.testing.assert_allclose(encoder.embed(TEXTS), expected, atol=2e-6)
            assert encoder.prompts == {"query": "query: "}


def test_threads_use_an_encoder_at_a_time(tmp_path: Path) -> None:
    with edgerun.load_encoder(write_encoder(tmp_path), threads=1) as encoder:
        expected, wrong = encoder.embed(TEXTS), list[int]()

        def embed() -> None:
            wrong.extend(index for index in range(20) if not np.array_equal(encoder.embed(TEXTS), expected))

        threads = [threading.Thread(target=embed) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert"])
@pytest.mark.parametrize("task", ["states", "scores"])
def test_exports_of_transformers_give_what_it_computes(tmp_path: Path, kind: str, task: str) -> None:
    torch = pytest.importorskip("torch", reason="needs the oracle extra")
    transformers = pytest.importorskip("transformers", reason="needs the oracle extra")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    settings = {**sizes, "vocab_size": 90, "max_position_embeddings": 80, "num_labels": 1, "initializer_range": 0.3}
    config = transformers.AutoConfig.for_model(
        kind, **settings, attn_implementation="eager", pad_token_id=0, eos_token_id=3
    )
    auto = transformers.AutoModel if task == "states" else transformers.AutoModelForSequenceClassification
    model = auto.from_config(config).eval()

    class Exported(torch.nn.Module):
        """Takes its inputs by their places, which the models of transformers 5 do not."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: Any) -> Any:
            return self.model(**dict(zip(taken, given, strict=True))).to_tuple()

    taken = ["input_ids", "attention_mask", *(["token_type_ids"] if kind == "bert" else [])]
    output = "last_hidden_state" if task == "states" else "logits"
    ids = torch.tensor([[2, 9, 8, 3]])
    example = (ids, torch.ones_like(ids), torch.zeros_like(ids))[: len(taken)]
    write_encoder(tmp_path, output)
    axes = {name: {0: "batch", 1: "sequence"} for name in [*taken, "last_hidden_state"]} | {"logits": {0: "batch"}}
    names = [output, *(["pooler_output"] if task == "states" and kind != "modernbert" else [])]
    torch.onnx.export(
        Exported().eval(),
        example,
        str(tmp_path / "onnx" / "model.onnx"),
        input_names=taken,
        output_names=names,
        dynamic_axes={name: axes.get(name, {0: "batch"}) for name in [*taken, *names]},
        dynamo=False,
        opset_version=17,
    )
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    assert onnx.load(tmp_path / "onnx" / "model.onnx").graph.input
    with load_either(str(tmp_path)) as encoder, torch.no_grad():
        assert isinstance(encoder, Encoder)
        if task == "states":
            found = encoder.embed(TEXTS)
            for text, vector in zip(TEXTS, found, strict=True):
                token_ids = torch.tensor([own_ids(encoder, text)])
                states = model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids))[0][0].numpy()
                np.testing.assert_allclose(vector, unit(states.mean(axis=0)), atol=2e-4)
            return
        scores = encoder.score("a query", ["a fish", "the other thing"]).scores
        for document, score in zip(["a fish", "the other thing"], scores, strict=True):
            pair = [torch.tensor([each]) for each in encoder.tokenizer.encode_pair("a query", document)]
            given = {"input_ids": pair[0], **({"token_type_ids": pair[1]} if kind == "bert" else {})}
            assert score == pytest.approx(torch.sigmoid(model(**given)[0]).item(), abs=2e-4)
