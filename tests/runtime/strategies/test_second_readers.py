"""Second readers: distributions by enumeration, and texts against two readers that an oracle combines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgerun
from edgerun import EdgeError, Engine, InputError, Speculation, Strategy, strategy
from edgerun.edge.cli.main import main
from edgerun.edge.server.server_settings import ServerSettings
from edgerun.runtime.graph.shared_passes import SharedPasses
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.choice import DraftSampling
from edgerun.runtime.strategies.anchored import Anchored
from edgerun.runtime.strategies.second_reader import SecondReader
from edgerun.runtime.strategies.strategy import parse_strategy
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.serving import CHAT, chat_body, served_here

pytest.importorskip("support.tiny_models", reason="needs the export extra")

VOCAB = 6
LOGITS = st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=VOCAB, max_size=VOCAB)
PROMPT = "the sea and the sand and the sea and the "
Combine = Callable[[Any, Any], Any]


class Given:
    """A reader whose logits are known."""

    def __init__(self, logits: list[float]) -> None:
        self.logits = np.array(logits, np.float32)

    def logits_after(self, tokens: list[int]) -> Any:
        return self.logits


def probabilities_of(
    chosen: Strategy, logits: list[float], others: list[float], temperature: float = 1.0
) -> list[float]:
    params = SamplingParams(temperature)
    tokenizer: Any = None
    stage: Any = chosen.start(params, VOCAB, tokenizer)
    stage.reader = Given(others)
    ids, probabilities = Sampler(params, VOCAB, None, [stage]).probabilities(np.array(logits, np.float32))
    found = [0.0] * VOCAB
    for token, p in zip(ids.tolist(), probabilities.tolist(), strict=True):
        found[token] = p
    return found


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(x) for x in logits]
    return [weight / sum(weights) for weight in weights]


def approximately(probabilities: list[float]) -> Any:
    return pytest.approx(probabilities, rel=1e-4, abs=1e-9)


@given(logits=LOGITS, others=LOGITS, alpha=st.floats(0, 3))
def test_context_aware_decoding_gives_its_distribution(logits: list[float], others: list[float], alpha: float) -> None:
    expected = softmax([(1 + alpha) * a - alpha * b for a, b in zip(logits, others, strict=True)])
    assert probabilities_of(strategy("cad", alpha=alpha), logits, others) == approximately(expected)


@given(logits=LOGITS, others=LOGITS, guidance=st.floats(0.1, 4))
def test_guidance_gives_its_distribution(logits: list[float], others: list[float], guidance: float) -> None:
    p, q = softmax(logits), softmax(others)
    weights = [b * (a / b) ** guidance for a, b in zip(p, q, strict=True)]
    expected = [weight / sum(weights) for weight in weights]
    assert probabilities_of(strategy("negative-prompt", guidance=guidance), logits, others) == approximately(expected)
    if guidance > 1:
        assert probabilities_of(strategy("cad", alpha=guidance - 1), logits, others) == approximately(expected)


@given(logits=LOGITS, others=LOGITS, gate=st.floats(0.1, 2))
def test_a_certain_model_is_left_alone(logits: list[float], others: list[float], gate: float) -> None:
    p = softmax(logits)
    entropy = -sum(x * math.log(x) for x in p)
    if abs(entropy - gate) < 1e-4:
        return
    open_gate = probabilities_of(strategy("cad", alpha=1.0), logits, others)
    found = probabilities_of(strategy("cad", alpha=1.0, least_entropy=gate), logits, others)
    assert found == approximately(p if entropy < gate else open_gate)


def test_tokens_that_may_not_come_stay_out() -> None:
    found = probabilities_of(strategy("cad"), [0.0, 1.0, -math.inf, 0, 0, 0], [0.0, -math.inf, -math.inf, 5.0, 0, 0])
    assert found[2] == 0
    assert sum(found) == pytest.approx(1)
    with pytest.raises(EdgeError, match="NaN"):
        probabilities_of(strategy("cad"), [math.nan] * VOCAB, [0.0] * VOCAB)


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text", "genai"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Engines with trees and shared passes, with states of layers without attention, and with a foreign graph."""
    from support.layouts import LAYOUTS, write_layout
    from support.tiny_models import write_bundle

    folder = tmp_path_factory.mktemp("model")
    if request.param == "genai":
        bundle = write_layout(folder / "model", LAYOUTS["genai"])
    else:
        bundle = write_bundle(folder, request.param)
    with edgerun.load(bundle, threads=1, cache=False, parallel=3, context=200) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        yield engine


