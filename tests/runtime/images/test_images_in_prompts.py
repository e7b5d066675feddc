"""Prompts with images: their tokens, features and slots, with and without drafts, and from the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the images extra")
pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun import Engine, GenerateOptions, InputError, Speculation, TemplateError
from edgerun.export import FP32, ExportRecipe, export_checkpoint
from edgerun.runtime.graph.bound_graph import NewTokens
from edgerun.runtime.graph.graph_choice import ChosenGraphs
from edgerun.runtime.images.prompt_images import PromptImages
from edgerun.runtime.images.vision_model import VisionModel
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.commands import Capture, Patch, fails, json_of
from support.freed_sessions import require_freed_sessions
from support.vision_models import FAMILIES, image_token_id, random_image, write_vision_checkpoint
from support.waiting import wait_until

OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module", params=FAMILIES)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    source = write_vision_checkpoint(folder / "checkpoint", request.param)
    return export_checkpoint(source, folder / "bundle", ExportRecipe(FP32)).bundle


@pytest.fixture(scope="module")
def seeing(bundle: Path) -> Iterator[Engine]:
    with edgerun.load(bundle, threads=1) as engine:
        yield engine


def asked(*images: bytes, text: str = "the sea and the sand") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": each} for each in images]
    return [{"role": "user", "content": [{"type": "text", "text": "of "}, *parts, {"type": "text", "text": text}]}]


def tokens_of(reply: edgerun.Reply) -> list[int]:
    return [each.token_id for each in reply.logprobs]


def test_another_image_gives_another_answer(seeing: Engine) -> None:
    first, second = random_image(1), random_image(2)
    texts = [tokens_of(seeing.generate(asked(each), **OPTIONS)) for each in (first, second, first)]
    assert texts[0] == texts[2] != texts[1]


def test_slots_are_reused_for_the_same_image_alone(bundle: Path) -> None:
    with edgerun.load(bundle, threads=1) as engine:
        seen, length = random_image(1), len(engine.chat_prompt(asked(random_image(1)), GenerateOptions()).ids)
        engine.generate(asked(seen), **OPTIONS)
        other = engine.generate(asked(random_image(2)), **OPTIONS).stats.reused_tokens
        question = asked(seen, text="other things that was to be")
        again = engine.generate(question, **OPTIONS)
        assert other < length // 2 < again.stats.reused_tokens
        with edgerun.load(bundle, threads=1) as fresh:
            assert tokens_of(fresh.generate(question, **OPTIONS)) == tokens_of(again)


def test_a_second_question_takes_no_pass_over_the_image(bundle: Path, monkeypatch: Patch) -> None:
    """The prompt's slots are there: one pass for the new text, in this conversation and in another."""
    with edgerun.load(bundle, threads=1) as engine:
        turns = asked(random_image(1))
        reply = engine.generate(turns, **OPTIONS)
        turns += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "in other thing"}]
        monkeypatch.setattr(VisionModel, "features", lambda *_: pytest.fail("the tower ran again"))
        for question in (turns, asked(random_image(1), text="other things")):
            stats = engine.generate(question, **OPTIONS | {"speculation": Speculation.OFF}).stats
            assert 1 <= stats.target_passes - stats.decode_passes <= 2


def test_drafts_change_nothing_after_images(bundle: Path) -> None:
    question = asked(random_image(3), text="the sea the sea the sea the sea")
    with edgerun.load(bundle, threads=1) as engine:
        expected = engine.generate(question, **OPTIONS | {"speculation": Speculation.OFF, "max_tokens": 60})
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        for sources in ("suffix", "recycle", "suffix,recycle"):
            chosen = OPTIONS | {"speculation": Speculation.parse(sources), "max_tokens": 60}
            found = engine.generate(question, **chosen)
            assert tokens_of(found) == tokens_of(expected)
            assert found.stats.drafted > 0


