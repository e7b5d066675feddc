"""Contrastive search against the float64 decoder, and from outside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgerun
from edgerun import Engine, InputError, Speculation
from edgerun.edge.cli.main import main
from edgerun.edge.server.server_settings import ServerSettings
from edgerun.export import FP32, ExportRecipe
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from support.serving import CHAT, chat_body, served_here
from support.tiny_models import exported, write_checkpoint

PROMPT = "the sea and the sand"
OPTIONS: dict[str, Any] = {"raw": True, "max_tokens": 14, "ignore_eos": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("contrastive") / "checkpoint")


@pytest.fixture(scope="module")
def bundle(source: Path) -> Path:
    return exported(source, source.parent / "bundle", ExportRecipe(FP32, hidden_states=True))


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with edgerun.load(bundle, threads=1, cache=False, parallel=3) as engine:
        yield engine


def searched(source: Path, tokens: list[int], alpha: float, candidates: int, count: int) -> list[int]:
    """The tokens that the naive decoder's logits and states give, every candidate read with the whole text."""
    config = read_config(source)
    weights = Checkpoint(source)
    head = weights.read("model.embed_tokens.weight").astype(np.float64)
    found: list[int] = []
    while len(found) < count:
        last = reference_logits(weights, config, np.asarray([*tokens, *found]), 256)[-1].astype(np.float64)
        probabilities = np.exp(last - last.max())
        probabilities /= probabilities.sum()
        scores = {}
        for token in np.argsort(-probabilities, kind="stable")[:candidates].tolist():
            logits = reference_logits(weights, config, np.asarray([*tokens, *found, token]), 256)
            # The only states that give these logits.
            states = np.linalg.lstsq(head, logits.T.astype(np.float64), rcond=None)[0].T
            states /= np.linalg.norm(states, axis=1, keepdims=True)
            likeness = float((states[:-1] @ states[-1]).max())
            scores[token] = (1 - alpha) * probabilities[token] - alpha * likeness
        found.append(max(scores, key=lambda token: scores[token]))
    return found


@pytest.mark.parametrize(("alpha", "candidates"), [(0.6, 4), (0.2, 8), (1.0, 3)])
def test_tokens_are_those_of_the_naive_decoder(engine: Engine, source: Path, alpha: float, candidates: int) -> None:
    tokens = engine.tokenizer.encode(PROMPT, add_special_tokens=True)
    expected = engine.tokenizer.decode(searched(source, tokens, alpha, candidates, 14))
    given = {} if candidates == 4 else {"top_k": candidates}
    reply = engine.generate(PROMPT, penalty_alpha=alpha, **given, **OPTIONS)
    assert reply.text == expected
    assert reply.text != engine.generate(PROMPT, **OPTIONS).text
    assert (reply.stats.target_passes, reply.stats.decode_passes) == (1 + 14, 14)


def test_the_text_does_not_depend_on_drafts_and_other_texts(engine: Engine) -> None:
    expected = engine.generate(PROMPT, penalty_alpha=0.6, speculation=Speculation.OFF, **OPTIONS).text
    with ThreadPoolExecutor(3) as pool:
        asked = [{"penalty_alpha": 0.6}, {}, {"penalty_alpha": 0.6}, {"num_beams": 2}]
        texts = list(pool.map(lambda each: engine.generate(PROMPT, **each, **OPTIONS).text, asked))
    assert texts[0] == texts[2] == expected
    assert texts[1] == engine.generate(PROMPT, **OPTIONS).text
    long = PROMPT * 20  # several passes for the prompt
    again = [engine.generate(long, penalty_alpha=0.6, **OPTIONS).text for _ in range(2)]
    assert again[0] == again[1]
    full = engine.generate(PROMPT, penalty_alpha=0.6, **{**OPTIONS, "max_tokens": None})
    assert full.finish_reason == "length"


def test_a_grammar_leaves_candidates_out(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    form = edgerun.ResponseFormat.regex("[a-d ]{6,20}")
    text = engine.generate(PROMPT, raw=True, penalty_alpha=0.6, response_format=form).text
    assert set(text) <= set("abcd ")
    assert len(text) >= 6


def test_contrastive_search_from_outside(
    engine: Engine, bundle: Path, tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = engine.generate(PROMPT, penalty_alpha=0.5, top_k=6, max_tokens=8).text
    arguments = ["-p", PROMPT, "-n", "8", "--penalty-alpha", "0.5", "--top-k", "6", "--json"]
    assert main([str(bundle), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == expected
    assert main([str(tiny_bundle), *arguments]) == 2
    message = "does not give the hidden states of the tokens with logits alone; export the model with --hidden-states"
    assert message in capsys.readouterr().err
    with served_here(bundle, ServerSettings(), threads=1, cache=False) as server:
        body = chat_body(PROMPT, max_tokens=8, penalty_alpha=0.5, top_k=6)
        assert server.post(CHAT, body)["choices"][0]["message"]["content"] == expected
    with pytest.raises(InputError, match="penalty_alpha and temperature are both given"):
        engine.generate(PROMPT, penalty_alpha=0.5, temperature=1.0)


def test_several_answers_are_one_and_a_model_that_samples_does_not(engine: Engine, source: Path) -> None:
    options = OPTIONS | {"penalty_alpha": 0.6, "top_k": 4}
    one = engine.generate(PROMPT, **options).text
    assert [each.text for each in engine.generate(PROMPT, n=2, **options).choices] == [one, one]
    sampled = source.parent / "sampled"
    shutil.copytree(source, sampled)
    (sampled / "generation_config.json").write_text('{"do_sample": true, "temperature": 2.0}', encoding="utf-8")
    bundle = exported(sampled, source.parent / "sampled-bundle", ExportRecipe(FP32, hidden_states=True))
    with edgerun.load(bundle, threads=1, cache=False) as other:
        assert [each.text for each in other.generate(PROMPT, n=2, **options).choices] == [one, one]


def test_the_context_may_have_less_room_than_there_are_candidates(engine: Engine, bundle: Path) -> None:
    options = OPTIONS | {"penalty_alpha": 0.6, "max_tokens": None}
    size = engine.count_tokens(PROMPT, edgerun.GenerateOptions(raw=True))
    with edgerun.load(bundle, threads=1, cache=False, context=size + 2) as short:
        assert short.generate(PROMPT, **options).stats.completion_tokens == 2
    many = engine.generate(PROMPT, **options | {"top_k": 200, "max_tokens": 6})
    assert many.stats.completion_tokens == 6
