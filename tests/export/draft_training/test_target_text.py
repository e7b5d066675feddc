"""Answers of targets and their probabilities, against the engine and the reference decoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgerun.export.check.reference import reference_logits  # noqa: E402
from edgerun.export.checkpoint.config import read_config  # noqa: E402
from edgerun.export.checkpoint.safetensors_files import Checkpoint  # noqa: E402
from edgerun.export.draft_training.target_data import TOP_TOKENS, AnswerOptions, PromptConversation, TargetText  # noqa: E402
from edgerun.runtime.engine import Engine  # noqa: E402
from edgerun.runtime.engine_loading import load  # noqa: E402
from support.tiny_models import write_bundle  # noqa: E402

CONVERSATIONS = [
    PromptConversation(("the thing", "and another of them")),
    PromptConversation(("in the sea",), system="be short"),
    *(PromptConversation((f"thing {number}",)) for number in range(6)),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("target"))


def opened(bundle: Path) -> Engine:
    return load(bundle, device="cpu", learned=False)


def test_answers_are_the_engines_and_probabilities_the_references(bundle: Path, tmp_path: Path) -> None:
    options = AnswerOptions(max_tokens=12)
    with opened(bundle) as engine:
        examples = TargetText(engine).answered(CONVERSATIONS, options, tmp_path)
        messages = [{"role": "user", "content": "the thing"}]
        reply = engine.generate(messages, temperature=0.0, max_tokens=12)
        first = examples[0]
        start = first.answer.index(True)
        assert first.ids[:start] == engine.encode_chat(messages)
        assert engine.tokenizer.decode(first.ids[start:]) == reply.text
        messages += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "and another of them"},
        ]
        assert examples[1].ids[: examples[1].answer.index(True)] == engine.encode_chat(messages)
        system = engine.encode_chat(
            [{"role": "system", "content": "be short"}, {"role": "user", "content": "in the sea"}]
        )
        assert examples[2].ids[: len(system)] == system
    checkpoint = Checkpoint(bundle.parent / "checkpoint")
    config = read_config(bundle.parent / "checkpoint")
    assert len(examples) == len(CONVERSATIONS) + 1
    for example in examples:
        ids = np.array(example.ids, np.int64)
        positions = np.flatnonzero(example.answer) - 1
        logits = reference_logits(checkpoint, config, ids, 256)[positions]
        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        assert example.top_ids.shape == example.top_probs.shape == (positions.size, TOP_TOKENS)
        assert (example.top_ids[:, 0] == ids[positions + 1]).all()  # greedy
        np.testing.assert_allclose(
            np.take_along_axis(probs, example.top_ids, axis=1), example.top_probs, rtol=2e-3, atol=1e-6
        )
        np.testing.assert_allclose(-np.sort(-probs, axis=1)[:, :TOP_TOKENS], example.top_probs, rtol=2e-3, atol=1e-6)


def test_sampled_answers_depend_on_the_seed_and_the_token_that_ends_them_is_learned(
    bundle: Path, tmp_path: Path
) -> None:
    options = AnswerOptions(max_tokens=200, temperature=1.5, seed=5)
    with opened(bundle) as engine:
        ends = engine.tokenizer.eos
        examples, again, others = (
            TargetText(engine).answered(CONVERSATIONS, replace(options, seed=seed), tmp_path / name)
            for name, seed in (("first", 5), ("again", 5), ("other", 50))
        )
    assert [each.ids for each in examples] == [each.ids for each in again] != [each.ids for each in others]
    lengths = [sum(example.answer) for example in examples]
    ended = [example.ids[-1] in ends for example in examples]
    assert any(ended)
    for example, length, end in zip(examples, lengths, ended, strict=True):
        assert end or length == 200 or len(example.ids) >= 255
        assert len(example.top_ids) == length


def test_an_interrupted_run_makes_only_the_files_that_are_missing(bundle: Path, tmp_path: Path) -> None:
    many = [PromptConversation((f"thing {number}",)) for number in range(70)]
    options = AnswerOptions(max_tokens=2)
    made: list[float] = []

    def interrupted(stage: str, fraction: float) -> None:
        made.append(fraction)
        if len(made) == 66:
            raise KeyboardInterrupt

    with opened(bundle) as engine:
        with pytest.raises(KeyboardInterrupt):
            TargetText(engine).answered(many, options, tmp_path / "interrupted", interrupted)
        assert [path.name for path in (tmp_path / "interrupted").iterdir()] == ["answers-00000.safetensors"]
        made.clear()
        second = TargetText(engine).answered(
            many, options, tmp_path / "interrupted", lambda _, fraction: made.append(fraction)
        )
        assert len(made) == 6 + 1
        whole = TargetText(engine).answered(many, options, tmp_path / "whole")
    for one, other in zip(second, whole, strict=True):
        assert one.ids == other.ids
        np.testing.assert_array_equal(one.top_probs, other.top_probs)
