"""Tokens of answers, however they are decoded: log-probabilities against the float64 decoder, and origins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import Engine, GenerateOptions, OriginKind, Reply, Speculation, TokenLogprob, TokenOrigin
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.runtime.decode import DecodeLimits, FinishReason, Step, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.sampling.logprobs import LogSoftmax, PositionLogprobs
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.choice import SOURCE_NAMES, DraftSampling
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.sampled import ModelDistributions
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.replay import OracleMode
from edgerun.runtime.speculation.sampled_speculator import SampledSpeculator
from edgerun.runtime.speculation.speculator import Speculator
from edgerun.runtime.speculation.tree import Source
from edgerun.runtime.speculation.verification import NearTies
from support.adversarial_drafters import (
    NEARLY_FREE,
    FixedCost,
    adversaries,
    eager,
)
from support.nightly import some_nightly

VOCABULARY = 300
K = 5
LIMITS = DecodeLimits(30)
GREEDY = SamplingParams()
ADJUSTED = SamplingParams(0.7, top_k=30, top_p=0.9, repeat_penalty=1.3, logit_bias=((7, 5.0), (9, -50.0)), seed=3)
PROMPT = [*range(20, 32), *range(20, 26)]
NAMES = list(adversaries([0], VOCABULARY, 0))


def expected_logprobs(bundle: Path, token_ids: list[int]) -> np.ndarray:
    """Log-softmax, float64 `[n, V]`, of the naive decoder's logits at every token."""
    source = bundle.parent / "checkpoint"
    config = read_config(source)
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


def steps_of(
    graph: GraphSession,
    params: SamplingParams = GREEDY,
    speculator: Speculator | None = None,
    epsilon: float | None = None,
    limits: DecodeLimits = LIMITS,
) -> list[Step]:
    bound, sampler = graph.bind(graph.arena(256)), Sampler(params, VOCABULARY)
    near_ties = None if epsilon is None else NearTies(bound, sampler, epsilon, lambda: False)
    if isinstance(speculator, SampledSpeculator):
        speculator.start_answer(params)
    steps = list(decode(bound, PROMPT, sampler, limits, speculator, near_ties, LogSoftmax(K, VOCABULARY)))
    assert all(len(step.logprobs) == step.produced for step in steps)
    return steps


