"""Log-probabilities of answers, however they are decoded, against the float64 decoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgerun import Engine, GenerateOptions, InputError, Reply, Speculation, TokenLogprob, load
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.sampling.logprobs import LogSoftmax, PositionLogprobs
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.choice import DraftSampling
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.replay import OracleMode
from edgerun.runtime.speculation.sampled_speculator import SampledSpeculator
from edgerun.runtime.speculation.speculator import Speculator
from edgerun.runtime.speculation.verification import NearTies
from support.adversarial_drafters import NEARLY_FREE, FixedCost, adversaries, eager, speculator_of
from support.nightly import some_nightly

VOCABULARY = 300
K = 5
LIMITS = DecodeLimits(30)
GREEDY = SamplingParams()
ADJUSTED = SamplingParams(0.7, top_k=30, top_p=0.9, repeat_penalty=1.3, logit_bias=((7, 5.0), (9, -50.0)), seed=3)
PROMPT = [*range(20, 32), *range(20, 26)]


def expected_logprobs(bundle: Path, token_ids: list[int]) -> np.ndarray:
    """Log-softmax, float64 `[n, V]`, of the naive decoder's logits at every token."""
    source = bundle.parent / "checkpoint"
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    logits = reference_logits(Checkpoint(source), config, np.asarray(token_ids), 256).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def check(bundle: Path, prompt: list[int], tokens: list[int], found: list[PositionLogprobs]) -> None:
    """Compare the log-probabilities of an answer with the naive ones."""
    assert [one.token_id for one in found] == tokens
    rows = expected_logprobs(bundle, [*prompt, *tokens])[len(prompt) - 1 : -1]
    for row, one in zip(rows, found, strict=True):
        assert one.logprob == pytest.approx(row[one.token_id], abs=1e-4)
        best = np.sort(row)[::-1][:K]
        assert [logprob for _, logprob in one.top] == pytest.approx(best.tolist(), abs=1e-4)
        assert [logprob for _, logprob in one.top] == pytest.approx([row[token] for token, _ in one.top], abs=1e-4)


@pytest.fixture(scope="module")
def graph(tiny_bundle: Path) -> GraphSession:
    return GraphSession(tiny_bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))


def decoded(
    graph: GraphSession,
    params: SamplingParams,
    speculator: Speculator | None = None,
    epsilon: float | None = None,
    limits: DecodeLimits = LIMITS,
) -> tuple[list[int], list[PositionLogprobs], int]:
    """The tokens of an answer, their log-probabilities, and the largest number of tokens of a round."""
    bound, sampler = graph.bind(graph.arena(256)), Sampler(params, VOCABULARY)
    near_ties = None if epsilon is None else NearTies(bound, sampler, epsilon, lambda: False)
    if isinstance(speculator, SampledSpeculator):
        speculator.start_answer(params)
    steps = list(decode(bound, PROMPT, sampler, limits, speculator, near_ties, LogSoftmax(K, VOCABULARY)))
    assert all(len(step.logprobs) == step.produced for step in steps)
    tokens = [token for step in steps for token in step.tokens]
    return tokens, [one for step in steps for one in step.logprobs], max(step.produced for step in steps)


@pytest.mark.parametrize("params", [GREEDY, ADJUSTED], ids=["greedy", "sampled"])
def test_plain_decoding_gives_those_of_the_raw_logits(
    graph: GraphSession, tiny_bundle: Path, params: SamplingParams
) -> None:
    tokens, found, _ = decoded(graph, params)
    assert len(tokens) == 30
    check(tiny_bundle, PROMPT, tokens, found)
    assert any(one.token_id != one.top[0][0] for one in found) == (params is ADJUSTED)


@pytest.mark.parametrize("params", [GREEDY, ADJUSTED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
@pytest.mark.parametrize(
    "name",
    some_nightly(["nearly right", "scattered", "oracle", "wide", "right, then wrong", "huge", "end of text"], every=2),
)
def test_drafting_does_not_change_them(
    graph: GraphSession, tiny_bundle: Path, name: str, trees: bool, params: SamplingParams
) -> None:
    plain, expected, _ = decoded(graph, params)
    drafter = adversaries([*PROMPT, *plain], VOCABULARY, 0)[name]
    tokens, found, widest = decoded(graph, params, speculator_of(drafter, trees=trees))
    assert tokens == plain
    check(tiny_bundle, PROMPT, tokens, found)
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert drafter.proposals
    # A chain keeps one candidate of the many of "wide", which need not be the right one.
    assert widest > 1 or name in ("scattered", "end of text") or (name == "wide" and not trees)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1e9], ids=["nothing", "some", "everything"])