def combined_text(engine: Engine, prompts: list[list[int]], combine: Combine, count: int) -> str:
    """The greedy text of two readers, each of which runs alone."""
    readers = [engine.model.new_sequence().bound for _ in prompts]
    tokens: list[int] = []
    new = prompts
    while len(tokens) < count:
        logits = []
        for bound, ids in zip(readers, new, strict=True):
            logits.append(bound.forward(ids, logits_for=(len(ids) - 1,))[0].astype(np.float64))
            bound.arena.commit(len(ids))
        tokens.append(int(combine(*logits).argmax()))
        new = [tokens[-1:]] * 2
    return engine.tokenizer.decode(tokens)


@pytest.mark.parametrize("other", ["the question", "a prompt that is longer than the other one, which is the sea"])
def test_a_text_is_that_of_two_readers_with_and_without_drafts(engine: Engine, other: str) -> None:
    prompts = [engine.tokenizer.encode(text, add_special_tokens=True) for text in (PROMPT, other)]
    expected = combined_text(engine, prompts, lambda a, b: 1.8 * a - 0.8 * b, 32)
    chosen = [strategy("cad", text=other, alpha=0.8)]
    options: dict[str, Any] = {"raw": True, "max_tokens": 32, "ignore_eos": True, "temperature": 0}
    for name, exact in product(("off", "suffix,recycle"), (False, True)):
        reply = engine.generate(PROMPT, strategies=chosen, speculation=Speculation.parse(name), exact=exact, **options)
        assert (name, exact, reply.text) == (name, exact, expected)
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(lambda _: engine.generate(PROMPT, strategies=chosen, **options).text, range(3)))
    assert set(texts) == {expected}


def test_drafts_are_followed_along_the_branches_of_trees(engine: Engine) -> None:
    """A text that repeats itself, so that drafts are accepted, has fewer passes than tokens."""
    chosen = [strategy("negative-prompt", text="x", guidance=1.2)]
    options: dict[str, Any] = {"strategies": chosen, "ignore_eos": True, "logit_bias": {7: 30.0, 8: 29.0}}
    for seed in range(4):
        plain, drafted = (
            engine.generate(PROMPT, max_tokens=40, temperature=1.0, seed=seed, speculation=speculation, **options)
            for speculation in (Speculation.OFF, Speculation.parse("suffix,recycle"))
        )
        assert drafted.text == plain.text
        assert drafted.stats.target_passes < plain.stats.target_passes == 40


def prompts_of(engine: Engine, *conversations: list[dict[str, str]]) -> list[list[int]]:
    return [engine.chat_prompt(messages, edgerun.GenerateOptions()).ids for messages in conversations]


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({"text": "a thing"}, [("system", "be kind"), ("user", "the sea"), ("assistant", "is"), ("user", "a thing")]),
        ({"system": "be rude"}, [("system", "be rude"), ("user", "the sea"), ("assistant", "is"), ("user", "what is")]),
        ({"system": "", "text": "on"}, [("system", ""), ("user", "the sea"), ("assistant", "is"), ("user", "on")]),
        ({}, [("system", "be kind"), ("user", "the sea"), ("assistant", "is"), ("user", "")]),
    ],
)
def test_the_other_prompt_of_a_conversation(
    tiny_bundle: Path, options: dict[str, str], other: list[tuple[str, str]]
) -> None:
    asked = [("system", "be kind"), ("user", "the sea"), ("assistant", "is"), ("user", "what is")]
    messages, others = ([{"role": role, "content": text} for role, text in each] for each in (asked, other))
    with edgerun.load(tiny_bundle, threads=1, cache=False) as engine:
        prompts = prompts_of(engine, messages, others)
        expected = combined_text(engine, prompts, lambda a, b: 2 * a - b, 12)
        chosen = [strategy("negative-prompt", guidance=2.0, **options)]
        reply = engine.generate(messages, max_tokens=12, ignore_eos=True, temperature=0, strategies=chosen)
        assert reply.text == expected
        start = engine.generate(
            messages, answer_start=list(prompts[0][:2]), max_tokens=9, ignore_eos=True, temperature=0, strategies=chosen
        )
        begun = combined_text(engine, [[*each, *prompts[0][:2]] for each in prompts], lambda a, b: 2 * a - b, 9)
        assert start.text == begun
        raw = engine.generate("the sea", raw=True, strategies=[strategy("cad", alpha=1.0)], max_tokens=5, temperature=0)
        ids = engine.tokenizer.encode("the sea", add_special_tokens=True)
        assert raw.text == combined_text(engine, [ids, ids[-1:]], lambda a, b: 2 * a - b, 5)


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Path) -> Iterator[Engine]:
    with edgerun.load(tiny_bundle, threads=1, cache=False, parallel=2) as engine:
        yield engine


