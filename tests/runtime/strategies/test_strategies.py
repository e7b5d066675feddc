"""Decoding strategies: each against a slow textbook version, and from outside with drafts, grammars and other texts."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgerun
from edgerun import EdgeError, Engine, InputError, Monitor, ResponseFormat, Speculation, Strategy, strategy
from edgerun.edge.cli.main import main
from edgerun.runtime.sampling.logit_stage import FirstToken
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.strategies.strategy import STRATEGIES, StrategyStage, parse_strategy
from support.adversarial_drafters import NEARLY_FREE, FixedCost

pytest.importorskip("support.tiny_models", reason="needs the export extra")

VOCAB = 6
LOGITS = st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=VOCAB, max_size=VOCAB)
MONITOR = Monitor(lambda text: "e" not in text)
EVERY: dict[str, list[Strategy]] = {
    **{name: [strategy(name)] for name in STRATEGIES if name != "anchored"},  # test_second_readers.py has an anchor
    "monitor": [MONITOR],
    "several": [strategy("dry"), strategy("typical"), strategy("mirostat", tau=3.0)],
}


class Letters:
    """A tokenizer of letters, as far as strategies use one."""

    token_bytes = SimpleNamespace(of=lambda token: b"abcd\nf"[token : token + 1])

    @staticmethod
    def decode(ids: list[int]) -> str:
        return "".join("abcd\nf"[token] for token in ids)


def sampler_of(*strategies: Strategy, temperature: float = 1.0) -> Sampler:
    params = SamplingParams(temperature)
    tokenizer: Any = Letters()
    return Sampler(params, VOCAB, None, [each.start(params, VOCAB, tokenizer) for each in strategies])


def distribution_of(sampler: Sampler, logits: Any) -> dict[int, float]:
    """Probabilities above 0 by token."""
    ids, probabilities = sampler.probabilities(np.array(logits, np.float32))
    return {token: p for token, p in zip(ids.tolist(), probabilities.tolist(), strict=True) if p > 0}


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(x / temperature) for x in logits]
    return [weight / sum(weights) for weight in weights]


def kept(probabilities: list[float], tokens: set[int]) -> dict[int, Any]:
    total = sum(probabilities[token] for token in tokens)
    return {token: pytest.approx(probabilities[token] / total) for token in sorted(tokens)}


@given(logits=LOGITS, mass=st.floats(0.05, 0.95))
def test_typical_keeps_the_tokens_nearest_to_the_entropy(logits: list[float], mass: float) -> None:
    p = softmax(logits)
    entropy = -sum(x * math.log(x) for x in p)
    distance = [round(abs(-math.log(x) - entropy), 9) for x in p]
    tokens: set[int] = set()
    for edge in sorted(set(distance)):
        if sum(p[token] for token in tokens) >= mass:
            break
        tokens |= {token for token in range(VOCAB) if distance[token] == edge}
    assert distribution_of(sampler_of(strategy("typical", mass=mass)), logits) == kept(p, tokens)


@given(logits=LOGITS, epsilon=st.floats(0.01, 0.5))
def test_eta_asks_for_less_where_the_entropy_is_high(logits: list[float], epsilon: float) -> None:
    p = softmax(logits)
    least = min(epsilon, math.sqrt(epsilon) * math.exp(sum(x * math.log(x) for x in p)))
    tokens = {token for token in range(VOCAB) if p[token] >= least} or {token for token in p if p == max(p)}
    assert distribution_of(sampler_of(strategy("eta", epsilon=epsilon)), logits) == kept(p, tokens)


@given(logits=LOGITS, temperature=st.sampled_from([0.5, 1.0, 4.0]))
def test_top_n_sigma_keeps_the_same_tokens_at_every_temperature(logits: list[float], temperature: float) -> None:
    deviation = float(np.std(logits)) + 1e-9
    tokens = {token for token in range(VOCAB) if logits[token] >= max(logits) - deviation}
    found = distribution_of(sampler_of(strategy("top-n-sigma"), temperature=temperature), logits)
    assert found == kept(softmax(logits, temperature), tokens)


def test_xtc_mixes_what_it_would_sample_from() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.12, 0.09, 0.06, 0.03)]
    found = distribution_of(sampler_of(strategy("xtc", probability=0.25)), logits)
    without = 0.12 + 0.09 + 0.06 + 0.03
    assert found[0] == pytest.approx(0.75 * 0.4)
    assert found[2] == pytest.approx(0.75 * 0.12 + 0.25 * 0.12 / without)
    assert found[5] == pytest.approx(0.75 * 0.03 + 0.25 * 0.03 / without)
    one_is_likely = [math.log(p) for p in (0.7, 0.09, 0.08, 0.06, 0.04, 0.03)]
    assert distribution_of(sampler_of(strategy("xtc", probability=1.0)), one_is_likely)[0] == pytest.approx(0.7)


def test_mirostat_follows_the_surprise_and_forgets_what_is_rolled_back() -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125)]
    sampler = sampler_of(strategy("mirostat", tau=1.6, eta=1.0))
    sampler.observe_prompt([1, 2, 3])
    first = distribution_of(sampler, logits)
    assert set(first) == {0, 1, 2}  # 3.2 bits at most
    with sampler.rollback():
        sampler.observe([2])
        # The surprise was log2(7) bits, 1.2 more than the target, so the bound is 2.0 bits.
        assert set(distribution_of(sampler, logits)) == {0}
    assert distribution_of(sampler, logits) == first
    sampler.observe([0])
    assert set(distribution_of(sampler, logits)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("text", "penalties"),
    [
        ("abcab", {"c": 1.0}),  # "ab" was followed by c
        ("cabdcab", {"d": 2.0}),  # "cab" is one token longer than allowed
        ("a\nba\n", {}),  # no sequence goes across a line end
        ("abca", {}),  # one token is allowed
        ("abcabdab", {"c": 1.0, "d": 1.0}),
    ],
)
def test_dry_penalizes_what_would_go_on_as_before(text: str, penalties: dict[str, float]) -> None:
    sampler = sampler_of(strategy("dry", multiplier=1.0, base=2.0))
    letters = "abcd\nf"
    sampler.observe_prompt([letters.index(letter) for letter in text[:3]])
    sampler.observe([letters.index(letter) for letter in text[3:]])
    expected = softmax([-penalties.get(letter, 0.0) for letter in letters])
    assert distribution_of(sampler, np.zeros(VOCAB)) == {token: pytest.approx(p) for token, p in enumerate(expected)}


@pytest.mark.parametrize(
    ("path", "logits", "token"),
    [
        ([1, 2], [3.0, 2.0, 1.0, 0, 0, 0], 0),  # a new token
        ([0, 1], [3.0, 2.9, 2.8, 0, 0, 0], 2),  # both likelier ones would come again
        ([2, 0, 1, 2], [9.0, 3.0, 2.0, 0, 0, 0], 0),  # it would repeat two tokens, but is nearly certain
        ([2, 0, 1, 2], [2.1, 2.0, 1.9, 1.8, 0, 0], 3),
    ],
)
def test_momentum_meets_resistance_where_it_comes_back(path: list[int], logits: list[float], token: int) -> None:
    sampler = sampler_of(strategy("momentum"), temperature=0.0)
    sampler.observe_prompt(path[:1])
    sampler.observe(path[1:])
    assert sampler.choose(np.array(logits, np.float32), len(path)) == token


@pytest.mark.parametrize("size", [5, 300, 5000])
@pytest.mark.parametrize("bias", [(), ((3, 50.0),)])
def test_a_branch_takes_the_token_of_its_rank(size: int, bias: tuple[tuple[int, float], ...]) -> None:
    logits = np.random.default_rng(size).integers(-8, 8, size).astype(np.float32)
    logits[:2] = -np.inf
    params = SamplingParams(logit_bias=bias)
    scores = logits.copy()
    for token, added in bias:
        scores[token] += added
    order = sorted(range(2, size), key=lambda token: (-scores[token], token))
    for rank in (0, 1, 2, 7, 70, size):
        sampler = Sampler(params, size, None, [FirstToken(4, rank)])
        sampler.observe_prompt([1, 2, 3, 4])
        assert sampler.choose(logits, 4) == order[min(rank, size - 3)]
        sampler.observe([2])
        assert sampler.choose(logits, 5) == order[0]
    with pytest.raises(EdgeError, match="NaN"):
        Sampler(params, size, None, [FirstToken(0, 1)]).choose(logits * np.float32(np.nan), 0)


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Engine]:
    with edgerun.load(tiny_bundle, threads=1, cache=False, parallel=3) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", EVERY)
def test_the_text_does_not_depend_on_drafts_and_other_texts(engine: Engine, name: str, temperature: float) -> None:
    strategies = [each for each in EVERY[name] if temperature or not each.filters]
    if not strategies:
        return
    options = {"strategies": strategies, "temperature": temperature, "seed": 3, "max_tokens": 24, "ignore_eos": True}
    prompt = "the sea and the sand and the sea and the "
    plain = engine.generate(prompt, speculation=Speculation.OFF, **options)
    drafted = engine.generate(prompt, speculation=Speculation.parse("suffix,recycle"), **options)
    assert drafted.text == plain.text
    assert drafted.stats.target_passes <= plain.stats.target_passes
    with ThreadPoolExecutor(3) as pool:
        texts = pool.map(lambda _: engine.generate(prompt, **options).text, range(3))
        assert set(texts) == {plain.text}


@pytest.mark.parametrize("name", EVERY)
def test_strategies_apply_within_a_grammar(engine: Engine, name: str) -> None:
    pytest.importorskip("llguidance")
    options = {"temperature": 0.9, "seed": 4, "response_format": ResponseFormat.regex("[a-d ]{6,20}")}
    texts = {
        engine.generate("the sea", strategies=EVERY[name], speculation=speculation, **options).text
        for speculation in (Speculation.OFF, Speculation.AUTO)
    }
    (text,) = texts
    assert set(text) <= set("abcd ")
    assert len(text) >= 6


def test_a_monitor_checks_every_text_and_must_allow_one(engine: Engine) -> None:
    options = {"max_tokens": 24, "ignore_eos": True}
    assert "e" in engine.generate("the sea", **options).text
    assert "e" not in engine.generate("the sea", strategies=[MONITOR], **options).text
    with pytest.raises(InputError, match="the monitor allows none of the 64 likeliest tokens"):
        engine.generate("the sea", strategies=[Monitor(lambda _: False)], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4},
        {"adadec": True, "entropy": 0.0},
        {"cntp": True, "entropy": 0.0, "trials": 8, "temperature": 1.5, "seed": 3},
    ],
)
def test_a_dead_end_of_a_monitor_ends_one_continuation_of_a_search(engine: Engine, options: dict[str, Any]) -> None:
    options |= {"max_tokens": 12, "ignore_eos": True}
    found = engine.generate("the sea", **options).text
    ends = []

    def allows(text: str) -> bool:
        ends.append(allowed := len(text) < 2 or not text.startswith(found[0]))
        return allowed

    other = engine.generate("the sea", strategies=[Monitor(allows)], **options).text
    assert not all(ends)
    assert other
    assert not other.startswith(found[0])
    calls = count()
    with pytest.raises(InputError, match="the monitor allows none|0 answers are possible"):
        engine.generate("the sea", strategies=[Monitor(lambda _: next(calls) < 64)], **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "there is no strategy 'nothing'; strategies are: anchored, cad, dry, eta, "),
        ("dry:colour=1", "the strategy dry has no option 'colour'; it has multiplier, base"),
        ("typical:mass=2", "strategy typical: mass is 2; it must be above 0 and below 1"),
        ("typical:mass=much", "strategy typical: mass is 'much'; it must be a number"),
        ("typical", "the strategy typical is given without a temperature; give one above 0"),
    ],
)
def test_what_is_wrong_with_a_strategy(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert main([str(tiny_bundle), "-p", "the sea", "--strategy", text, "-t", "0"]) == 2
    assert capsys.readouterr().err.startswith(f"edge-run: error: {message}")


def test_strategies_on_the_command_line(tiny_bundle: Path, capsys: pytest.CaptureFixture[str], engine: Engine) -> None:
    arguments = ["-n", "20", "-t", "0.9", "--seed", "2", "--json", "--strategy", "dry:multiplier=2,breakers=x"]
    assert main([str(tiny_bundle), "-p", "the sea", *arguments, "--strategy", "xtc:probability=1"]) == 0
    strategies = [strategy("dry", multiplier=2.0, breakers="x"), strategy("xtc", probability=1.0)]
    reply = engine.generate("the sea", max_tokens=20, temperature=0.9, seed=2, strategies=strategies)
    assert json.loads(capsys.readouterr().out)["text"] == reply.text
    assert parse_strategy("dry:multiplier=2,breakers=x") == strategies[0]


class Reverse(Strategy):
    """A strategy of another package, which prefers the least likely token."""

    name: ClassVar[str] = "reverse"

    def scores(self, logits: Any, text: StrategyStage) -> Any:
        return -logits


def test_other_packages_add_strategies(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.EntryPoint("reverse", f"{__name__}:Reverse", "edgerun.strategies")
    monkeypatch.setattr(found.__class__, "load", lambda _: Reverse)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [found] if "strategies" in group else [])
    first = engine.generate("the sea", strategies=[strategy("reverse")], max_tokens=1, logprobs=0, ignore_eos=True)
    assert first.logprobs[0].logprob < -5
    with pytest.raises(InputError, match=f"strategies are: {', '.join(sorted([*STRATEGIES, 'reverse']))}"):
        strategy("other")


@pytest.mark.parametrize(("name", "option"), [("typical", "mass"), ("eta", "epsilon")])
def test_filters_equal_those_of_transformers(name: str, option: str) -> None:
    torch = pytest.importorskip("torch", reason="needs the oracle extra")
    process = pytest.importorskip("transformers.generation.logits_process", reason="needs the oracle extra")
    warper = {"typical": process.TypicalLogitsWarper, "eta": process.EtaLogitsWarper}[name]
    random = np.random.default_rng(5)
    for value in (0.02, 0.3, 0.7):
        for _ in range(50):
            logits = random.normal(0, 2, VOCAB).astype(np.float32)
            scores = warper(value)(None, torch.tensor(logits)[None])[0].numpy()
            found = distribution_of(sampler_of(strategy(name, **{option: value})), logits)
            assert set(found) == set(np.flatnonzero(scores > -np.inf).tolist())


def test_a_monitor_sees_the_whole_answer_where_a_full_context_has_left_some_out(engine: Engine) -> None:
    seen = [""]
    monitor = Monitor(lambda text: not seen.append(text), candidates=1)
    options = {"raw": True, "ignore_eos": True, "overflow": "window", "speculation": Speculation.OFF}
    reply = engine.generate("the sea", max_tokens=300, strategies=[monitor], **options)
    assert reply.stats.context_shifts
    assert reply.text.startswith(seen[-1])


@pytest.mark.parametrize(
    ("multiplier", "base", "penalty", "length"),
    [(0.0, 10.0, 0.0, 20), (2.0, 10.0, 1e6, 20), (0.5, 1.0, 0.5, 20), (1.0, 1.001, 1.001**126, 129)],
)
def test_dry_reads_a_long_repetition_up_to_the_largest_penalty(
    multiplier: float, base: float, penalty: float, length: int
) -> None:
    looked_at = list[int]()
    tokenizer: Any = SimpleNamespace(token_bytes=SimpleNamespace(of=lambda token: looked_at.append(token) or b"a"))
    stage = strategy("dry", multiplier=multiplier, base=base).start(SamplingParams(), VOCAB, tokenizer)
    stage.observe_prompt([1] * 400)
    expected = [0.0, pytest.approx(-penalty), *[0.0] * (VOCAB - 2)]
    assert stage.scores(np.zeros(VOCAB, np.float32)).tolist() == expected
    assert len(looked_at) < length * len('\n:"*')


def test_a_breaker_is_a_whole_character(engine: Engine) -> None:
    """Others begin with the same byte of UTF-8."""
    vocab_size, tokens = engine.model.graph_io.vocab_size, engine.tokenizer.encode_plain("\u00e4b\u00e4b\u00e4b")
    changed = []
    for breakers in ("", "\u00e9"):
        stage = strategy("dry", breakers=breakers).start(SamplingParams(), vocab_size, engine.tokenizer)
        stage.observe_prompt(tokens)
        changed.append(stage.scores(np.zeros(vocab_size, np.float32)).tolist())
    assert changed[0] == changed[1]


def test_numbers_are_texts_where_an_option_is_a_text() -> None:
    assert parse_strategy("cad:text=1984,alpha=2") == strategy("cad", text="1984", alpha=2)


def test_momentum_samples_in_proportion_to_what_resistance_leaves() -> None:
    params, probabilities = SamplingParams(temperature=1.0), [0.6, 0.3, 0.06, 0.04]
    for alpha, expected in ((0.2, [0.4 / 0.8, 0.3 / 0.8, 0.06 / 0.8, 0.04 / 0.8]), (1.0, [0.0, 0.75, 0.15, 0.1])):
        sampler = Sampler(params, 4, None, [strategy("momentum", k=4, alpha=alpha).start(params, 4, Letters())])
        sampler.observe_prompt([0])
        assert sampler.probabilities(np.log(probabilities, dtype=np.float32))[1] == pytest.approx(expected, abs=1e-6)
    stage = strategy("momentum", k=2, alpha=1.0).start(params, 4, Letters())
    sampler = Sampler(params, 4, None, [stage])
    sampler.observe_prompt([0, 1])
    assert sampler.probabilities(np.log(probabilities, dtype=np.float32))[1].tolist() == [1.0, 0.0, 0.0, 0.0]
