"""Answers that begin with given tokens go on as if those had been generated."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgerun
from edgerun import ContextError, Engine, FinishReason, GenerateOptions, InputError, Reply, Speculation
from edgerun.models.bundle import open_bundle
from edgerun.runtime.speculation.replay import OracleMode
from edgerun.runtime.text.detokenizer import AnswerStart
from edgerun.runtime.text.tokenizer import TextTokenizer
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.nightly import examples, some_nightly
from support.shared_data import real_tokenizer
from support.tiny_models import SPECIAL_TOKENS

LENGTH = 40
PROMPT = "the other thing in the other thing"
MESSAGES = [{"role": "system", "content": "in the"}, {"role": "user", "content": PROMPT}]
OPTIONS = {
    "greedy": GenerateOptions(),
    "sampled": GenerateOptions(temperature=1.0, top_p=0.95, seed=4),
    "penalties": GenerateOptions(
        temperature=0.8, seed=9, repeat_penalty=1.2, presence_penalty=1.0, frequency_penalty=0.7, logit_bias={40: 3.0}
    ),
    "plain": GenerateOptions(temperature=1.0, seed=2, speculation=Speculation.OFF),
    "exact": GenerateOptions(exact=True, repeat_penalty=1.3),
    "past the end": GenerateOptions(temperature=1.5, seed=3, ignore_eos=True, logit_bias={0: 4.0}),
}


def token_ids(reply: Reply) -> list[int]:
    return [token.token_id for token in reply.logprobs]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("prompt", [PROMPT, MESSAGES], ids=["raw", "messages"])
def test_an_answer_goes_on_from_any_token_as_it_would_have(
    eager_engine: Engine, prompt: str | list[dict[str, str]], name: str
) -> None:
    options = OPTIONS[name].changed({"logprobs": 1, "raw": isinstance(prompt, str)})
    whole = eager_engine.generate(prompt, options, max_tokens=LENGTH)
    every = token_ids(whole)
    assert len(every) == LENGTH
    assert whole.stats.accepted > 0 or name in ("plain", "past the end")
    for count in (1, 2, 3, 11, 12, 13, 26, LENGTH - 1):
        stream = eager_engine.stream(prompt, options, answer_start=every[:count], max_tokens=LENGTH - count)
        rest = Reply.of(stream)
        assert token_ids(rest) == every[count:]
        assert stream.start_text + rest.text == whole.text
        # The start is read in wide passes, which differ in the last bits from narrow ones.
        assert [token.logprob for token in rest.logprobs] == pytest.approx(
            [token.logprob for token in whole.logprobs[count:]], abs=1e-4
        )
        assert [token.bytes for token in rest.logprobs] == [token.bytes for token in whole.logprobs[count:]]
        assert rest.stats.prompt_tokens == whole.stats.prompt_tokens + count
        assert rest.stats.completion_tokens == LENGTH - count


@pytest.mark.parametrize("seed", some_nightly(range(40), every=10))
def test_any_mixture_of_options_goes_on(tiny_bundle_of: Callable[[str, str], Path], seed: int) -> None:
    """Continued again and again, a few tokens at a time, with a draft model too."""
    target, draft = tiny_bundle_of("qwen2", "fp32"), tiny_bundle_of("llama", "fp32")
    with edgerun.load(target, draft=draft, threads=1, cache=False) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        options = GenerateOptions(
            temperature=(0.0, 0.7, 1.3)[seed % 3],
            presence_penalty=seed % 4 / 2,
            frequency_penalty=seed % 5 / 4,
            repeat_penalty=1 + seed % 2 / 10,
            seed=seed,
            exact=seed % 7 == 6,
            speculation=(Speculation.AUTO, Speculation.OFF)[seed % 6 == 5],
        )
        whole = engine.generate(MESSAGES, options, max_tokens=LENGTH, logprobs=0)
        text, done = "", list[int]()
        while len(done) < len(whole.logprobs):
            reply = engine.generate(MESSAGES, options, answer_start=done, max_tokens=1 + seed % 8, logprobs=0)
            done += token_ids(reply)
            stream = engine.stream(MESSAGES, options, answer_start=done)
            text = stream.start_text
        assert done[: len(whole.logprobs)] == token_ids(whole)
        assert text.startswith(whole.text.rstrip("\ufffd"))


def test_an_exact_answer_behind_a_start_is_that_of_plain_decoding(tiny_bundle_of: Callable[[str, str], Path]) -> None:
    """Wide passes compute other logits there, so drafts could change the choice in near ties."""
    with edgerun.load(tiny_bundle_of("qwen2", "int4"), threads=1, cache=False) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        start = token_ids(engine.generate(MESSAGES, max_tokens=15, logprobs=0))
        options = GenerateOptions(max_tokens=40, answer_start=start, exact=True, logprobs=0)
        plain = engine.generate(MESSAGES, options, speculation=Speculation.OFF)
        exact = engine.generate(MESSAGES, options)
        assert exact.stats.drafted > 0
        assert token_ids(exact) == token_ids(plain)
        assert exact.text == plain.text


def test_several_answers_go_on_with_their_own_seeds(engine: Engine) -> None:
    options = GenerateOptions(temperature=1.2, seed=5, n=3, logprobs=0)
    whole = engine.generate(PROMPT, options, max_tokens=20)
    start = token_ids(whole.choices[1])[:7]
    rest = engine.generate(PROMPT, options, answer_start=start, max_tokens=13)
    assert token_ids(rest.choices[1]) == token_ids(whole.choices[1])[7:]
    assert len({choice.text for choice in rest.choices}) == 3


def test_a_text_goes_on(engine: Engine) -> None:
    stream = engine.stream(MESSAGES, answer_start="in the other", max_tokens=8)
    reply = Reply.of(stream)
    assert stream.start_text == "in the other"
    prompt = [*engine.encode_chat(MESSAGES), *engine.tokenizer.encode("in the other", add_special_tokens=False)]
    assert reply.text == Reply.of(engine.model.answer(None, prompt, GenerateOptions(max_tokens=8))).text
    assert engine.generate(MESSAGES, answer_start="", max_tokens=8).text == engine.generate(MESSAGES, max_tokens=8).text


def test_special_tokens_in_a_text_stay_text(engine: Engine) -> None:
    text = "so <|end|> and <|user|>" + "".join(SPECIAL_TOKENS) + "<|sys"
    for options in (GenerateOptions(), GenerateOptions(special_tokens_in_messages=True)):
        start = engine.model.answer_start(options.changed({"answer_start": text}))
        assert not set(start.token_ids) & engine.tokenizer.special_ids
        assert start.text == text


@pytest.mark.parametrize("name", ["phi-3-mini", "qwen2.5", "smollm"])
def test_what_follows_a_start_has_the_text_that_it_has_behind_it(name: str) -> None:
    """Phi-3's tokenizer drops the space before the first word of a text, which is not the first word of an answer."""
    tokenizer = real_tokenizer(name)
    whole = "Hello world,  the naïve 日本語 🎉 cafés"
    ids = tokenizer.encode(whole, add_special_tokens=False)
    for count in range(1, len(ids)):
        start = AnswerStart.of(ids[:count], tokenizer, vocab_size=200_000)
        decoder = start.decoder()
        assert start.text + decoder.push(ids[count:]) == whole
        assert start.decoder().push(ids[count:]) == whole[len(start.text) :]
    assert AnswerStart.of("Hello", tokenizer, vocab_size=200_000).text == "Hello"


