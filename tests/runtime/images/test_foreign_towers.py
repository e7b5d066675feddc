"""Models that see, in the layouts of other exporters: every way that images come in, and what is wrong with some."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the images extra")
pytest.importorskip("onnx", reason="needs the export extra")
pytest.importorskip("starlette", reason="needs the serve extra")

from onnx import TensorProto

import edgerun
from edgerun import BundleError, Engine, InputError, Speculation
from edgerun.models.bundle import SEEING_FAMILIES, open_bundle
from edgerun.runtime.images.image_processors import PROCESSORS
from edgerun.runtime.images.vision_model import VisionModel
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.commands import Capture, json_of
from support.foreign_towers import IMAGE_TOKEN, tower_matrix, write_seeing_genai, write_seeing_layout, write_tower
from support.serving import served
from support.vision_models import random_image

OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 0}
LAYOUTS = ["community", "optimum", "community-half", "for-genai"]


def asked(image: bytes, text: str = "the sea and the sand") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]


def tokens_of(reply: edgerun.Reply) -> list[int]:
    return [each.token_id for each in reply.logprobs]


@pytest.fixture(scope="module", params=LAYOUTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, (base, _, kind) = tmp_path_factory.mktemp("foreign") / "seeing", request.param.partition("-")
    return write_seeing_genai(target) if kind == "genai" else write_seeing_layout(target, base, half=kind == "half")


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with edgerun.load(folder, threads=1) as engine:
        yield engine


def test_features_are_those_of_the_tower(engine: Engine) -> None:
    vision = engine.model.vision
    assert vision is not None
    seen = vision.see(random_image(1, (32, 32)))
    tile = vision.processor.pixel_values(np.asarray(seen._tiles[0]))[0]
    quarters = tile.reshape(3, 2, 16, 2, 16).mean(axis=(2, 4)).reshape(3, 4).T
    np.testing.assert_allclose(seen.features(0, 4)[0], quarters @ tower_matrix(), atol=2e-2)


def test_another_image_gives_another_answer_and_drafts_change_none(engine: Engine) -> None:
    images = [random_image(number) for number in (1, 2, 1)]
    first, second, again = (tokens_of(engine.generate(asked(each), **OPTIONS)) for each in images)
    assert first == again != second
    engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
    question = asked(images[0], "the sea the sea the sea the sea")
    expected = engine.generate(question, **OPTIONS | {"speculation": Speculation.OFF})
    found = engine.generate(question, **OPTIONS | {"speculation": Speculation.parse("suffix,recycle")})
    assert tokens_of(found) == tokens_of(expected)
    assert found.stats.drafted > 0


def test_a_second_question_takes_no_pass_over_the_image(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.generate(asked(random_image(3)), **OPTIONS)
    monkeypatch.setattr(VisionModel, "features", lambda *_: pytest.fail("the tower ran again"))
    stats = engine.generate(asked(random_image(3), "other things"), **OPTIONS).stats
    assert stats.reused_tokens > 20


def test_text_alone_is_as_without_a_tower(folder: Path, engine: Engine, tmp_path: Path) -> None:
    (blind := tmp_path / "blind").mkdir()
    for path in filter(Path.is_file, folder.rglob("*")):
        (blind / path.relative_to(folder)).parent.mkdir(exist_ok=True)
        if "vision" not in path.name:
            (blind / path.relative_to(folder)).write_bytes(path.read_bytes())
    said = [{"role": "user", "content": [{"type": "text", "text": "the sea"}]}]
    with edgerun.load(blind, threads=1) as other:
        assert tokens_of(other.generate(said, **OPTIONS)) == tokens_of(engine.generate(said, **OPTIONS))
        with pytest.raises(InputError, match="reads text alone"):
            other.generate(asked(random_image(1)), **OPTIONS)


def test_the_command_line_and_the_server_take_images(
    folder: Path, engine: Engine, tmp_path: Path, capsys: Capture
) -> None:
    (image := tmp_path / "a.png").write_bytes(random_image(4))
    expected = engine.generate(asked(random_image(4)), **OPTIONS).text
    common = [folder, "-p", "the sea and the sand", "-n", 24, "--temperature", 0, "--ignore-eos", "--json"]
    assert json_of(capsys, *common, "--image", image)["text"] == expected
    url = f"data:image/png;base64,{base64.b64encode(random_image(4)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "the sea and the sand"}]
    body = {"model": "seeing", "messages": [{"role": "user", "content": content}], "max_tokens": 24, "temperature": 0}
    with served([folder], "--threads", "1") as server:
        answer = server.request("POST", "/v1/chat/completions", body | {"ignore_eos": True}).json()
        assert "vision" in server.request("POST", "/api/show", {"model": "seeing"}).json()["capabilities"]
    assert answer["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"pixel_values": (1, ["n", 3, 32, 32]), "depth": (1, ["n"])}, "takes depth of 1 dimensions"),
        ({"pixel_values": (1, ["patches", 48])}, "takes pixel_values of 2 dimensions"),
    ],
)
def test_towers_with_other_inputs_are_refused(tmp_path: Path, inputs: dict[str, Any], message: str) -> None:
    folder = write_seeing_layout(tmp_path / "model")
    write_tower(folder / "onnx" / "vision_encoder_q4.onnx", inputs)
    with edgerun.load(folder, threads=1) as engine, pytest.raises(BundleError, match=message):
        engine.generate(asked(random_image(1)), **OPTIONS)


def test_other_numbers_of_features_are_refused(tmp_path: Path) -> None:
    folder = write_seeing_layout(tmp_path / "model")
    (folder / "processor_config.json").write_text('{"image_seq_len": 9}', encoding="utf-8")
    with edgerun.load(folder, threads=1) as engine, pytest.raises(BundleError, match="4 features of .* 9 tokens"):
        engine.generate(asked(random_image(1)), **OPTIONS)


def test_a_damaged_tower_is_refused_and_an_unknown_family_reads_text(tmp_path: Path) -> None:
    folder = write_seeing_layout(tmp_path / "model")
    config = folder / "config.json"
    (folder / "onnx" / "vision_encoder_q4.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match="vision_encoder_q4.onnx is not an ONNX model"):
        open_bundle(folder)
    config.write_text(config.read_text(encoding="utf-8").replace("smolvlm", "other_vl"), encoding="utf-8")
    with edgerun.load(folder, threads=1) as engine:
        assert engine.model.vision is None


def test_answers_may_have_the_image_token(engine: Engine) -> None:
    """GenAI's embeddings take as many features as there are image tokens, and an answer's tokens have none."""
    reply = engine.generate(asked(random_image(5)), **OPTIONS | {"max_tokens": 6, "logit_bias": {IMAGE_TOKEN: 100.0}})
    assert tokens_of(reply) == [IMAGE_TOKEN] * 6


def test_the_fingerprint_depends_on_the_tower(tmp_path: Path) -> None:
    folder = write_seeing_layout(tmp_path / "model")
    before = open_bundle(folder).fingerprint
    write_tower(folder / "onnx" / "vision_encoder_q4.onnx", {"pixel_values": (TensorProto.FLOAT, ["n", 3, 32, 32])})
    assert open_bundle(folder).fingerprint != before


def test_every_family_has_a_processor() -> None:
    assert sorted(PROCESSORS) == sorted(SEEING_FAMILIES)