def test_both_prompts_share_every_pass_but_those_over_themselves(tiny: Engine) -> None:
    shared = tiny.model.shared_passes
    assert isinstance(shared, SharedPasses)
    before = shared.totals
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "speculation": Speculation.OFF, "raw": True}
    tiny.generate("the sea and the sand", strategies=[strategy("cad", text="a thing")], **options)
    assert shared.totals.passes - before.passes == 2 + 19
    assert shared.totals.texts - before.texts == 2 + 2 * 19
    before = shared.totals
    tiny.generate("other things", strategies=[strategy("cad", text="on"), strategy("negative-prompt")], **options)
    assert shared.totals.texts - before.texts == 3 + 3 * 19
    tiny.generate("that is", strategies=[strategy("cad", text="in")], exact=True, **options)  # passes run alone


def test_long_prompts_of_readers_are_read_once(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    read = SecondReader._read_prompt

    def counting(reader: SecondReader) -> Any:
        kept.append(reader.sequence.arena.length)
        return read(reader)

    monkeypatch.setattr(SecondReader, "_read_prompt", counting)
    long = "".join(f"{number} things in the sand " for number in range(16))
    options: dict[str, Any] = {"raw": True, "temperature": 0.9, "max_tokens": 8, "ignore_eos": True}
    options["strategies"] = [strategy("cad", text=long)]
    several = tiny.generate(long + "of the sea", n=3, seed=5, **options)
    first, *others = kept
    assert (first, min(others)) == (0, 128)
    for index, choice in enumerate(several.choices):
        assert tiny.generate(long + "of the sea", seed=5 + index, **options).text == choice.text
    assert min(kept[3:]) == 128


def test_an_answer_ends_where_a_context_does(tiny: Engine) -> None:
    options: dict[str, Any] = {"raw": True, "ignore_eos": True, "temperature": 0, "overflow": "window"}
    short, long = "the sea", "the other thing that was in the sand of the sea and on the " * 6
    lengths = [len(tiny.tokenizer.encode(text, add_special_tokens=True)) for text in (short, long)]
    reply = tiny.generate(short, strategies=[strategy("cad", text=long)], **options)
    assert reply.finish_reason == "length"
    assert 0 < reply.stats.completion_tokens <= 256 - lengths[1]
    reply = tiny.generate(long, strategies=[strategy("cad", text=short)], **options)
    assert (reply.finish_reason, reply.stats.completion_tokens) == ("length", 256 - lengths[1])
    with pytest.raises(EdgeError, match="context is 256"):
        tiny.generate(short, strategies=[strategy("cad", text=long * 4)], **options)


def test_a_pass_that_fails_leaves_nothing_behind(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tiny.model.shared_passes
    assert isinstance(shared, SharedPasses)
    run, calls = SharedPasses.run, 0

    def failing(passes: SharedPasses, binding: Any, options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        run(passes, binding, options)

    options: dict[str, Any] = {"raw": True, "max_tokens": 12, "strategies": [strategy("cad", text="a thing")]}
    expected = tiny.generate("the sea", **options)
    with monkeypatch.context() as patch:
        patch.setattr(SharedPasses, "run", failing)
        with pytest.raises(KeyboardInterrupt):
            tiny.generate("the sea", **options)
    assert not shared._handed_in
    assert tiny.generate("the sea", **options).text == expected.text


@pytest.mark.parametrize(("name", "option"), [("cad", "alpha"), ("negative-prompt", "guidance")])
def test_the_other_prompt_on_the_command_line(
    tiny: Engine, tiny_bundle: Path, capsys: pytest.CaptureFixture[str], name: str, option: str
) -> None:
    given = f"{name}:text=of sand, in the sea,{option}=2.5"
    assert parse_strategy(given) == strategy(name, text="of sand, in the sea", **{option: 2.5})
    assert main([str(tiny_bundle), "-p", "the sea", "-n", "12", "-t", "0", "--json", "--strategy", given]) == 0
    reply = tiny.generate("the sea", max_tokens=12, temperature=0, strategies=[parse_strategy(given)])
    assert json.loads(capsys.readouterr().out)["text"] == reply.text
    assert reply.text != tiny.generate("the sea", max_tokens=12, temperature=0).text
    wrong = "negative-prompt:system=rude"
    assert main([str(tiny_bundle), "--raw", "-p", "the sea", "--strategy", wrong]) == 2
    assert "a raw prompt has no system message; give the other prompt as text" in capsys.readouterr().err
    with pytest.raises(InputError, match="guidance is 0; it must be above 0 and at most 100"):
        strategy("negative-prompt", guidance=0)


def test_the_other_prompt_over_http(tiny: Engine, tiny_bundle: Path) -> None:
    body = chat_body("the sea", max_tokens=12, temperature=0)
    with served_here(tiny_bundle, ServerSettings(), threads=1, cache=False) as server:
        for options in ({"name": "cad", "alpha": 1.5}, {"name": "negative-prompt", "guidance": 3.0}):
            answer = server.post(CHAT, {**body, "strategies": [{**options, "text": "a thing"}]})
            chosen = [strategy(text="a thing", **options)]
            expected = tiny.generate("the sea", max_tokens=12, temperature=0, strategies=chosen)
            assert answer["choices"][0]["message"]["content"] == expected.text


def divergence(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


@given(logits=LOGITS, others=LOGITS, budget=st.floats(0.001, 4), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_an_anchored_token_is_as_near_to_the_model_as_the_budget_allows(
    logits: list[float], others: list[float], budget: float, temperature: float
) -> None:
    chosen = strategy("anchored", budget=budget)
    found = probabilities_of(chosen, logits, others, temperature)
    own, anchor = softmax([x / temperature for x in logits]), softmax(others)
    assert divergence(found, anchor) <= budget
    if divergence(own, anchor) <= 0.999 * budget:
        assert found == approximately(own)
        return
    # No mixture whose divergence is within the budget is nearer to the model, and no other distribution either.
    assert divergence(found, anchor) == pytest.approx(budget, rel=2e-3, abs=1e-4)
    nearest = divergence(found, own)
    for share in np.linspace(0, 1, 50):
        mixed = softmax([share * math.log(a) + (1 - share) * math.log(b) for a, b in zip(own, anchor, strict=True)])
        if divergence(mixed, anchor) <= budget - 2e-5:
            assert divergence(mixed, own) >= nearest - 0.01 * budget
    random = np.random.default_rng(1)
    for _ in range(50):
        moved = np.array(found) * np.exp(random.normal(0, 0.1, VOCAB))
        moved = (moved / moved.sum()).tolist()
        if divergence(moved, anchor) <= divergence(found, anchor):
            assert divergence(moved, own) >= nearest - 1e-6


def test_no_path_spends_more_than_its_tokens_were_given() -> None:
    """Every path of 3 tokens out of 6: what is left is carried on, and the divergence at every step is within it."""
    budget, random = 0.2, np.random.default_rng(3)
    tables = random.normal(0, 2, (2, 1 + VOCAB + VOCAB**2, VOCAB)).astype(np.float32)
    stage: Any = strategy("anchored", budget=budget).start(SamplingParams(1.0), VOCAB, None)  # type: ignore[arg-type]
    sampler = Sampler(SamplingParams(1.0), VOCAB, None, [stage])
    sampler.observe_prompt([1, 2, 3, 4, 5])
    sampler.observe([2])  # a start of the answer, which was not chosen: it gives nothing and takes nothing

    def explore(path: tuple[int, ...], given: float) -> None:
        if len(path) == 3:
            return
        number = 0
        for token in path:
            number = number * VOCAB + token + 1
        own, anchor = (softmax(table[number].tolist()) for table in tables)
        stage.reader = Given(tables[1][number].tolist())
        ids, found = sampler.probabilities(tables[0][number])
        assert ids.tolist() == list(range(VOCAB))
        spent = divergence(found.tolist(), anchor)
        assert spent <= given + budget
        assert spent == pytest.approx(min(divergence(own, anchor), given + budget), rel=2e-3, abs=1e-4)
        for token in range(VOCAB):
            with sampler.rollback():
                sampler.observe([token])
                explore((*path, token), given + budget - spent)

    explore((), 0.0)


@pytest.fixture(scope="module")
def anchor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny_models import write_bundle

    return write_bundle(tmp_path_factory.mktemp("anchor"), "qwen2", seed=9)


@pytest.fixture(scope="module")
def anchored(tiny_bundle: Path, anchor: Path) -> Iterator[Engine]:
    with edgerun.load(tiny_bundle, anchor=anchor, threads=1, cache=False, parallel=3) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_anchored_text_does_not_depend_on_drafts_and_other_texts(anchored: Engine, temperature: float) -> None:
    chosen = [strategy("anchored", budget=0.3)]
    options: dict[str, Any] = {"temperature": temperature, "seed": 2, "max_tokens": 32, "ignore_eos": True}
    texts = {
        anchored.generate(PROMPT, strategies=chosen, speculation=Speculation.parse(name), exact=exact, **options).text
        for name, exact in product(("off", "suffix,recycle"), (False, True))
    }
    with ThreadPoolExecutor(3) as pool:
        texts |= set(pool.map(lambda _: anchored.generate(PROMPT, strategies=chosen, **options).text, range(3)))
    assert len(texts) == 1
    free = anchored.generate(PROMPT, strategies=[strategy("anchored", budget=1000)], **options)
    assert free.text == anchored.generate(PROMPT, **options).text
    assert free.text not in texts


def test_without_a_budget_the_text_is_that_of_the_anchor(anchored: Engine, anchor: Path) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    with edgerun.load(anchor, threads=1, cache=False) as safe:
        expected = safe.generate(PROMPT, **options).text
    chosen = [strategy("anchored", budget=0)]
    assert anchored.generate(PROMPT, strategies=chosen, **options).text == expected
    pytest.importorskip("llguidance")
    form = edgerun.ResponseFormat.regex("[a-d ]{6,20}")
    texts = {
        anchored.generate(
            PROMPT, strategies=[strategy("anchored")], response_format=form, speculation=each, seed=1
        ).text
        for each in (Speculation.OFF, Speculation.AUTO)
    }
    assert len(texts) == 1


def test_anchors_on_the_command_line_and_over_http(
    anchored: Engine, tiny_bundle: Path, anchor: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-p", "the sea", "-n", "12", "-t", "0", "--json", "--strategy", "anchored:budget=0.4"]
    assert main([str(tiny_bundle), "--anchor", str(anchor), *arguments]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    chosen = [strategy("anchored", budget=0.4)]
    assert text == anchored.generate("the sea", max_tokens=12, temperature=0, strategies=chosen).text
    with served_here(tiny_bundle, ServerSettings(), threads=1, cache=False, anchor=anchor) as server:
        body = chat_body("the sea", max_tokens=12, temperature=0, strategies=[{"name": "anchored", "budget": 0.4}])
        assert server.post(CHAT, body)["choices"][0]["message"]["content"] == text
        body["temperature"], body["top_p"] = 1, 0.5
        refused = server.request("POST", CHAT, body)
        assert (refused.status, "top-p" in refused.json()["error"]["message"]) == (400, True)
    assert main([str(tiny_bundle), *arguments]) == 2
    message = "the strategy anchored is given, and there is no anchor; load one: --anchor MODEL"
    assert message in capsys.readouterr().err + capsys.readouterr().out


def test_anchors_that_do_not_fit(tiny_bundle: Path, tmp_path: Path) -> None:
    from support.tiny_models import write_bundle

    with pytest.raises(edgerun.BundleError, match="has a context of 64 tokens, and .* has 256; add --context 64"):
        edgerun.load(tiny_bundle, anchor=write_bundle(tmp_path / "short", max_position_embeddings=64), cache=False)
    other = write_bundle(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (other / "edge.json").unlink()  # it has the sizes of the files
    with pytest.raises(edgerun.BundleError, match="has another vocabulary than .* give an anchor with the same tokens"):
        edgerun.load(tiny_bundle, anchor=other, cache=False)


def test_searches_take_no_second_reader(tiny: Engine) -> None:
    with pytest.raises(InputError, match="the strategy cad is given, and the answer is searched for"):
        tiny.generate("the sea", num_beams=2, strategies=[strategy("cad")])


def test_sampled_drafts_stay_within_the_budget(anchored: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[Any] = []
    start = Anchored.start

    def recorded(chosen: Anchored, *arguments: Any) -> Any:
        stages.append(start(chosen, *arguments))
        return stages[-1]

    monkeypatch.setattr(Anchored, "start", recorded)
    options: dict[str, Any] = {
        "temperature": 1.0,
        "max_tokens": 60,
        "ignore_eos": True,
        "logit_bias": {7: 30.0, 8: 29.0},
    }
    passes = 0
    for seed in range(4):
        chosen = [strategy("anchored", budget=0.3)]
        reply = anchored.generate(PROMPT, strategies=chosen, draft_sampling=DraftSampling.NGRAM, seed=seed, **options)
        passes += reply.stats.target_passes
        left = stages[-1]._left
        assert len(left) == 60
        assert min(left) >= 0
    assert passes < 4 * 60