def test_a_character_that_the_start_leaves_incomplete_comes_out_whole(engine: Engine) -> None:
    euro = engine.tokenizer.encode("a€b", add_special_tokens=False)
    for count in range(2, len(euro) - 1):
        stream = engine.stream(
            PROMPT, answer_start=euro[:count], max_tokens=1, logit_bias={euro[count]: 100.0}, logprobs=0
        )
        reply = Reply.of(stream)
        complete = count == len(euro) - 2
        assert stream.start_text == "a"
        assert reply.text == ("€" if complete else "\ufffd")
        # The token is listed with its own byte; the bytes before it belong to the start.
        assert [token.bytes for token in reply.logprobs] == ["€".encode()[count - 1 : count]]


def test_an_incomplete_character_that_nothing_completes_is_marked(engine: Engine) -> None:
    euro = engine.tokenizer.encode("a€", add_special_tokens=False)
    other = engine.tokenizer.encode("x", add_special_tokens=False)[0]
    stream = engine.stream(PROMPT, answer_start=euro[:-1], max_tokens=1, logit_bias={other: 100.0})
    assert (stream.start_text, Reply.of(stream).text) == ("a", "\ufffdx")
    cancelled = engine.stream(PROMPT, answer_start=euro[:-1])
    cancelled.cancel()
    assert Reply.of(cancelled).text in ("", "\ufffd")


