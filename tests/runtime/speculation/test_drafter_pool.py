"""Answers with every choice of drafters: output, stop sequences, conversations and recorded answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgerun import Engine, FinishReason, GenerateOptions, InputError, Session
from edgerun.runtime.result import DraftCounts, Reply
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.replay import OracleMode
from edgerun.runtime.speculation.tree import Source
from support.draft_heads import check_counts, eager_engine

OFF, AUTO = Speculation.OFF, Speculation.AUTO
CHOICES = [AUTO, Speculation.of(Source.SUFFIX), Speculation.of(Source.RECYCLE)]
SAMPLED = GenerateOptions(max_tokens=40, temperature=0.8, top_k=40, top_p=0.95, repeat_penalty=1.1)


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Engine]:
    with eager_engine(tiny_bundle) as engine:
        yield engine


def account(reply: Reply) -> tuple[str, FinishReason, int]:
    return reply.text, reply.finish_reason, reply.stats.completion_tokens


def test_rounds_add_up_to_the_statistics(engine: Engine) -> None:
    stats = engine.generate("in the in the in the", max_tokens=60, explain=True).stats
    check_counts(stats)
    assert len(stats.rounds) == stats.decode_passes
    rounds = [one for one in stats.rounds if one is not None]
    disabled = len(stats.rounds) - len(rounds)
    assert sum(one.width - 1 for one in rounds) == stats.drafted
    assert sum(sum(one.accepted) for one in rounds) == stats.accepted
    assert sum(one.emitted for one in rounds) + disabled + 1 == stats.completion_tokens
    assert engine.generate("in the", max_tokens=5).stats.rounds == ()
    plain = engine.generate("in the", max_tokens=5, explain=True, speculation=OFF).stats
    assert plain.rounds == (None,) * 4


def test_drafts_are_chains_after_the_graph_for_trees_could_not_be_loaded(tiny_bundle: Path) -> None:
    options = GenerateOptions(max_tokens=60, raw=True, ignore_eos=True, explain=True)
    with eager_engine(tiny_bundle) as engine:
        replies = [engine.generate("the other the other the other", options)]
        engine.model._graph.disable_trees()
        replies.append(engine.generate("the other the other the other", options))
    rounds = [[one for one in reply.stats.rounds if one is not None] for reply in replies]
    branches = [max(most for one in each for most in one.drafted_by_depth) for each in rounds]
    assert branches[0] > 1
    assert branches[1] == 1
    assert replies[0].text == replies[1].text


def test_stop_sequences_within_an_accepted_path_end_the_answer(engine: Engine) -> None:
    options = GenerateOptions(max_tokens=50, raw=True, seed=0)
    text = engine.generate("the the the", options, speculation=OFF).text
    assert engine.generate("the the the", options).stats.accepted > 0
    for start in range(0, len(text) - 3, 2):
        for stop in ((text[start : start + 3],), (text[start : start + 2], text[start + 1 : start + 5])):
            plain = engine.generate("the the the", options, stop=stop, speculation=OFF)
            reply = engine.generate("the the the", options, stop=stop)
            assert account(reply) == account(plain)
            assert not any(one in reply.text for one in stop)
            check_counts(reply.stats, stopped=True)


def test_a_conversation_continues_after_closing_or_cancelling_at_any_chunk(engine: Engine) -> None:
    for chunks in range(1, 7):
        for cancel in (True, False):
            answers = []
            for choice in (AUTO, OFF):
                with engine.session() as session:
                    stream = session.stream("in the in the", max_tokens=30, speculation=choice)
                    heard = [next(stream).text for _ in range(chunks)]
                    if cancel:
                        stream.cancel()
                        heard += [chunk.text for chunk in stream]
                    stream.close()
                    assert session.messages[-1]["content"] == "".join(heard)
                    # The same beginning, then: chunks differ in length with the rounds they come from.
                    session.messages[-1]["content"] = session.messages[-1]["content"][:1]
                    answers.append(session.send("and", max_tokens=15, speculation=choice).text)
            assert answers[0] == answers[1]


def cached(engine: Engine, session: Session) -> tuple[int, int]:
    """Number of slots that the prefix cache has of a conversation: those of plain decoding, and all."""
    found = engine.model.prefixes.longest(session._token_ids())
    return found[0].plain_length, found[0].length


def test_slots_written_by_wide_passes_are_marked_when_saved(engine: Engine, tmp_path: Path) -> None:
    """An exact answer in a resumed conversation recomputes the slots that wide passes have written."""
    with engine.session() as session:
        session.send("the the the", max_tokens=25)
        plain, slots = cached(engine, session)
        assert 0 < plain < slots
        session.save(tmp_path / "chat")
    with engine.session(resume=tmp_path / "chat") as session:
        assert cached(engine, session) == (plain, slots)
        found = engine.model.prefixes.longest(session._token_ids())
        further = [*found[1].tolist(), 7, 8]
        reply = Reply.of(engine.answer(further, GenerateOptions(max_tokens=3, speculation=OFF)))
        assert reply.stats.reused_tokens == slots
        found = engine.model.prefixes.longest(further)
        assert found[0].plain_length == plain


def test_a_conversation_saved_after_a_stop_within_an_accepted_path_can_be_resumed(
    engine: Engine, tmp_path: Path
) -> None:
    text = engine.generate("the the the", max_tokens=40, speculation=OFF).text
    for start in range(3, 12):
        with engine.session() as session:
            session.send("the the the", max_tokens=40, stop=text[start : start + 3])
            session.save(tmp_path / "chat")
            expected = session.send("and", max_tokens=10, speculation=OFF).text
        with engine.session(resume=tmp_path / "chat") as session:
            assert session.send("and", max_tokens=10).text == expected


@pytest.mark.parametrize("oracle_mode", [OracleMode.NONE, OracleMode.RIGHT])
@pytest.mark.parametrize("choice", [OFF, *CHOICES[:2]], ids=str)
def test_a_replay_gives_the_recorded_answer(engine: Engine, choice: Speculation, oracle_mode: OracleMode) -> None:
    prompt = engine.tokenizer.encode("the other", add_special_tokens=False)
    random = np.random.default_rng(1)
    # Not what the model would generate; with the end-of-sequence token in it, and repetitions.
    words = random.integers(5, 120, 12).tolist()
    answer = [*words, *words[:7], *sorted(engine.tokenizer.eos), *words, *random.integers(5, 120, 8).tolist()]
    for options in (GenerateOptions(), SAMPLED.changed({"seed": 4, "max_tokens": None})):
        reply = Reply.of(
            engine.model.replay(None, prompt, answer, options.changed({"speculation": choice}), oracle_mode=oracle_mode)
        )
        assert reply.text == engine.tokenizer.decode(answer)
        stats = reply.stats
        assert stats.completion_tokens == len(answer)
        assert reply.finish_reason is FinishReason.LENGTH
        check_counts(stats)
        assert "recycle" not in stats.by_source
        if choice == OFF:
            assert stats.drafted == 0
        elif oracle_mode is OracleMode.RIGHT:
            assert stats.accepted == stats.drafted > 0
            assert stats.by_source == {"other": DraftCounts(stats.drafted, stats.accepted)}
            assert stats.tokens_per_pass > 8
        else:
            assert 0 < stats.accepted <= stats.drafted


def test_the_edit_drafter_follows_a_text_that_is_rewritten(engine: Engine) -> None:
    source = np.random.default_rng(2).permutation(np.arange(5, 125)).tolist()
    answer = [*source[:40], 200, *source[41:70], *source[74:100], 201, 202, *source[100:]]
    replayed = engine.model.replay(None, source, answer, GenerateOptions(speculation=Speculation.parse("edit")))
    stats = Reply.of(replayed).stats
    check_counts(stats)
    assert set(stats.by_source) == {"edit"}
    # All but the first twenty tokens and a few behind each of the three changes are drafted.
    assert stats.accepted > 60
    # The model's own text, wherever it repeats itself.
    for options in (GenerateOptions(max_tokens=120), SAMPLED.changed({"max_tokens": 120, "seed": 5})):
        plain = engine.generate("in the in the", options, speculation=OFF)
        reply = engine.generate("in the in the", options, speculation=Speculation.parse("edit"))
        assert account(reply) == account(plain)


@pytest.mark.parametrize("oracle_mode", [OracleMode.NONE, OracleMode.RIGHT])
def test_a_replay_ends_at_max_tokens_or_the_end_of_the_context(engine: Engine, oracle_mode: OracleMode) -> None:
    prompt, answer = list(range(20, 30)), [40 + index % 9 for index in range(300)]
    for max_tokens, expected in ((1, 1), (2, 2), (7, 7), (None, engine.context - 10)):
        reply = Reply.of(
            engine.model.replay(None, prompt, answer, GenerateOptions(max_tokens=max_tokens), oracle_mode=oracle_mode)
        )
        assert reply.stats.completion_tokens == expected
        assert reply.text == engine.tokenizer.decode(answer[:expected])
        check_counts(reply.stats)


def test_replayed_answers_do_not_affect_later_ones(engine: Engine) -> None:
    expected = engine.generate("the other", max_tokens=20, speculation=OFF).text
    prompt = engine.encode_chat([{"role": "user", "content": "the other"}])
    for oracle_mode in (OracleMode.RIGHT, OracleMode.NONE):
        Reply.of(engine.model.replay(None, prompt, [7] * 30, GenerateOptions(), oracle_mode=oracle_mode))
        assert engine.generate("the other", max_tokens=20).text == expected


def test_empty_replays_and_unknown_tokens_are_refused(engine: Engine) -> None:
    with pytest.raises(InputError, match="the recorded answer is empty"):
        engine.model.replay(None, [5, 6], [], GenerateOptions())
    for token in (-1, 300):
        with pytest.raises(InputError, match="the recorded answer has tokens that the model does not"):
            engine.model.replay(None, [5, 6], [7, token, 8], GenerateOptions())
