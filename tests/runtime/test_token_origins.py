"""How the tokens of answers came to be, compared with the rounds that emitted them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edgerun
from edgerun import Engine, GenerateOptions, OriginKind, Reply, Speculation, TokenOrigin
from edgerun.runtime.decode import DecodeLimits, FinishReason, Step, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.sampling.logprobs import LogSoftmax
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.choice import DraftSampling
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from edgerun.runtime.speculation.replay import OracleMode
from edgerun.runtime.speculation.rounds import DraftOrigin
from edgerun.runtime.speculation.sampled_speculator import SampledSpeculator
from edgerun.runtime.speculation.speculator import Speculator
from edgerun.runtime.speculation.tree import Source, Tree
from edgerun.runtime.speculation.verification import NearTies
from support.adversarial_drafters import NEARLY_FREE, Adversary, FixedCost, adversaries, chain_tree, speculator_of
from support.nightly import some_nightly

VOCABULARY = 300
LIMITS = DecodeLimits(30)
GREEDY = SamplingParams()
SAMPLED = SamplingParams(0.7, top_k=30, seed=3)
PROMPT = [*range(20, 32), *range(20, 26)]
NAMES = list(adversaries([0], VOCABULARY, 0))


@pytest.fixture(scope="module")
def graph(tiny_bundle: Path) -> GraphSession:
    return GraphSession(tiny_bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))


@pytest.fixture(scope="module")
def eager_engine(tiny_bundle: Path) -> Iterator[Engine]:
    """An engine in which nearly every draft token pays."""
    with edgerun.load(tiny_bundle, threads=1, cache=False) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        yield engine


def steps_of(
    graph: GraphSession,
    params: SamplingParams = GREEDY,
    speculator: Speculator | None = None,
    epsilon: float | None = None,
    limits: DecodeLimits = LIMITS,
) -> list[Step]:
    bound, sampler = graph.bind(graph.arena(256)), Sampler(params, VOCABULARY)
    near_ties = None if epsilon is None else NearTies(bound, sampler, epsilon, lambda: False)
    return list(decode(bound, PROMPT, sampler, limits, speculator, near_ties, LogSoftmax(0, VOCABULARY)))


def tokens_of(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def check(steps: list[Step]) -> Counter[OriginKind]:
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
            assert step.origins == ((DraftOrigin(kind),) if not ended else ())
            continue
        by_source = [0] * len(Source)
        for origin in accepted:
            assert origin.source is not None
            assert origin.rejected is None
            by_source[origin.source] += 1
        assert tuple(by_source) == round_.accepted
        tree, last = round_.tree, round_.accepted_path[-1]
        children = {int(tree.tokens[node]): node for node in range(1, len(tree)) if tree.parents[node] == last}
        for origin in own:
            token = step.tokens[-1]
            if origin.kind is OriginKind.CORRECTED:
                assert token not in children
                assert origin.rejected is not None
                rejected = children[origin.rejected]
                assert origin.source == tree.source[rejected]
                assert tree.path_prob[rejected] == max(tree.path_prob[node] for node in children.values())
            else:
                assert origin == DraftOrigin(OriginKind.BONUS)
                assert not children or token in children
    return Counter(origin.kind for step in steps for origin in step.origins)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
@pytest.mark.parametrize("name", some_nightly(NAMES, every=2))
def test_adversarial_drafts(graph: GraphSession, name: str, trees: bool, params: SamplingParams) -> None:
    plain = steps_of(graph, params)
    assert check(plain) == {OriginKind.PREFILL: 1, OriginKind.DECODED: 29}
    text = tokens_of(plain)
    drafter = adversaries([*PROMPT, *text], VOCABULARY, 0)[name]
    steps = steps_of(graph, params, speculator_of(drafter, trees=trees))
    assert tokens_of(steps) == text
    kinds = check(steps)
    assert sum(step.target_passes for step in steps) == len(steps) == 30 - kinds[OriginKind.ACCEPTED]


def test_what_a_draft_had_says_what_its_tokens_are(graph: GraphSession) -> None:
    plain = tokens_of(steps_of(graph))
    every = [*PROMPT, *plain]

    def kinds(name: str) -> Counter[OriginKind]:
        return check(steps_of(graph, speculator=speculator_of(adversaries(every, VOCABULARY, 0)[name])))

    assert set(kinds("oracle")) == {OriginKind.PREFILL, OriginKind.ACCEPTED, OriginKind.BONUS}
    wrong = kinds("always wrong")
    assert (wrong[OriginKind.ACCEPTED], wrong[OriginKind.BONUS]) == (0, 0)
    assert wrong[OriginKind.CORRECTED] > 0
    partly = kinds("right, then wrong")
    assert partly[OriginKind.ACCEPTED] > 0
    assert partly[OriginKind.CORRECTED] > 0


def test_the_most_probable_of_several_rejected_tokens_is_named(graph: GraphSession) -> None:
    plain = tokens_of(steps_of(graph))
    every = [*PROMPT, *plain]

    def wrong(done: list[int], _: int) -> Tree:
        right = every[len(done)]
        tokens = [(right + more) % VOCABULARY for more in (1, 2, 3)]
        return Tree.of([done[-1], *tokens], [-1, 0, 0, 0], [1.0, 0.3, 0.9, 0.6], [Source.OTHER] * 4)

    steps = steps_of(graph, speculator=speculator_of(Adversary(wrong)), limits=DecodeLimits(10))
    check(steps)
    drafted = [step for step in steps if step.round is not None and step.round.width > 2]
    assert drafted
    for step in drafted:
        (token,) = step.tokens
        assert step.origins == (DraftOrigin(OriginKind.CORRECTED, Source.OTHER, (token + 2) % VOCABULARY),)


def test_a_right_draft_token_beyond_the_largest_length_is_not_accepted(graph: GraphSession) -> None:
    plain = tokens_of(steps_of(graph))
    every = [*PROMPT, *plain]
    long = Adversary(lambda done, _: chain_tree(done[-1], every[len(done) :][:8], [1.0] * 8, Source.OTHER))

    for length in range(2, 9):
        steps = steps_of(graph, speculator=speculator_of(long), limits=DecodeLimits(length))
        assert check(steps).total() == length
        assert steps[-1].origins[-1].kind in (OriginKind.BONUS, OriginKind.DECODED)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1e9], ids=["nothing", "some", "everything"])
@pytest.mark.parametrize("name", ["nearly right", "oracle", "wide", None])
def test_recomputed_near_ties(graph: GraphSession, name: str | None, epsilon: float) -> None:
    plain = tokens_of(steps_of(graph))
    speculator = None if name is None else speculator_of(adversaries([*PROMPT, *plain], VOCABULARY, 0)[name])
    steps = steps_of(graph, speculator=speculator, epsilon=epsilon)
    assert tokens_of(steps) == plain
    kinds = check(steps)
    # Passes that recompute near ties give no tokens of their own.
    assert len(steps) == 30 - kinds[OriginKind.ACCEPTED] <= sum(step.target_passes for step in steps)


@pytest.mark.parametrize("draft_sampling", [DraftSampling.CHAIN, DraftSampling.TREE])
def test_sampled_draft_tokens(graph: GraphSession, draft_sampling: DraftSampling) -> None:
    found = Counter[OriginKind]()
    for seed in range(3):
        draft = DraftModel(graph.bind(graph.arena(256)), FixedCost({0: {1: 1e-9, 2: 1e-9}}), VOCABULARY, None)
        speculator = SampledSpeculator(draft, FixedCost(NEARLY_FREE), draft_sampling, trees=True)
        params = SamplingParams(1.2, top_k=50, seed=seed)
        speculator.start_answer(params)
        steps = steps_of(graph, params, speculator)
        found += check(steps)
        drafters = {origin.source for step in steps for origin in step.origins if origin.source is not None}
        assert drafters <= {Source.MODEL}
    assert found[OriginKind.ACCEPTED] > 0


def test_an_end_of_sequence_token_has_a_pass_and_is_not_listed(graph: GraphSession) -> None:
    free = tokens_of(steps_of(graph))
    end = free[11]
    for name in ("oracle", "right, then wrong", "end of text"):
        drafter = adversaries([*PROMPT, *free], VOCABULARY, end)[name]
        steps = steps_of(graph, speculator=speculator_of(drafter), limits=DecodeLimits(30, frozenset([end])))
        kinds = check(steps)
        assert len(steps) == kinds.total() - kinds[OriginKind.ACCEPTED] + 1


def counted(reply: Reply) -> tuple[Counter[str], int]:
    """Numbers of accepted tokens by drafter, and of other tokens."""
    accepted, others = Counter[str](), 0
    for token in reply.logprobs:
        assert token.origin is not None
        assert all(other.origin is None for other in token.top)
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
        GenerateOptions(temperature=0.9, seed=4),
        GenerateOptions(exact=True),
        GenerateOptions(speculation=Speculation.OFF),
        GenerateOptions(speculation=Speculation.of(Source.SUFFIX)),
    ],
    ids=["greedy", "sampled", "exact", "plain", "suffix"],
)
def test_origins_of_an_answer_add_up_to_its_statistics(eager_engine: Engine, options: GenerateOptions) -> None:
    prompt = "the other thing in the other thing"
    reply = eager_engine.generate(prompt, options, max_tokens=60, logprobs=2, ignore_eos=True)
    accepted, others = counted(reply)
    assert accepted == accepted_of(reply)
    assert accepted.total() == reply.stats.accepted
    assert others == reply.stats.target_passes == 60 - reply.stats.accepted
    assert reply.logprobs[0].origin == TokenOrigin(OriginKind.PREFILL)
    assert bool(accepted) == (options.speculation is not Speculation.OFF)
    rejected = [token.origin for token in reply.logprobs if token.origin and token.origin.rejected is not None]
    assert all(origin.kind is OriginKind.CORRECTED and origin.drafter for origin in rejected)
    assert all(token.origin is None for token in eager_engine.generate(prompt, options, max_tokens=5).logprobs)


def test_a_stop_sequence_cuts_accepted_tokens_off(eager_engine: Engine) -> None:
    """The statistics count what was computed; the list has what the answer has."""
    prompt = "the other thing in the other thing"
    whole = eager_engine.generate(prompt, max_tokens=60, logprobs=0)
    cut = 0
    for start in range(1, len(whole.text) - 3, 4):
        reply = eager_engine.generate(prompt, max_tokens=60, logprobs=0, stop=whole.text[start : start + 3])
        accepted, others = counted(reply)
        assert accepted.total() <= reply.stats.accepted
        assert others <= reply.stats.target_passes
        cut += reply.stats.accepted - accepted.total()
        origins = [token.origin for token in reply.logprobs]
        assert [origin for origin in origins if origin and origin.kind is OriginKind.PREFILL] == origins[:1]
    assert cut > 0


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
            found = {token.origin.kind for token in replayed.logprobs if token.origin}
            assert expected in found
            assert {token.origin.drafter for token in replayed.logprobs if token.origin} == {None, "other"}


def test_a_rejected_token_is_named_as_text(eager_engine: Engine) -> None:
    names = {eager_engine.tokenizer.token_bytes.shown(token) for token in range(VOCABULARY)}
    reply = eager_engine.generate("in the in the in the", max_tokens=60, logprobs=0)
    rejected = [token.origin.rejected for token in reply.logprobs if token.origin and token.origin.rejected]
    assert rejected
    assert set(rejected) <= names
