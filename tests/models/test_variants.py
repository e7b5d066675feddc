"""Choosing among the graphs of published models."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun import BundleError
from edgerun.models.find import find_model
from edgerun.models.manifest import DeviceKind
from edgerun.models.variants import GraphFiles, choose_graph

FORMS = ("", "_fp16", "_quantized", "_int8", "_uint8", "_q4", "_q4f16", "_bnb4")
TRANSFORMERS_JS = [
    "config.json",
    "tokenizer.json",
    *(f"onnx/model{form}.onnx" for form in FORMS),
    "onnx/model.onnx_data",
]
MERGED = [f"onnx/decoder_model_merged{form}.onnx" for form in FORMS]
OLD_OPTIMUM = ["config.json", "decoder_model.onnx", "decoder_with_past_model.onnx"]
ACC4 = "cpu_and_mobile/cpu-int4-rtn-block-32-acc-level-4"
GENAI = [
    f"{folder}/{name}"
    for folder in (
        ACC4,
        "cpu_and_mobile/cpu-int4-rtn-block-32",
        "cuda/cuda-int4-rtn-block-32",
        "cuda/cuda-fp16",
        "directml/directml-int4-awq-block-128",
    )
    for name in ("model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json")
]


@pytest.mark.parametrize(
    ("files", "variant", "kind", "graph"),
    [
        (["model.onnx"], None, DeviceKind.CPU, "model.onnx"),
        (["anything.onnx"], None, DeviceKind.CPU, "anything.onnx"),
        (TRANSFORMERS_JS, None, DeviceKind.CPU, "onnx/model_q4.onnx"),
        (TRANSFORMERS_JS, None, DeviceKind.GPU, "onnx/model_q4f16.onnx"),
        (TRANSFORMERS_JS, "int8", DeviceKind.CPU, "onnx/model_int8.onnx"),
        (TRANSFORMERS_JS, "INT4", DeviceKind.CPU, "onnx/model_q4.onnx"),
        (TRANSFORMERS_JS, "fp32", DeviceKind.CPU, "onnx/model.onnx"),
        (TRANSFORMERS_JS, "model_fp16", DeviceKind.CPU, "onnx/model_fp16.onnx"),
        (TRANSFORMERS_JS, "onnx/model_bnb4.onnx", DeviceKind.CPU, "onnx/model_bnb4.onnx"),
        (["onnx/model.onnx", "onnx/model_quantized.onnx"], "int8", DeviceKind.CPU, "onnx/model_quantized.onnx"),
        (["onnx/model.onnx", "onnx/model_fp16.onnx"], None, DeviceKind.CPU, "onnx/model.onnx"),
        (["onnx/model_q4f16.onnx", "onnx/model_fp16.onnx"], None, DeviceKind.CPU, "onnx/model_q4f16.onnx"),
        (MERGED, None, DeviceKind.CPU, "onnx/decoder_model_merged_q4.onnx"),
        ([*OLD_OPTIMUM, "decoder_model_merged.onnx"], None, DeviceKind.CPU, "decoder_model_merged.onnx"),
        (["model.onnx", "onnx/model.onnx"], None, DeviceKind.CPU, "model.onnx"),
        (["edge.json", "model.onnx", "other_q4.onnx"], None, DeviceKind.CPU, "model.onnx"),
        (GENAI, None, DeviceKind.CPU, f"{ACC4}/model.onnx"),
        (GENAI, "cpu-int4-rtn-block-32", DeviceKind.CPU, "cpu_and_mobile/cpu-int4-rtn-block-32/model.onnx"),
        (GENAI, "directml", DeviceKind.CPU, "directml/directml-int4-awq-block-128/model.onnx"),
        (GENAI, "fp16", DeviceKind.CPU, "cuda/cuda-fp16/model.onnx"),
        (GENAI, "cuda", DeviceKind.GPU, "cuda/cuda-int4-rtn-block-32/model.onnx"),
        (GENAI, "acc-level", DeviceKind.CPU, f"{ACC4}/model.onnx"),
    ],
)  # fmt: skip
def test_the_chosen_graph(files: list[str], variant: str | None, kind: DeviceKind, graph: str) -> None:
    assert choose_graph(files, variant, kind=kind) == GraphFiles(graph)


def test_separate_decoders_are_chosen_together() -> None:
    assert choose_graph(OLD_OPTIMUM) == GraphFiles("decoder_with_past_model.onnx", "decoder_model.onnx")
    quantized = ["onnx/decoder_model_q4.onnx", "onnx/decoder_with_past_model_q4.onnx", "onnx/decoder_model.onnx"]
    chosen = GraphFiles("onnx/decoder_with_past_model_q4.onnx", "onnx/decoder_model_q4.onnx")
    assert choose_graph(quantized) == choose_graph(quantized, "q4") == chosen
    assert choose_graph(quantized, "fp32") == GraphFiles("onnx/decoder_model.onnx")


def test_genai_config_names_the_graph() -> None:
    files = ["a/genai_config.json", "a/phi.onnx", "a/mtp.onnx", "b/genai_config.json", "b/model.onnx"]
    assert choose_graph(files, "a", named={"a": "phi.onnx"}) == GraphFiles("a/phi.onnx")
    with pytest.raises(BundleError, match=r"^the folder has several graphs .* equally well; name one of a/mtp, a/phi$"):
        choose_graph(files, "a")
    assert choose_graph(["genai_config.json", "x.onnx", "y.onnx"], named={"": "y.onnx"}) == GraphFiles("y.onnx")


@pytest.mark.parametrize("variant", ["other", "other.onnx", "onnx/other"])
def test_any_file_can_be_chosen_by_name(variant: str) -> None:
    files = ["onnx/model.onnx", "onnx/model_q4.onnx", "onnx/other.onnx"]
    assert choose_graph(files, variant) == GraphFiles("onnx/other.onnx")
    assert choose_graph(files) == GraphFiles("onnx/model_q4.onnx")
    old = ["decoder_model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx"]
    assert choose_graph(old, "decoder_with_past_model") == GraphFiles(old[2], old[0])


@pytest.mark.parametrize(
    ("files", "variant", "message"),
    [
        (TRANSFORMERS_JS, "q2", "m has no variant q2; name one of bnb4, fp16, fp32, int8, q4, q4f16, quantized, uint8"),
        (
            ["directml/int4-awq/model.onnx", "directml/int4-rtn/model.onnx"],
            None,
            "m has several graphs that suit equally well; name one of int4-awq, int4-rtn",
        ),
        (["a/x/model.onnx", "b/x/model.onnx"], "y", "m has no variant y; name one of a/x, b/x"),
        (["README.md"], None, "m holds no .onnx file; give an .onnx file or a model folder"),
        (
            ["model.safetensors", "config.json"],
            None,
            "m holds no .onnx file; it looks like a checkpoint: run edge-run export m OUT first",
        ),
        (
            ["a-Q4_K_M.gguf", "a-Q8_0.gguf"],
            "q8_0",
            "m holds no .onnx file; it holds GGUF weights: run edge-run export m/a-Q8_0.gguf OUT first",
        ),
        (
            ["pytorch_model.bin"],
            None,
            "m holds no .onnx file; its weights are pickles, which can run code; look for safetensors or ONNX weights "
            "of it",
        ),
    ],
)
def test_failed_choices_are_errors_of_one_line(files: list[str], variant: str | None, message: str) -> None:
    with pytest.raises(BundleError, match=f"^{re.escape(message)}$"):
        choose_graph(files, variant, where="m")


@pytest.mark.parametrize(
    ("beside", "what"),
    [
        ("encoder_model.onnx", "an encoder-decoder model (encoder_model.onnx says so)"),
        ("vision_encoder_q4.onnx", "a model of images and text (vision_encoder_q4.onnx says so)"),
        ("phi-3-v-128k-vision.onnx", "a model of images and text (phi-3-v-128k-vision.onnx says so)"),
        ("audio_encoder_fp16.onnx", "a model of sound and text (audio_encoder_fp16.onnx says so)"),
        ("embed_tokens.onnx", "a model whose embedding is a graph of its own (embed_tokens.onnx says so)"),
        ("iterator.onnx", "a model cut into stages (iterator.onnx says so)"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_decoders_of_multimodal_models_are_refused(beside: str, what: str, alone: bool) -> None:
    files = [f"onnx/{beside}"] if alone else ["onnx/decoder_model_merged_q4.onnx", f"onnx/{beside}"]
    with pytest.raises(BundleError, match=f"^m is {re.escape(what)}; edge-run runs text decoders of one graph"):
        choose_graph(files, where="m")
    assert choose_graph(["model.onnx", f"other/{beside}"]) == GraphFiles("model.onnx")


def test_a_decoder_of_a_multimodal_model_is_chosen_with_its_embedding() -> None:
    """The embedding is the one of its precision, so is the image encoder if there is one; that of sound is left out."""
    files = [
        f"onnx/{part}{suffix}.onnx"
        for part in ("decoder_model_merged", "embed_tokens", "vision_encoder", "audio_encoder")
        for suffix in ("", "_q4", "_fp16")
    ]
    tower = "onnx/vision_encoder_q4.onnx"
    q4 = GraphFiles("onnx/decoder_model_merged_q4.onnx", embedding="onnx/embed_tokens_q4.onnx", vision=tower)
    assert choose_graph(files) == choose_graph(files, "q4") == q4
    decoder, embedding, plain = (
        f"onnx/{part}.onnx" for part in ("decoder_model_merged", "embed_tokens", "vision_encoder")
    )
    assert choose_graph(files, "fp32") == GraphFiles(decoder, embedding=embedding, vision=plain)
    fewer = [file for file in files if file != tower]
    assert choose_graph(fewer).vision == plain
    assert choose_graph([file for file in fewer if file != plain]).vision == "onnx/vision_encoder_fp16.onnx"
    with pytest.raises(BundleError, match="is an encoder-decoder model"):
        choose_graph([*files, "onnx/encoder_model_q4.onnx"])
    with pytest.raises(BundleError, match="is a model of images and text"):
        choose_graph([file for file in files if file != q4.embedding])


def test_the_parts_of_a_model_for_genai_are_chosen_together() -> None:
    files = ["genai_config.json", "text.onnx", "embedding.onnx", "vision.onnx"]
    chosen = GraphFiles("text.onnx", embedding="embedding.onnx", vision="vision.onnx")
    assert choose_graph(files, named={"": "text.onnx"}) == choose_graph(files, named={".": "text.onnx"}) == chosen
    long = [file.replace("vision.", "phi-3.5-v-vision.").replace("emb", "phi-3.5-v-emb") for file in files]
    assert choose_graph(long, named={"": "text.onnx"}).vision == "phi-3.5-v-vision.onnx"
    with pytest.raises(BundleError, match="is a model of images and text"):
        choose_graph(files[1:], "text")


PARTS = st.sampled_from(
    ["model", "decoder_model", "q4", "_fp16", "onnx", "cpu-int4", "cuda", ".onnx", "/", "genai_config.json", "vision"]
)


@given(st.lists(st.lists(PARTS, max_size=6).map("".join), max_size=8), st.none() | PARTS, st.sampled_from(DeviceKind))
def test_any_files_give_one_of_them_or_an_error(files: list[str], variant: str | None, kind: DeviceKind) -> None:
    with suppress(BundleError):
        chosen = choose_graph(files, variant, kind=kind)
        assert {chosen.graph, chosen.prefill or chosen.graph} <= {str(PurePosixPath(file)) for file in files}


def test_a_variant_of_a_local_folder_is_named_after_a_colon(tmp_path: Path) -> None:
    for precision in ("fp32", "int4"):
        (tmp_path / "model" / precision).mkdir(parents=True)
        (tmp_path / "model" / precision / "model.onnx").touch()
    assert find_model(f"{tmp_path}/model:int4") == tmp_path / "model" / "int4" / "model.onnx"
    with pytest.raises(BundleError, match=r"has no variant q8; name one of fp32, int4$"):
        find_model(f"{tmp_path}/model:q8")


@pytest.mark.skipif(sys.platform == "win32" or "EDGERUN_WINDOWS_FILES" in os.environ, reason="names with colons")
def test_a_folder_with_a_colon_in_its_name_precedes_a_variant(tmp_path: Path) -> None:
    (tmp_path / "model" / "int4").mkdir(parents=True)
    (tmp_path / "model:int4").mkdir()
    assert find_model(f"{tmp_path}/model:int4") == tmp_path / "model:int4"