def tokens_of(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def logprobs_of(steps: list[Step]) -> list[PositionLogprobs]:
    return [one for step in steps for one in step.logprobs]


def check_origins(steps: list[Step]) -> Counter[OriginKind]:
    """Compare every step's origins with its round, and return how many tokens there are of every kind."""
    for index, step in enumerate(steps):
        assert len(step.origins) == len(step.tokens)
        accepted = [origin for origin in step.origins if origin.kind is OriginKind.ACCEPTED]
        own = [origin for origin in step.origins if origin.kind is not OriginKind.ACCEPTED]
        ended = step.finish is FinishReason.STOP
        # Every round has one token that is not accepted, its last; one that ends the sequence is not listed.
        assert len(own) == (not ended)
        assert step.origins[len(accepted) :] == tuple(own)
        round_ = step.round
        if round_ is None or round_.width == 1:
            kind = OriginKind.DECODED if index else OriginKind.PREFILL
            assert step.origins == ((TokenOrigin(kind),) if not ended else ())
            continue
        by_source = [0] * len(Source)
        for origin in accepted:
            assert origin.rejected_id is None
            by_source[next(source for source, name in SOURCE_NAMES.items() if name == origin.drafter)] += 1
        assert tuple(by_source) == round_.accepted
        tree, last = round_.tree, round_.accepted_path[-1]
        children = {int(tree.tokens[node]): node for node in range(1, len(tree)) if tree.parents[node] == last}
        for origin in own:
            token = step.tokens[-1]
            if origin.kind is OriginKind.CORRECTED:
                assert token not in children
                assert origin.rejected_id is not None
                rejected = children[origin.rejected_id]
                assert origin.drafter == SOURCE_NAMES[tree.source[rejected]]
                assert tree.path_prob[rejected] == max(tree.path_prob[node] for node in children.values())
            else:
                assert origin == TokenOrigin(OriginKind.BONUS)
                assert not children or token in children
    return Counter(origin.kind for step in steps for origin in step.origins)


@pytest.mark.parametrize("params", [GREEDY, ADJUSTED], ids=["greedy", "sampled"])
def test_plain_decoding_gives_those_of_the_raw_logits(
    graph: GraphSession, tiny_bundle: Path, params: SamplingParams
) -> None:
    steps = steps_of(graph, params)
    check(tiny_bundle, PROMPT, tokens_of(steps), logprobs_of(steps))
    assert any(one.token_id != one.top[0][0] for one in logprobs_of(steps)) == (params is ADJUSTED)
    assert check_origins(steps) == {OriginKind.PREFILL: 1, OriginKind.DECODED: 29}


@pytest.mark.parametrize("params", [GREEDY, ADJUSTED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
@pytest.mark.parametrize("name", some_nightly(NAMES, every=2))
def test_drafting_does_not_change_them(
    graph: GraphSession, tiny_bundle: Path, name: str, trees: bool, params: SamplingParams
) -> None:
    plain = steps_of(graph, params)
    drafter = adversaries([*PROMPT, *tokens_of(plain)], VOCABULARY, 0)[name]
    steps = steps_of(graph, params, eager(drafter, trees=trees))
    assert tokens_of(steps) == tokens_of(plain)
    check(tiny_bundle, PROMPT, tokens_of(steps), logprobs_of(steps))
    expected = [one.logprob for one in logprobs_of(plain)]
    assert [one.logprob for one in logprobs_of(steps)] == pytest.approx(expected, abs=1e-4)
    kinds = check_origins(steps)
    assert sum(step.target_passes for step in steps) == len(steps) == 30 - kinds[OriginKind.ACCEPTED]
    if name in ("nearly right", "oracle", "right, then wrong", "huge"):
        assert kinds[OriginKind.ACCEPTED]
    if name in ("always wrong", "right, then wrong"):
        assert kinds[OriginKind.CORRECTED]
    if name == "always wrong":
        assert (kinds[OriginKind.ACCEPTED], kinds[OriginKind.BONUS]) == (0, 0)
    if name == "oracle":
        assert set(kinds) == {OriginKind.PREFILL, OriginKind.ACCEPTED, OriginKind.BONUS}


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1e9], ids=["nothing", "some", "everything"])
@pytest.mark.parametrize("name", ["nearly right", "oracle", "wide", None])
def test_recomputed_near_ties_give_those_of_the_recomputed_logits(
    graph: GraphSession, tiny_bundle: Path, name: str | None, epsilon: float
) -> None:
    plain = tokens_of(steps_of(graph))
    speculator = None if name is None else eager(adversaries([*PROMPT, *plain], VOCABULARY, 0)[name])
    steps = steps_of(graph, GREEDY, speculator, epsilon)
    assert tokens_of(steps) == plain
    check(tiny_bundle, PROMPT, plain, logprobs_of(steps))
    kinds = check_origins(steps)
    # Passes that recompute near ties give no tokens of their own.
    assert len(steps) == 30 - kinds[OriginKind.ACCEPTED] <= sum(step.target_passes for step in steps)


def test_an_exact_answer_of_a_quantized_model_has_those_of_plain_decoding(
    tiny_bundle_of: Callable[[str, str], Path],
) -> None:
    """Wide passes compute other logits there, so only recomputed ones equal those of plain decoding."""
    graph = GraphSession(tiny_bundle_of("qwen2", "int4") / "model.onnx", SessionConfig(choose_device("cpu"), 1))
    speculator = eager(SuffixDrafter(), RecyclingDrafter(RecycledTable(VOCABULARY)))
    plain, exact = steps_of(graph), steps_of(graph, GREEDY, speculator, 1e9)
    assert (tokens_of(exact), logprobs_of(exact)) == (tokens_of(plain), logprobs_of(plain))


@pytest.mark.parametrize("draft_sampling", [DraftSampling.CHAIN, DraftSampling.TREE])
def test_sampled_draft_tokens_have_the_targets(
    graph: GraphSession, tiny_bundle: Path, draft_sampling: DraftSampling
) -> None:
    draft = DraftModel(graph.bind(graph.arena(256)), FixedCost({0: {1: 1e-9, 2: 1e-9}}), VOCABULARY, None)
    speculator = SampledSpeculator(ModelDistributions(draft), FixedCost(NEARLY_FREE), draft_sampling, trees=True)
    for seed in range(3):
        steps = steps_of(graph, SamplingParams(1.2, top_k=50, seed=seed), speculator)
        check(tiny_bundle, PROMPT, tokens_of(steps), logprobs_of(steps))
        assert check_origins(steps)[OriginKind.ACCEPTED] > 0
        assert {origin.drafter for step in steps for origin in step.origins} <= {"model", None}


def test_an_end_of_sequence_token_has_a_log_probability_and_no_origin(graph: GraphSession) -> None:
    free = steps_of(graph)
    text, expected = tokens_of(free), [one.logprob for one in logprobs_of(free)]
    end = text.index(text[11])
    for name in (None, "oracle", "right, then wrong", "end of text"):
        drafter = None if name is None else adversaries([*PROMPT, *text], VOCABULARY, text[11])[name]
        speculator = None if drafter is None else eager(drafter)
        steps = steps_of(graph, speculator=speculator, limits=DecodeLimits(30, frozenset([text[11]])))
        assert tokens_of(steps) == text[:end]
        assert [one.token_id for one in logprobs_of(steps)] == text[: end + 1]
        assert [one.logprob for one in logprobs_of(steps)] == pytest.approx(expected[: end + 1], abs=1e-4)
        kinds = check_origins(steps)
        assert len(steps) == kinds.total() - kinds[OriginKind.ACCEPTED] + 1


def check_reply(bundle: Path, prompt: list[int], reply: Reply) -> None:
    """Compare the log-probabilities that a reply lists with the naive ones."""
    found = [
        PositionLogprobs(one.token_id, one.logprob, tuple((other.token_id, other.logprob) for other in one.top))
        for one in reply.logprobs
    ]
    check(bundle, prompt, [one.token_id for one in reply.logprobs], found)


def texts_of(reply: Reply) -> bytes:
    return b"".join(token.bytes for token in reply.logprobs)


def counted(reply: Reply) -> tuple[Counter[str], int]:
    """Numbers of accepted tokens by drafter, and of other tokens."""
    accepted, others = Counter[str](), 0
    for token in reply.logprobs:
        assert all(other.origin is None and not other.top for other in token.top)
        if token.origin.kind is OriginKind.ACCEPTED:
            assert token.origin.drafter is not None
            accepted[token.origin.drafter] += 1
        else:
            others += 1
    return accepted, others


def accepted_of(reply: Reply) -> dict[str, int]:
    return {name: counts.accepted for name, counts in reply.stats.by_source.items() if counts.accepted}


@pytest.mark.parametrize(
    "options",
    [
        GenerateOptions(),
        GenerateOptions(temperature=0.9, seed=4, logit_bias={5: 2.0}, presence_penalty=0.5),
        GenerateOptions(speculation=Speculation.OFF),
        GenerateOptions(exact=True),
        GenerateOptions(speculation=Speculation.of(Source.SUFFIX)),
    ],
    ids=["greedy", "sampled", "plain", "exact", "suffix"],
)
def test_an_engine_lists_the_tokens_of_its_answer(
    eager_engine: Engine, tiny_bundle: Path, options: GenerateOptions
) -> None:
    said = "the other thing in the other thing"
    options = options.changed({"max_tokens": 60, "raw": True, "ignore_eos": True})
    without = eager_engine.generate(said, options)
    reply = eager_engine.generate(said, options, logprobs=K)
    assert (reply.text, without.logprobs) == (without.text, ())
    assert reply.stats.completion_tokens == len(reply.logprobs) == 60
    assert texts_of(reply).decode("utf-8", "replace") == reply.text
    prompt = eager_engine.tokenizer.encode(said, add_special_tokens=True)
    check_reply(tiny_bundle, prompt, reply)
    assert all(len(one.top) == K for one in reply.logprobs)
    alone = eager_engine.generate(said, options, logprobs=0)
    assert [(one.token_id, one.top) for one in alone.logprobs] == [(one.token_id, ()) for one in reply.logprobs]
    # Passes of other widths differ in the last bits, and how much is drafted depends on the time that passes take.
    assert [one.logprob for one in alone.logprobs] == pytest.approx([one.logprob for one in reply.logprobs], abs=1e-4)
    accepted, others = counted(reply)
    assert accepted == accepted_of(reply)
    assert accepted.total() == reply.stats.accepted
    assert others == reply.stats.target_passes == 60 - reply.stats.accepted
    assert reply.logprobs[0].origin == TokenOrigin(OriginKind.PREFILL)
    assert bool(accepted) == (options.speculation is not Speculation.OFF)
    rejected = [token.origin for token in reply.logprobs if token.origin.rejected is not None]
    assert all(origin.kind is OriginKind.CORRECTED and origin.drafter for origin in rejected)
    assert bool(rejected) == (options.speculation is not Speculation.OFF)
    assert {origin.rejected for origin in rejected} <= set(
        map(eager_engine.tokenizer.token_bytes.shown, range(VOCABULARY))
    )


def test_every_chunk_has_the_tokens_that_it_completes(engine: Engine) -> None:
    chunks = list(engine.stream("the other thing", max_tokens=40, raw=True, logprobs=1))
    text, listed = b"", list[TokenLogprob]()
    for chunk in chunks:
        text += chunk.text.encode()
        listed += chunk.logprobs
        if "\ufffd" not in text.decode():
            assert text.startswith(b"".join(token.bytes for token in listed))
    assert tuple(listed) == Reply.of(chunks).logprobs


def test_tokens_of_a_stop_sequence_are_not_listed(eager_engine: Engine) -> None:
    """The statistics count what was computed; the list has what the answer has."""
    options, cut = GenerateOptions(max_tokens=60, raw=True, logprobs=0), 0
    whole = eager_engine.generate("the other thing in the other thing", options)
    for start in range(1, len(whole.text) - 3, 4):
        stop = whole.text[start : start + 3]
        reply = eager_engine.generate("the other thing in the other thing", options, stop=stop)
        assert reply.text == whole.text.partition(stop)[0]
        count = len(reply.logprobs)
        assert [one.token_id for one in reply.logprobs] == [one.token_id for one in whole.logprobs[:count]]
        if "\ufffd" not in whole.text:
            assert texts_of(reply).startswith(reply.text.encode())
            assert len(b"".join(token.bytes for token in reply.logprobs[:-1])) <= len(reply.text.encode())
        accepted, others = counted(reply)
        assert accepted.total() <= reply.stats.accepted
        assert others <= reply.stats.target_passes
        cut += reply.stats.accepted - accepted.total()
        origins = [token.origin for token in reply.logprobs]
        assert [origin for origin in origins if origin.kind is OriginKind.PREFILL] == origins[:1]
    assert cut > 0


def test_a_conversation_has_them_too(engine: Engine) -> None:
    with engine.session() as chat:
        reply = chat.send("hello", max_tokens=12, logprobs=2)
        assert texts_of(reply).decode("utf-8", "replace") == reply.text
        assert chat.send("more", max_tokens=4).logprobs == ()


def test_every_choice_has_its_own(engine: Engine, tiny_bundle: Path) -> None:
    """Choices alternate pass by pass, so one must not read the logits of another."""
    options = GenerateOptions(max_tokens=30, raw=True, temperature=1.2, seed=5, logprobs=K)
    reply = engine.generate("the other thing", options, n=3)
    prompt = engine.tokenizer.encode("the other thing", add_special_tokens=True)
    assert len({choice.text for choice in reply.choices}) == 3
    for choice in reply.choices:
        check_reply(tiny_bundle, prompt, choice)
        assert texts_of(choice).decode("utf-8", "replace") == choice.text


def test_a_vocabulary_smaller_than_the_number_of_alternatives(tmp_path: Path) -> None:
    tiny = pytest.importorskip("support.tiny_models")
    with edgerun.load(tiny.write_bundle(tmp_path, vocab_size=12), threads=1) as engine:
        reply = engine.model.replay(None, [5, 6], [7, 8], GenerateOptions(logprobs=20))
        assert [len(one.top) for one in Reply.of(reply).logprobs] == [12, 12]


def test_the_draft_models_tokens_and_recorded_answers(tiny_bundle_of: Callable[[str, str], Path]) -> None:
    target = tiny_bundle_of("qwen2", "fp32")
    with edgerun.load(target, draft=target, threads=1, cache=False) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        options = GenerateOptions(max_tokens=30, logprobs=0, speculation=Speculation.of(Source.MODEL))
        reply = engine.generate("the other", options)
        accepted, others = counted(reply)
        assert accepted == accepted_of(reply) == {"model": reply.stats.accepted}
        assert others + reply.stats.accepted == len(reply.logprobs)
        prompt, recorded = [30, 31, 32], [40, 41, 42, 43, 44, 45, 46]
        for mode, expected in ((OracleMode.RIGHT, OriginKind.ACCEPTED), (OracleMode.WRONG, OriginKind.CORRECTED)):
            replayed = Reply.of(
                engine.model.replay(None, prompt, recorded, GenerateOptions(logprobs=0), oracle_mode=mode)
            )
            accepted, _ = counted(replayed)
            assert accepted == accepted_of(replayed)
            assert [one.token_id for one in replayed.logprobs] == recorded
            found = {token.origin.kind for token in replayed.logprobs if token.origin}
            assert expected in found
            assert {token.origin.drafter for token in replayed.logprobs if token.origin} == {None, "other"}