def test_a_draft_model_reads_the_text_alone(bundle: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """It has the same weights here and no tower, so it is often wrong behind an image."""
    source, question = bundle.parent / "checkpoint", asked(random_image(3), text="the sea the sea")
    draft = export_checkpoint(source, tmp_path / "draft", ExportRecipe(FP32, vision_weights="none")).bundle
    read = []
    run = DraftModel._run_path
    monkeypatch.setattr(DraftModel, "_run_path", lambda self, path: (read.append([*self._token_ids]), run(self, path)))
    with edgerun.load(bundle, threads=1, draft=draft, cache=False) as engine:
        assert engine.model.vision is not None
        token, ids = engine.model.vision.processor.token_id, engine.chat_prompt(question, GenerateOptions()).ids
        expected = engine.generate(question, **OPTIONS | {"speculation": Speculation.OFF})
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        found = engine.generate(question, **OPTIONS | {"speculation": Speculation.parse("model")})
        assert tokens_of(found) == tokens_of(expected)
        assert found.stats.drafted > 0
    assert read[-1][: len(ids) - ids.count(token)] == [each for each in ids if each != token]


def test_several_answers_and_exact_ones_see_the_image(seeing: Engine) -> None:
    question = asked(random_image(4))
    expected = tokens_of(seeing.generate(question, **OPTIONS))
    assert tokens_of(seeing.generate(question, **OPTIONS, exact=True)) == expected
    several = seeing.generate(question, **OPTIONS | {"temperature": 1.0, "seed": 1, "n": 3})
    alone = seeing.generate(question, **OPTIONS | {"temperature": 1.0, "seed": 1})
    assert tokens_of(several) == tokens_of(alone)


def test_two_images_and_a_second_turn(seeing: Engine) -> None:
    turns: list[dict[str, Any]] = asked(random_image(5), random_image(6))
    first = seeing.generate(turns, **OPTIONS)
    assert tokens_of(first) != tokens_of(seeing.generate(asked(random_image(6), random_image(5)), **OPTIONS))
    turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "in other thing"}]
    assert seeing.generate(turns, **OPTIONS).stats.reused_tokens >= len(
        seeing.chat_prompt(turns[:1], GenerateOptions()).ids
    )


def test_what_an_attached_image_needs_is_loaded_while_the_engine_is_idle(bundle: Path, seeing: Engine) -> None:
    question = asked(random_image(12))
    with edgerun.load(bundle, threads=1) as engine:
        vision, graph = engine.model.vision, engine.model._graph
        assert vision is not None
        assert isinstance(graph, ChosenGraphs)
        engine.count_tokens("the sea")
        assert vision._preloading is None
        assert engine.count_tokens(question) > vision.see(random_image(12)).tokens
        wait_until(lambda: vision._session is not None and "images" in graph.loaded)
        assert tokens_of(engine.generate(question, **OPTIONS)) == tokens_of(seeing.generate(question, **OPTIONS))


def test_answers_alternate_with_text(seeing: Engine) -> None:
    text = seeing.generate("the sea", **OPTIONS).text
    with_image = seeing.generate(asked(random_image(7)), **OPTIONS).text
    streams = [seeing.stream(each, **OPTIONS) for each in ("the sea", asked(random_image(7)))]
    found = ["", ""]
    for pieces in zip_longest(*streams):
        for index, piece in enumerate(pieces):
            found[index] += "" if piece is None else piece.text
    assert found == [text, with_image]


def test_the_text_of_a_placeholder_in_a_message_is_text(seeing: Engine) -> None:
    placeholder = seeing.model.vision.processor.placeholder if seeing.model.vision is not None else ""
    token = seeing.tokenizer.token_id(placeholder)
    written = seeing.chat_prompt(asked(random_image(8), text=f"a {placeholder} b"), GenerateOptions()).ids
    plain = seeing.chat_prompt(asked(random_image(8), text="a b"), GenerateOptions()).ids
    assert written.count(token) == plain.count(token)
    with pytest.raises((InputError, TemplateError), match="image"):
        seeing.generate(asked(random_image(8), text=placeholder), **OPTIONS, special_tokens_in_messages=True)


def test_features_stand_in_the_place_of_embeddings(seeing: Engine) -> None:
    """Rows of the embedding as features give the logits of their tokens."""
    image, token = random_image(9), 40
    ids = seeing.chat_prompt(asked(image), GenerateOptions()).ids
    vision = seeing.model.vision
    assert vision is not None
    images = PromptImages(vision, [vision.see(image)], ids)
    placed = images.placed(NewTokens(ids, np.array([len(ids) - 1])), 0)
    assert placed.images is not None
    assert placed.images.rows.tolist() == [index for index, each in enumerate(ids) if each == vision.processor.token_id]
    assert images.placed(NewTokens([token], np.array([0])), len(ids)).images is None