@pytest.mark.parametrize("name", ["nearly right", "oracle", "wide", None])
def test_recomputed_near_ties_give_those_of_the_recomputed_logits(
    graph: GraphSession, tiny_bundle: Path, name: str | None, epsilon: float
) -> None:
    plain, _, _ = decoded(graph, GREEDY)
    speculator = None if name is None else speculator_of(adversaries([*PROMPT, *plain], VOCABULARY, 0)[name])
    tokens, found, _ = decoded(graph, GREEDY, speculator, epsilon)
    assert tokens == plain
    check(tiny_bundle, PROMPT, tokens, found)


def test_an_exact_answer_of_a_quantized_model_has_those_of_plain_decoding(
    tiny_bundle_of: Callable[[str, str], Path],
) -> None:
    """Wide passes compute other logits there, so only recomputed ones equal those of plain decoding."""
    graph = GraphSession(tiny_bundle_of("qwen2", "int4") / "model.onnx", SessionConfig(choose_device("cpu"), 1))
    plain, expected, _ = decoded(graph, GREEDY)
    speculator = eager(SuffixDrafter(), RecyclingDrafter(RecycledTable(VOCABULARY)))
    tokens, found, _ = decoded(graph, GREEDY, speculator, 1e9)
    assert (tokens, found) == (plain, expected)


@pytest.mark.parametrize("draft_sampling", [DraftSampling.CHAIN, DraftSampling.TREE])
def test_sampled_draft_tokens_have_the_targets(
    graph: GraphSession, tiny_bundle: Path, draft_sampling: DraftSampling
) -> None:
    draft = DraftModel(graph.bind(graph.arena(256)), FixedCost({0: {1: 1e-9, 2: 1e-9}}), VOCABULARY, None)
    speculator = SampledSpeculator(draft, FixedCost(NEARLY_FREE), draft_sampling, trees=True)
    for seed in range(3):
        tokens, found, widest = decoded(graph, SamplingParams(1.2, top_k=50, seed=seed), speculator)
        check(tiny_bundle, PROMPT, tokens, found)
        assert widest > 1


def test_an_end_of_sequence_token_has_a_log_probability_too(graph: GraphSession) -> None:
    free, every, _ = decoded(graph, GREEDY)
    speculator = speculator_of(adversaries([*PROMPT, *free], VOCABULARY, 0)["oracle"])
    limits = DecodeLimits(30, frozenset(free[11:12]))
    end = free.index(free[11])
    for each in (None, speculator):
        tokens, found, _ = decoded(graph, GREEDY, each, limits=limits)
        assert tokens == free[:end]
        assert [one.token_id for one in found] == free[: end + 1]
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in every[: end + 1]], abs=1e-4)


def texts_of(reply: Reply) -> bytes:
    return b"".join(token.bytes for token in reply.logprobs)


@pytest.mark.parametrize(
    "options",
    [
        GenerateOptions(),
        GenerateOptions(temperature=0.9, seed=4, logit_bias={5: 2.0}, presence_penalty=0.5),
        GenerateOptions(speculation=Speculation.OFF),
        GenerateOptions(exact=True),
    ],
    ids=["greedy", "sampled", "plain", "exact"],
)
def test_an_engine_lists_the_tokens_of_its_answer(engine: Engine, tiny_bundle: Path, options: GenerateOptions) -> None:
    options = options.changed({"max_tokens": 40, "raw": True})
    without = engine.generate("the other thing", options)
    reply = engine.generate("the other thing", options, logprobs=K)
    assert (reply.text, without.logprobs) == (without.text, ())
    assert reply.stats.completion_tokens == len(reply.logprobs) == 40
    assert texts_of(reply).decode("utf-8", "replace") == reply.text
    prompt = engine.tokenizer.encode("the other thing", add_special_tokens=True)
    found = [
        PositionLogprobs(one.token_id, one.logprob, tuple((other.token_id, other.logprob) for other in one.top))
        for one in reply.logprobs
    ]
    check(tiny_bundle, prompt, [one.token_id for one in reply.logprobs], found)
    assert all(len(one.top) == K and all(not other.top for other in one.top) for one in reply.logprobs)
    alone = engine.generate("the other thing", options, logprobs=0)
    assert [(one.token_id, one.top) for one in alone.logprobs] == [(one.token_id, ()) for one in reply.logprobs]
    # Passes of other widths differ in the last bits, and how much is drafted depends on the time that passes take.
    assert [one.logprob for one in alone.logprobs] == pytest.approx([one.logprob for one in reply.logprobs], abs=1e-4)


