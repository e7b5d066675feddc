"""Lossy decoding takes the tokens that its rule says, whatever is drafted and runs besides, and says what it took."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from edgerun import Engine, GenerateOptions, InputError, ResponseFormat
from edgerun.edge.cli.main import main
from edgerun.models.pairing import name_draft
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.choice import DraftSampling, Speculation
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.strategies.lossy import RULES, LossyRule, LossySampler, LossySpeculator
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.draft_heads import eager_engine, export_with_eagle_head
from support.emulated_graph import EmulatedGraph, Floats, Text
from support.tiny_models import write_bundle

V, LENGTH = 6, 24
PROMPT = (2, 5, 1)
NAMES = (b"a", b" b.", b"c", b"d!", b"e\n", b" f")
SURE = {64: {1: 1.0, 2: 2.0, 16: 16.0}}
"""A pass cost with which no draft token pays."""
PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.9, top_k=4, repeat_penalty=1.2, seed=5),
}
MODES = ("bild:0.5,1.5", "typical:0.3", "entropy:1.5", "lead:2")


@cache
def target_logits(text: Text) -> Floats:
    return np.random.default_rng([1, *text]).normal(0, 2, V).astype(np.float32)


@cache
def draft_logits(text: Text) -> Floats:
    noise = np.random.default_rng([2, *text]).normal(0, 1.5, V)
    return (target_logits(text) + noise).astype(np.float32)


def chosen(logits: Floats, text: list[int], params: SamplingParams) -> int:
    sampler = Sampler(params, V)
    sampler.observe_prompt(PROMPT)
    sampler.observe(text)
    return sampler.choose(logits, len(PROMPT) + len(text))


def probs(logits: Floats) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def entropy(logits: Floats) -> float:
    p = probs(logits)
    return float(-(p * np.log(np.maximum(p, 1e-300))).sum())


def reference(mode: str, params: SamplingParams) -> tuple[list[int], list[bool]]:
    """The text by the definitions of the papers, one token at a time, and which tokens are the draft model's."""
    name, _, numbers = mode.partition(":")
    values = [float(number) for number in numbers.split(",")]
    text, by_draft, entropies, since = list[int](), list[bool](), list[float](), 0
    for _ in range(LENGTH):
        target, draft = target_logits((*PROMPT, *text)), draft_logits((*PROMPT, *text))
        token = chosen(draft, text, params)
        entropies.append(entropy(draft) / math.log(2))
        if name == "bild":
            taken = probs(draft)[token] > values[0] and -math.log(probs(target)[token]) <= values[1]
        elif name == "typical":
            taken = probs(target)[token] > min(values[0], math.sqrt(values[0]) * math.exp(-entropy(target)))
        elif name == "entropy":
            taken = np.mean(entropies[-5:]) <= values[0]
        else:
            taken = since >= values[0]
        text.append(token if taken else chosen(target, text, params))
        since = 0 if NAMES[text[-1]].strip(b" ")[-1:] in (b".", b"!", b"\n") else since + 1
        by_draft.append(bool(taken))
    return text, by_draft


