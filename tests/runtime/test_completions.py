"""`Engine.complete` fills gaps: several suggestions, their ends, newer requests of a document, and the prefix cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("support.tiny_models", reason="needs the export extra")

import edgerun
from edgerun import Engine, FinishReason, GenerateOptions, InputError, Reply
from edgerun.runtime.text.infill import SUGGESTION_TOKENS, InfillTokens
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.infill_models import SUGGESTION, write_infill_bundle, write_suggesting_bundle

PREFIX, SUFFIX = "the sea and the sand is in the sea and the ", " other thing is on the sand"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_infill_bundle(tmp_path_factory.mktemp("infill"))


@pytest.fixture(scope="module")
def infill_engine(bundle: Path) -> Iterator[Engine]:
    with edgerun.load(bundle, threads=1, cache=False) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        yield engine


@pytest.fixture(scope="module")
def suggesting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with edgerun.load(write_suggesting_bundle(tmp_path_factory.mktemp("suggesting")), cache=False) as engine:
        yield engine


def test_a_suggestion_continues_the_template(infill_engine: Engine) -> None:
    ids = InfillTokens.of(infill_engine.tokenizer).prompt_ids(PREFIX, SUFFIX)
    expected = Reply.of(infill_engine.answer(ids, GenerateOptions(max_tokens=20, ignore_eos=True)))
    reply = infill_engine.complete(PREFIX, SUFFIX, max_tokens=20, ignore_eos=True)
    assert reply.text == expected.text
    assert reply.stats.prompt_tokens == len(ids)
    assert infill_engine.count_tokens(PREFIX, GenerateOptions(suffix=SUFFIX)) == len(ids)
    assert infill_engine.complete(PREFIX, suffix=SUFFIX, max_tokens=20, ignore_eos=True).text == reply.text
    assert infill_engine.complete(PREFIX).stats.completion_tokens <= SUGGESTION_TOKENS


@pytest.mark.parametrize("temperature", [None, 0.8])
def test_suggestions_begin_with_the_likeliest_tokens(infill_engine: Engine, temperature: float | None) -> None:
    options = GenerateOptions(max_tokens=12, logprobs=4, ignore_eos=True, temperature=temperature, seed=5)
    reply = infill_engine.complete(PREFIX, SUFFIX, 4, options)
    likeliest = [each.token_id for each in reply.logprobs[0].top]
    assert [choice.logprobs[0].token_id for choice in reply.choices] == likeliest
    assert len({choice.text for choice in reply.choices}) == 4
    for index, choice in enumerate(reply.choices):
        rest = infill_engine.stream(
            PREFIX, options, suffix=SUFFIX, max_tokens=11, answer_start=likeliest[index : index + 1], seed=5 + index
        )
        expected = [token.token_id for token in Reply.of(rest).logprobs]
        assert [token.token_id for token in choice.logprobs[1:]] == expected


def test_suggestions_share_passes(infill_engine: Engine) -> None:
    before = infill_engine.activity().passes
    infill_engine.complete(PREFIX, SUFFIX, 3, max_tokens=24, ignore_eos=True, speculation=edgerun.Speculation.OFF)
    after = infill_engine.activity().passes
    assert after.passes - before.passes < after.texts - before.texts


def test_a_branch_without_other_tokens_takes_the_last_one(infill_engine: Engine) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    only = edgerun.ResponseFormat.choice(["sea", "sand"])
    reply = infill_engine.complete(PREFIX, SUFFIX, 4, response_format=only)
    assert {choice.text for choice in reply.choices} <= {"sea", "sand"}


def test_a_suggestion_ends_where_the_next_file_begins(suggesting: Engine) -> None:
    reply = suggesting.complete("def add(a, b):\n    ", "\n")
    assert (reply.text, reply.finish_reason) == ("".join(SUGGESTION), FinishReason.STOP)
    assert reply.stats.completion_tokens == len(SUGGESTION) + 1
    assert "junk" in suggesting.complete("def add(a, b):\n    ", "\n", ignore_eos=True, max_tokens=5).text


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_an_unsure_suggestion_is_cut(infill_engine: Engine, speculation: str) -> None:
    options = GenerateOptions(
        max_tokens=40, logprobs=0, ignore_eos=True, speculation=edgerun.Speculation.parse(speculation)
    )
    whole = infill_engine.complete(PREFIX, SUFFIX, 1, options)
    means, total = [], 0.0
    for count, token in enumerate(whole.logprobs, 1):
        total += token.logprob
        means.append(math.exp(total / count))
    lengths = set()
    for least in (0.999, *(mean * 1.0001 for mean in means[::6]), min(means) * 0.99):
        reply = infill_engine.complete(PREFIX, SUFFIX, 1, options, least_confidence=least)
        length = next((index for index, mean in enumerate(means) if mean < least), len(means))
        assert reply.stats.completion_tokens == min(length + 1, len(means))
        assert whole.text.startswith(reply.text.rstrip("\ufffd"))
        assert reply.finish_reason is (FinishReason.STOP if length < len(means) else FinishReason.LENGTH)
        lengths.add(length)
    assert len(lengths) > 2


def test_a_newer_request_of_a_document_ends_the_older(infill_engine: Engine) -> None:
    options = GenerateOptions(suffix=SUFFIX, max_tokens=100, ignore_eos=True)
    older, other, newer = (infill_engine.stream(PREFIX, options, document=name) for name in ("a.py", "b.py", "c.py"))
    for stream in (older, other, newer):
        next(stream)
    again = infill_engine.stream(f"{PREFIX}t", options, document="a.py")
    finished = {stream: Reply.of(stream).finish_reason for stream in (older, other, newer, again)}
    assert list(finished.values()) == ["cancelled", "length", "length", "length"]


def test_what_is_typed_is_read_anew(bundle: Path) -> None:
    """Each key adds a token before the gap: with the suffix first, the prompt of the next request begins alike."""
    new = {}
    for suffix_first in (False, True):
        with edgerun.load(bundle, threads=1, cache=False) as engine:
            new[suffix_first] = 0
            for end in range(20, len(PREFIX)):
                stats = engine.complete(PREFIX[:end], SUFFIX, suffix_first=suffix_first, max_tokens=2).stats
                new[suffix_first] += stats.prompt_tokens - stats.reused_tokens
    suffix_tokens = len(engine.tokenizer.encode_plain(SUFFIX))
    keys = len(PREFIX) - 20
    assert new[True] < 4 * keys + 80
    assert new[False] > suffix_tokens * keys


def test_drafts_come_from_the_file(infill_engine: Engine) -> None:
    body = "the sand is in the sea and then the other thing was on the sand; "
    text = infill_engine.complete(body * 2, SUFFIX, max_tokens=30, ignore_eos=True).text
    reply = infill_engine.complete(
        f"{text} {body}{text} {body}",
        SUFFIX,
        max_tokens=30,
        ignore_eos=True,
        speculation=edgerun.Speculation.parse("suffix"),
    )
    assert reply.stats.by_source["suffix"].drafted > 0


def test_long_files_are_shortened_unless_that_is_an_error(infill_engine: Engine) -> None:
    reply = infill_engine.complete(PREFIX * 40, SUFFIX * 40, max_tokens=8, ignore_eos=True)
    assert infill_engine.context - 64 < reply.stats.prompt_tokens < infill_engine.context
    assert reply.stats.completion_tokens == 8
    with pytest.raises(edgerun.ContextError, match="the prompt has .* tokens and the model's context is 256"):
        infill_engine.complete(PREFIX * 40, SUFFIX * 40, overflow="error")


def test_models_without_tokens_and_conversations_are_refused(tiny_bundle: Path, infill_engine: Engine) -> None:
    no_tokens = pytest.raises(InputError, match="no tokens for filling in the middle")
    with edgerun.load(tiny_bundle, threads=1) as engine, no_tokens:
        engine.complete(PREFIX, SUFFIX)
    with pytest.raises(InputError, match="raw and system belong to a single answer"):
        infill_engine.session().send("the", suffix=SUFFIX)
    with pytest.raises(InputError, match="raw continues a text, but the prompt is messages"):
        infill_engine.generate([{"role": "user", "content": "the"}], suffix=SUFFIX)
    with pytest.raises(InputError, match="extra has a file without text"):
        infill_engine.complete(PREFIX, SUFFIX, extra=[{"filename": "a.py"}])
    with pytest.raises(InputError, match="least_confidence is 1.0; it must be at least 0 and below 1"):
        infill_engine.complete(PREFIX, SUFFIX, least_confidence=1.0)
    with pytest.raises(InputError, match="grammar_aligned and branch are both given"):
        GenerateOptions(grammar_aligned=2, branch=True, response_format=edgerun.ResponseFormat.choice(["a"]))