def test_passes_and_prefixes_do_not_cut_what_they_must_not(seeing: Engine) -> None:
    vision = seeing.model.vision
    assert vision is not None
    seen = [vision.see(random_image(number)) for number in (10, 11)]
    slot = vision.processor.token_id
    ids = [1, 2, *[slot] * seen[0].tokens, 3, *[slot] * seen[1].tokens, 4, 5]
    images = PromptImages(vision, seen, ids)
    first, second = 2, 3 + seen[0].tokens
    assert images.pass_width(0, 128) == 2
    assert images.pass_width(len(ids) - 2, 128) == 128
    assert images.pass_width(first, 1) == (seen[0].tokens if vision.processor.bidirectional else 1)
    assert images.whole(first + 1) == first
    assert images.whole(second - 1) == second - 1
    assert images.whole(second + 2) == second
    assert images.whole(len(ids)) == len(ids)
    keyed = images.keyed([*ids, slot])
    assert [each < 0 for each in keyed] == [each == slot for each in ids] + [False]
    assert len(set(keyed)) == len(keyed)
    with pytest.raises(InputError, match="image tokens"):
        PromptImages(vision, seen, [*ids, slot])


def test_closing_an_engine_frees_its_sessions_at_once(bundle: Path) -> None:
    def opened() -> Engine:
        engine = edgerun.load(bundle, threads=1)
        engine.generate(asked(random_image()), max_tokens=4)
        return engine

    require_freed_sessions(opened)


def test_images_that_were_seen_take_bounded_memory(seeing: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = seeing.model.vision
    assert vision is not None
    sizes = []
    for number in range(40, 60):
        seen = vision.see(random_image(number))
        seen.features(0, seen.tokens)
        sizes.append(seen.nbytes)
    assert vision.see(random_image(40)).nbytes == sizes[0]
    monkeypatch.setattr("edgerun.runtime.images.vision_model.KEPT_BYTES", 3 * max(sizes))
    last = vision.see(random_image(60))
    assert sum(each.nbytes for each in vision._seen.values()) <= 3 * max(sizes)
    assert vision.see(random_image(60)) is last
    monkeypatch.setattr("edgerun.runtime.images.vision_model.KEPT_BYTES", 0)
    vision.see(random_image(61))
    assert len(vision._seen) == 1


def test_long_conversations_lose_whole_turns(bundle: Path) -> None:
    turns: list[dict[str, Any]] = []
    with edgerun.load(bundle, threads=1, context=128, overflow="window") as engine:
        for number in range(4):
            turns += asked(random_image(number))
            reply = engine.generate(turns, **OPTIONS)
            turns.append({"role": "assistant", "content": reply.text})
        assert reply.stats.prompt_tokens < 128


def test_images_do_not_go_with_what_reads_text_alone(seeing: Engine, tiny_bundle: Path) -> None:
    with pytest.raises(InputError, match="cad"):
        seeing.generate(asked(random_image(1)), strategies=[edgerun.strategy("cad")], max_tokens=2)
    with edgerun.load(tiny_bundle, threads=1) as engine, pytest.raises(InputError, match="reads text alone"):
        engine.generate(asked(random_image(1)))


def test_the_command_line_takes_images(bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    paths: Sequence[Path] = [tmp_path / "a.png", tmp_path / "b.png"]
    for number, path in enumerate(paths):
        path.write_bytes(random_image(number))
    common = [bundle, "-p", "the sea", "-n", 8, "--ignore-eos", "--json"]
    found = [json_of(capsys, *common, "--logprobs", 0, "--image", path)["logprobs"] for path in paths]
    assert found[0] != found[1]
    both = json_of(capsys, *common, "--image", paths[0], "--image", paths[1], "--system", "in")
    assert both["usage"]["prompt_tokens"] > 16
    assert "No such file" in fails(capsys, *common, "--image", tmp_path / "missing.png")
    assert "--raw" in fails(capsys, *common, "--raw", "--image", paths[0])
    (tmp_path / "page.png").write_text("<html></html>", encoding="utf-8")
    assert "cannot be read" in fails(capsys, *common, "--image", tmp_path / "page.png")


def test_the_image_token_is_in_the_vocabulary(seeing: Engine) -> None:
    assert seeing.model.vision is not None
    assert image_token_id("<image>") < seeing.vocab_size