def decoded(
    mode: str, params: SamplingParams, cost: FixedCost, *, trees: bool = True
) -> tuple[list[int], list[bool], int]:
    """The text of the decode loop, which tokens are the draft model's, and the number of the target's passes."""
    model = DraftModel(EmulatedGraph(draft_logits, V, 64), FixedCost({64: {1: 1e-6, 16: 1.1e-6}}), V)
    speculator = LossySpeculator([SuffixDrafter()], cost, model=model, trees=trees)
    by_draft: list[bool] = []
    target = EmulatedGraph(target_logits, V, 64)
    sampler = LossySampler(params, V, None, LossyRule.parse(mode), speculator, lambda token: NAMES[token], by_draft)
    steps = list(decode(target, PROMPT, sampler, DecodeLimits(LENGTH, frozenset()), speculator))
    return [token for step in steps for token in step.tokens], by_draft, target.passes


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("mode", MODES)
def test_a_rule_decides_every_token_whatever_is_drafted(mode: str, params: SamplingParams) -> None:
    expected = reference(mode, params)
    assert 0 < sum(expected[1]) < LENGTH
    eager, lazy = FixedCost(NEARLY_FREE), FixedCost(SURE)
    assert decoded(mode, params, eager)[:2] == expected
    assert decoded(mode, params, eager, trees=False)[:2] == expected
    assert decoded(mode, params, lazy)[:2] == expected
    assert decoded(mode, params, eager)[2] < decoded(mode, params, lazy)[2] == LENGTH


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_limits_are_each_models_own_text(params: SamplingParams) -> None:
    """With the draft model's text, every token is verified and none is the target's."""
    text: dict[str, list[int]] = {"draft": [], "target": []}
    for _ in range(LENGTH):
        of = text["draft"]
        of.append(chosen(draft_logits((*PROMPT, *of)), of, params))
        of = text["target"]
        of.append(chosen(target_logits((*PROMPT, *of)), of, params))
    assert text["draft"] != text["target"]
    limits = {
        "draft": ("bild:0,inf", "typical:0", "entropy:inf", "lead:0"),
        "target": ("bild:1,inf", "bild:0,0", "entropy:0", "lead:99"),
    }
    for whose, modes in limits.items():
        for mode in modes:
            found, by_draft, _ = decoded(mode, params, FixedCost(NEARLY_FREE))
            assert (found, mode) == (text[whose], mode)
            assert set(by_draft) == {whose == "draft"}


@pytest.mark.parametrize("mode", MODES)
def test_a_rule_is_its_text(mode: str) -> None:
    assert str(LossyRule.parse(mode)) == mode
    assert GenerateOptions(lossy=mode).lossy == LossyRule.parse(mode)
    assert set(RULES) == {each.partition(":")[0] for each in MODES}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with another one as its draft."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_bundle(folder, seed=1, max_position_embeddings=600)
    write_bundle(target / "draft", seed=1, max_position_embeddings=600, num_hidden_layers=1)
    name_draft(target, target / "draft")
    return target


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with eager_engine(bundle) as engine:
        yield engine