def test_every_chunk_has_the_tokens_that_it_completes(engine: Engine) -> None:
    chunks = list(engine.stream("the other thing", max_tokens=40, raw=True, logprobs=1))
    text, listed = b"", list[TokenLogprob]()
    for chunk in chunks:
        text += chunk.text.encode()
        listed += chunk.logprobs
        if "\ufffd" not in text.decode():
            assert text.startswith(b"".join(token.bytes for token in listed))
    assert tuple(listed) == Reply.of(chunks).logprobs


def test_tokens_of_a_stop_sequence_are_not_listed(engine: Engine) -> None:
    options = GenerateOptions(max_tokens=40, raw=True, logprobs=0)
    whole = engine.generate("the other thing", options)
    for start in range(1, len(whole.text) - 3, 5):
        stop = whole.text[start : start + 3]
        reply = engine.generate("the other thing", options, stop=stop)
        assert reply.text == whole.text.partition(stop)[0]
        count = len(reply.logprobs)
        assert [one.token_id for one in reply.logprobs] == [one.token_id for one in whole.logprobs[:count]]
        if "\ufffd" not in whole.text:
            assert texts_of(reply).startswith(reply.text.encode())
            assert len(b"".join(token.bytes for token in reply.logprobs[:-1])) <= len(reply.text.encode())


def test_a_conversation_and_a_recording_have_them_too(engine: Engine) -> None:
    with engine.session() as chat:
        reply = chat.send("hello", max_tokens=12, logprobs=2)
        assert texts_of(reply).decode("utf-8", "replace") == reply.text
        assert chat.send("more", max_tokens=4).logprobs == ()
    prompt = engine.tokenizer.encode("the", add_special_tokens=True)
    recorded = [9, 30, 31, 12, 45]
    for mode in (OracleMode.NONE, OracleMode.RIGHT):
        options = GenerateOptions(logprobs=0)
        replayed = Reply.of(engine.model.replay(None, prompt, recorded, options, oracle_mode=mode))
        assert [one.token_id for one in replayed.logprobs] == recorded


def test_every_choice_has_its_own(engine: Engine, tiny_bundle: Path) -> None:
    """Choices alternate pass by pass, so one must not read the logits of another."""
    options = GenerateOptions(max_tokens=30, raw=True, temperature=1.2, seed=5, logprobs=K)
    reply = engine.generate("the other thing", options, n=3)
    prompt = engine.tokenizer.encode("the other thing", add_special_tokens=True)
    assert len({choice.text for choice in reply.choices}) == 3
    for choice in reply.choices:
        found = [
            PositionLogprobs(one.token_id, one.logprob, tuple((other.token_id, other.logprob) for other in one.top))
            for one in choice.logprobs
        ]
        check(tiny_bundle, prompt, [one.token_id for one in choice.logprobs], found)
        assert texts_of(choice).decode("utf-8", "replace") == choice.text


def test_a_number_of_alternatives_beyond_the_limit_is_refused(engine: Engine) -> None:
    for count in (-1, 21):
        with pytest.raises(InputError, match=f"logprobs is {count}; it must be between 0 and 20"):
            engine.generate("a", logprobs=count)
    with pytest.raises(InputError, match="logprobs is True; it must be a whole number"):
        engine.generate("a", logprobs=True)


def test_a_vocabulary_smaller_than_the_number_of_alternatives(tmp_path: Path) -> None:
    tiny = pytest.importorskip("support.tiny_models")
    with load(tiny.write_bundle(tmp_path, vocab_size=12), threads=1) as engine:
        reply = engine.model.replay(None, [5, 6], [7, 8], GenerateOptions(logprobs=20))
        assert [len(one.top) for one in Reply.of(reply).logprobs] == [12, 12]
