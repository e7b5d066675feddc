"""`lossy_image_tokens`: which tokens of an image are merged, what they count for, and where it shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("PIL", reason="needs the images extra")
pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun import Engine, InputError, Speculation
from edgerun.export import FP32, ExportRecipe, export_checkpoint
from edgerun.runtime.images.image_processor import Floats, ProcessedImage
from edgerun.runtime.images.image_tokens import TileTokens, tokens_of
from edgerun.runtime.images.prompt_images import PromptImages
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.commands import Capture, Patch, fails, json_of, main
from support.vision_models import FAMILIES, random_image, write_vision_checkpoint

OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 0}
SHARE = 0.5


@pytest.fixture(scope="module", params=FAMILIES)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merging")
    source = write_vision_checkpoint(folder / "checkpoint", request.param)
    return export_checkpoint(source, folder / "bundle", ExportRecipe(FP32)).bundle


@pytest.fixture(scope="module")
def merging(bundle: Path) -> Iterator[Engine]:
    with edgerun.load(bundle, threads=1, lossy_image_tokens=SHARE) as engine:
        yield engine


def asked(*images: bytes, text: str = "the sea and the sand") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": each} for each in images]
    return [{"role": "user", "content": [{"type": "text", "text": "of "}, *parts, {"type": "text", "text": text}]}]


def logprobs_of(reply: edgerun.Reply) -> list[tuple[int, float]]:
    return [(each.token_id, each.logprob) for each in reply.logprobs]


def tokens_in(reply: edgerun.Reply) -> list[int]:
    return [each.token_id for each in reply.logprobs]


@dataclass(frozen=True)
class SpreadTokens(TileTokens):
    """A token for every feature, each with what it would have if it were merged with those of its group."""

    alike: TileTokens

    def merged(self, features: Floats) -> Floats:
        return self.alike.merged(features)[:, self.alike.groups]


def spread(image: ProcessedImage, slot: str, share: float) -> tuple[str, list[TileTokens]]:
    del share
    made: list[TileTokens] = []
    for each in tokens_of(image, slot, SHARE)[1]:
        groups = np.arange(each.groups.size)
        made.append(SpreadTokens(groups, each.places[:, each.groups], each.span, each))
    return image.text, made


def test_a_merged_token_counts_as_many_equal_ones(tmp_path: Path, monkeypatch: Patch) -> None:
    """In a model of one layer, where what is read later does not depend on which equal token was read first."""
    source = write_vision_checkpoint(tmp_path / "checkpoint", "qwen2_5_vl")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["num_hidden_layers"] = 1
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32)).bundle
    question = asked(random_image(1), random_image(2))
    with edgerun.load(bundle, threads=1) as plain, edgerun.load(bundle, threads=1, lossy_image_tokens=SHARE) as engine:
        found = engine.generate(question, **OPTIONS)
        alone = plain.generate(question, **OPTIONS)
    monkeypatch.setattr("edgerun.runtime.images.vision_model.tokens_of", spread)
    with edgerun.load(bundle, threads=1) as many:
        expected = many.generate(question, **OPTIONS)
    assert found.stats.prompt_tokens + found.stats.merged_tokens == expected.stats.prompt_tokens
    assert tokens_in(found) == tokens_in(expected)
    values = [[logprob for _, logprob in logprobs_of(each)] for each in (found, expected, alone)]
    np.testing.assert_allclose(values[0], values[1], atol=1e-4)
    assert not np.allclose(values[0], values[2], atol=1e-2)


def test_every_model_reads_fewer_tokens(bundle: Path, merging: Engine) -> None:
    question = asked(random_image(1), random_image(2))
    with edgerun.load(bundle, threads=1) as engine:
        whole = engine.generate(question, **OPTIONS).stats
    merged = merging.generate(question, **OPTIONS).stats
    assert whole.merged_tokens == 0 < merged.merged_tokens
    assert merged.prompt_tokens + merged.merged_tokens == whole.prompt_tokens


def test_answers_do_not_depend_on_drafts_and_neighbours(bundle: Path) -> None:
    questions = [asked(random_image(number), text="the sea the sea the sea the sea") for number in range(3)]
    options = OPTIONS | {"speculation": Speculation.OFF, "max_tokens": 60}
    with edgerun.load(bundle, threads=1, lossy_image_tokens=SHARE) as engine:
        expected = [tokens_in(engine.generate(each, **options)) for each in questions]
        assert len({tuple(each) for each in expected}) > 1
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        drafting = options | {"speculation": Speculation.parse("suffix,recycle")}
        drafted = [engine.generate(each, **drafting) for each in questions]
        assert [tokens_in(each) for each in drafted] == expected
        assert sum(each.stats.drafted for each in drafted) > 0
        with ThreadPoolExecutor(3) as threads:
            together = list(threads.map(lambda each: engine.generate(each, **drafting), questions))
        assert [tokens_in(each) for each in together] == expected
        assert tokens_in(engine.generate(questions[0], **options, exact=True)) == expected[0]


def test_an_answer_goes_on_from_its_start(bundle: Path, merging: Engine) -> None:
    with edgerun.load(bundle, threads=1) as engine:
        for each in (engine, merging):
            whole = tokens_in(each.generate(asked(random_image(4)), **OPTIONS))
            with edgerun.load(bundle, threads=1, lossy_image_tokens=SHARE if each is merging else 1) as fresh:
                rest = fresh.generate(
                    asked(random_image(4)), **OPTIONS | {"answer_start": whole[:10], "max_tokens": 14}
                )
            assert tokens_in(rest) == whole[10:]


def test_slots_of_another_share_are_not_reused(bundle: Path, tmp_path: Path) -> None:
    with edgerun.load(bundle, threads=1, lossy_image_tokens=SHARE) as engine, engine.session() as chat:
        parts = [{"type": "text", "text": "of "}, {"type": "image", "image": random_image(5)}]
        first = chat.send(parts, **OPTIONS | {"max_tokens": 8}).stats.prompt_tokens
        chat.save(tmp_path / "saved")
    reused = []
    for share in (SHARE, 0.75):
        with (
            edgerun.load(bundle, threads=1, lossy_image_tokens=share) as engine,
            engine.session(resume=tmp_path / "saved") as chat,
        ):
            stats = chat.send("in other thing", **OPTIONS | {"max_tokens": 8}).stats
            assert stats.merged_tokens > 0
            reused.append(stats.reused_tokens)
    assert reused[0] >= first - 1 > 2 * reused[1]


def test_the_context_ends_where_all_tokens_would_end_it(bundle: Path) -> None:
    """Positions count merged tokens, except where an image has three axes of them."""
    with edgerun.load(bundle, threads=1, context=128, lossy_image_tokens=SHARE) as engine:
        options = OPTIONS | {"max_tokens": None}
        stats = engine.generate(asked(random_image(6)), **options).stats
        vision = engine.model.vision
        assert vision is not None
        left_out = 0 if vision.processor.axes is not None else stats.merged_tokens
        assert stats.prompt_tokens + stats.completion_tokens + left_out in (128, 129)
        slot = vision.processor.token_id
        seen = vision.see(random_image(6))
        with pytest.raises(InputError, match="begins with an image"):
            PromptImages(vision, [seen], [*[slot] * seen.tokens, 1])


def halves(rows: int, columns: int, pixels: int) -> npt.NDArray[np.uint8]:
    """Black on the left, white on the right."""
    tile = np.zeros((rows * pixels, columns * pixels, 3), np.uint8)
    tile[:, columns // 2 * pixels :] = 255
    return tile


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (2, 6), (6, 2)])
@pytest.mark.parametrize("share", [1.0, 0.75, 0.5, 0.25, 0.01])
def test_what_looks_alike_is_merged(rows: int, columns: int, share: float) -> None:
    count, slot = rows * columns, "<image>"
    image = ProcessedImage(f"a{slot * count}b{slot * count}c", [halves(rows, columns, 10)] * 2, [count] * 2)
    text, tiles = tokens_of(image, slot, share)
    kept = int(np.ceil(share * count))
    assert text == f"a{slot * kept}b{slot * kept}c"
    for each in tiles:
        assert (each.sizes.size, each.sizes.sum(), each.span) == (kept, count, count)
        places: Sequence[int] = each.places[0].tolist()
        assert places == sorted(set(places))
        assert [each.groups[place] for place in places] == list(range(kept))
        if kept > 1:
            colours = np.arange(count) % columns >= columns // 2
            assert all(len(set(colours[each.groups == group])) == 1 for group in range(kept))
        features = np.random.default_rng(0).standard_normal((2, count, 8)).astype(np.float32)
        means = [features[:, each.groups == group].mean(axis=1) for group in range(kept)]
        np.testing.assert_allclose(each.merged(features), np.stack(means, axis=1), atol=1e-6)


def test_an_image_with_three_axes_keeps_rows_and_columns() -> None:
    image = ProcessedImage("<image>" * 24, [halves(4, 6, 8)], [24], grid=(4, 6))
    _, (whole,) = tokens_of(image, "<image>", 1)
    assert whole.places.tolist() == [[0] * 24, [row for row in range(4) for _ in range(6)], [*range(6)] * 4]
    _, (half,) = tokens_of(image, "<image>", 0.5)
    assert half.places.shape == (3, 12)
    assert half.span == whole.span == 6
    middles = [np.flatnonzero(half.groups == group) for group in range(12)]
    assert half.places[1:].tolist() == whole.places[1:, [each[len(each) // 2] for each in middles]].tolist()


def test_the_command_line_says_what_it_lost(bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(random_image(1))
    common = [bundle, "-p", "the sea", "-n", 4, "--ignore-eos", "--image", path]
    merged = json_of(capsys, *common, "--json", "--lossy-image-tokens", "0.5")["usage"]["merged_image_tokens"]
    assert merged > 0
    assert "merged_image_tokens" not in json_of(capsys, *common, "--json")["usage"]
    assert main([*map(str, common), "--stats", "--lossy-image-tokens", "0.5"]) == 0
    assert f"lossy: {merged} tokens of images merged with others" in capsys.readouterr().err
    for share in ("0", "1.5", "nan"):
        assert "above 0 and at most 1" in fails(capsys, *common, "--lossy-image-tokens", share)