REAL = ("bild:0.005,5", "typical:0.005", "entropy:3.5", "lead:3")
"""Rules that take tokens of both tiny models, which are never sure."""
OPTIONS = {
    "greedy": GenerateOptions(max_tokens=30, ignore_eos=True),
    "sampled": GenerateOptions(max_tokens=30, ignore_eos=True, temperature=0.8, top_k=40, repeat_penalty=1.1, seed=3),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("mode", REAL)
def test_an_answer_is_the_same_alone_and_beside_others(engine: Engine, mode: str, options: GenerateOptions) -> None:
    prompts = ("the other thing", "in the in the in the", "a", "the other")
    alone = [engine.generate(prompt, options, lossy=mode) for prompt in prompts]
    only = [engine.generate(prompt, options, lossy=mode, speculation=Speculation.parse("model")) for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        beside = list(threads.map(lambda prompt: engine.generate(prompt, options, lossy=mode), prompts))
    assert [reply.text for reply in alone] == [reply.text for reply in beside] == [reply.text for reply in only]
    counts = [reply.stats.by_model for reply in alone]
    assert all(sum(each.values()) == reply.stats.completion_tokens for each, reply in zip(counts, alone, strict=True))
    assert min(sum(each[model] for each in counts) for model in ("draft", "target")) > 0
    assert all(reply.stats.mean_logprob is not None for reply in alone)
    assert alone[0].stats.drafted > 0
    plain = engine.generate(prompts[0], options)
    assert (plain.stats.by_model, plain.stats.mean_logprob) == ({}, None)


def test_several_answers_add_up(engine: Engine) -> None:
    reply = engine.generate("the other thing", OPTIONS["sampled"], lossy="lead:5", n=3)
    single = [engine.generate("the other thing", OPTIONS["sampled"], lossy="lead:5", seed=3 + at) for at in range(3)]
    assert [choice.text for choice in reply.choices] == [each.text for each in single]
    both = single[0].stats + single[1].stats
    assert both.by_model["draft"] == sum(each.stats.by_model["draft"] for each in single[:2]) > 0


def test_an_answer_of_a_format_keeps_to_it(engine: Engine) -> None:
    pytest.importorskip("llguidance", reason="needs the extra structured")
    form = ResponseFormat.regex("[a-e]{8}(in|the)+x")
    for mode in REAL:
        reply = engine.generate("the", OPTIONS["greedy"], ignore_eos=False, lossy=mode, response_format=form)
        assert all(letter in "abcde" for letter in reply.text[:8])
        assert sum(reply.stats.by_model.values()) == reply.stats.completion_tokens


def test_an_answer_that_outgrows_the_context_goes_on(bundle: Path) -> None:
    with eager_engine(bundle, context=64, overflow="window") as engine:
        options = replace(OPTIONS["greedy"], max_tokens=100, raw=True)
        reply = engine.generate("in the other", options, lossy="lead:3")
    assert reply.stats.context_shifts > 0
    assert sum(reply.stats.by_model.values()) == reply.stats.completion_tokens == 100


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"lossy": "bild:1"}, "lossy is 'bild:1'; give bild:A,B, typical:E, entropy:H or lead:N with numbers"),
        ({"lossy": "sure:1"}, "lossy is 'sure:1'"),
        ({"lossy": "lead:x"}, "lossy: lead N is 'x'; it must be a whole number"),
        ({"lossy": "lead:2.5"}, "lossy: lead N is 2.5; it must be a whole number"),
        ({"lossy": "bild:2,1"}, "lossy: bild A is 2; it must be between 0 and 1"),
        ({"lossy": "entropy:nan"}, "lossy: entropy H is nan; it must be 0 or more"),
        ({"lossy": "lead:1", "exact": True}, "lossy and exact are both given; leave one of them out"),
        ({"lossy": "lead:1", "branch": True}, "lossy and branch are both given"),
        ({"lossy": "lead:1", "draft_sampling": DraftSampling.TREE}, "lossy and draft_sampling are both given"),
        ({"lossy": 3}, "lossy is 3; it must be"),
    ],
)
def test_what_cannot_be_is_refused(choices: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as raised:
        GenerateOptions(**choices)
    assert message in str(raised.value)


def test_it_needs_a_draft_model_of_its_own(engine: Engine, tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lossy decoding needs a draft model; give a draft model with --draft"):
        engine.generate("the", lossy="lead:1", speculation=Speculation.parse("suffix"))
    with pytest.raises(InputError, match="num_beams and lossy are both given"):
        engine.generate("the", lossy="lead:1", num_beams=2)
    with pytest.raises(InputError, match="lossy decoding needs drafts, and there are none; leave lossy out"):
        engine.generate("the", lossy="lead:1", speculation=Speculation.OFF)
    with eager_engine(tiny_bundle) as alone, pytest.raises(InputError, match="lossy decoding needs a draft model"):
        alone.generate("the", lossy="lead:1")
    head = export_with_eagle_head(tmp_path).bundle
    with eager_engine(head) as headed, pytest.raises(InputError, match="not a draft head"):
        headed.generate("the", lossy="lead:1")


def test_the_command_line_says_what_it_took(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choices = [str(bundle), "-p", "the other", "--raw", "-n", "20", "--ignore-eos", "--device", "cpu"]
    assert main([*choices, "--lossy", "lead:5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tokens_by_model"]["draft"] + shown["tokens_by_model"]["target"] == 20
    assert shown["tokens_by_model"]["target"] >= 5
    assert shown["mean_logprob"] < 0
    assert main([*choices, "--lossy", "lead:5", "--stats"]) == 0
    assert "of the tokens by the draft model" in capsys.readouterr().err
    assert main([*choices, "--lossy", "lead:5", "--exact"]) == 2
    assert "lossy and exact are both given" in capsys.readouterr().err


def test_a_request_has_a_field_for_it(bundle: Path) -> None:
    pytest.importorskip("starlette", reason="needs the serve extra")
    import edgerun.server
    from support.serving import CHAT, asked, chat_body

    app = edgerun.server.app(bundle, cache=False)
    texts = []
    for fields in ({"lossy": "bild:0,inf"}, {}):
        answered = asked(app, "POST", CHAT, json=chat_body("the other thing", temperature=0, max_tokens=20, **fields))
        texts.append(answered.json()["choices"][0]["message"]["content"])
    with eager_engine(bundle / "draft") as draft:
        messages = [{"role": "user", "content": "the other thing"}]
        assert texts[0] == draft.generate(messages, max_tokens=20, temperature=0.0).text != texts[1]
    wrong = asked(app, "POST", CHAT, json=chat_body(lossy="bild:7,1"))
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "lossy")