def test_stop_sequences_may_begin_in_the_start_but_not_lie_in_it(engine: Engine) -> None:
    (letter,) = engine.tokenizer.encode("e", add_special_tokens=False)
    options = GenerateOptions(max_tokens=6, logit_bias={letter: 100.0}, logprobs=0)
    for start, stop, text in (
        ("in th", "the", ""),  # it begins in the start
        ("in th", "in the", ""),
        ("in th", ["tha", "eee"], ""),
        ("in th", ["x", "hee"], ""),
        ("in the", "the", "eeeeee"),  # it lies in the start
        ("in th", ["in th", "h"], "eeeeee"),
        ("e e", "ee", ""),
        ("in th", "theeeeeeee", "eeeeee"),  # it is not completed
    ):
        reply = engine.generate(PROMPT, options, answer_start=start, stop=stop)
        assert reply.text == text
        assert reply.finish_reason is (FinishReason.LENGTH if text else FinishReason.STOP)
        assert len(reply.logprobs) == len(text)


def test_what_an_answer_cannot_begin_with_is_refused(engine: Engine) -> None:
    for ids, message in (
        ([5, 300], r"answer_start\[1\] is the token 300; token ids of this model are 0 to 299"),
        ([-1], r"answer_start\[0\] is the token -1"),
        ([7, 0], r"answer_start\[1\] is the end-of-sequence token '<\|end\|>'; leave it out"),
    ):
        with pytest.raises(InputError, match=message):
            engine.stream("a", answer_start=ids)
    for wrong in (3, [1.5], None, [True], b"ab"):
        with pytest.raises(InputError, match="answer_start is .*; it must be text or a list, each item a whole number"):
            engine.stream("a", answer_start=wrong)
    with pytest.raises(ContextError, match="the prompt has 2.. tokens and the model's context is 256"):
        engine.stream("a", answer_start=[9] * 256)
    with pytest.raises(InputError, match="a recorded answer has a start of its own"):
        engine.model.replay(None, [5], [6], GenerateOptions(answer_start="a"), oracle_mode=OracleMode.NONE)


def test_a_conversation_keeps_the_whole_answer(engine: Engine) -> None:
    with engine.session() as chat:
        reply = chat.send(PROMPT, answer_start="in the", max_tokens=6)
        assert chat.messages[-1] == {"role": "assistant", "content": "in the" + reply.text}
        expected = engine.generate([{"role": "user", "content": PROMPT}], answer_start="in the", max_tokens=6)
        assert reply.text == expected.text


def test_tokens_are_counted_as_they_would_run(engine: Engine) -> None:
    for prompt, options in (
        (PROMPT, GenerateOptions(raw=True)),
        (PROMPT, GenerateOptions(system="in the", answer_start="so it")),
        (MESSAGES, GenerateOptions()),
        (MESSAGES, GenerateOptions(answer_start=[9, 10, 11])),
    ):
        reply = engine.generate(prompt, options, max_tokens=1)
        assert engine.count_tokens(prompt, options) == reply.stats.prompt_tokens
    with pytest.raises(InputError, match="there are no messages"):
        engine.count_tokens([])


@given(text=st.text(max_size=20))
@settings(max_examples=examples(150))
def test_the_text_of_the_start_is_the_text_given(tiny_bundle: Path, text: str) -> None:
    tokenizer = TextTokenizer(open_bundle(tiny_bundle), 300)
    start = AnswerStart.of(text, tokenizer, vocab_size=300)
    assert start.text == tokenizer.decode(list(start.token_ids))
    assert unicodedata.normalize("NFC", start.text) == unicodedata.normalize("NFC", text) or "\ufffd" in start.text
    assert not set(start.token_ids) & tokenizer.special_ids
