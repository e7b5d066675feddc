"""Models that fill blocks, against a naive decoder, by enumeration, and from outside."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

import edgerun
from edgerun import Engine, InputError, OriginKind
from edgerun.edge.server.server_settings import ServerSettings
from edgerun.export import ExportRecipe
from edgerun.export.quantization.option_values import DeviceChoice
from edgerun.models.manifest import GraphLayout
from edgerun.runtime.blocks.block_decode import BlockChoices, block_decode
from edgerun.runtime.blocks.commit_rules import COMMIT_RULES, Candidates, CommitRule, most_confident
from edgerun.runtime.decode import DecodeLimits, FinishReason
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from support.block_models import FAMILIES, NaiveBlocks, write_block_model
from support.chi_square import expect_distribution
from support.commands import fails, json_of
from support.serving import CHAT, chat_body, served_here
from support.tiny_models import exported

OPTIONS: dict[str, Any] = {"raw": True, "max_tokens": 21, "ignore_eos": True}
PROMPT = "the sea and the sand"
RULES = ["in-order:1", "fixed:2", "threshold:0.2", "entropy:3", "factor:4", "nll:2", "prophet:0.5"]
RULES += ["local-leap:0.3,2,0.1", "unit:0.3", "ada-block:0.3,0.2,2"]
LINE_ENDS = (1, 3)
Confidence = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_block_model(tmp_path_factory.mktemp("blocks"))


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with edgerun.load(bundle, threads=1, cache=False, parallel=3) as engine:
        yield engine


def first(count: int) -> Callable[[Confidence], npt.NDArray[np.bool_]]:
    return lambda confidence: np.arange(confidence.size) < count


def best(count: int) -> Callable[[Confidence], npt.NDArray[np.bool_]]:
    return lambda confidence: np.argsort(np.argsort(-confidence, kind="stable"), kind="stable") < count


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_naive_decoder(family: str, tmp_path: Path) -> None:
    bundle = write_block_model(tmp_path, family)
    naive = NaiveBlocks(tmp_path / "checkpoint")
    rules = {"in-order:1": first(1), "fixed:3": best(3), "threshold:0.1": lambda confidence: confidence >= 0.1}
    own = {"block_size": naive.size} if naive.bidirectional else {}
    with edgerun.load(bundle, threads=1, cache=False) as engine:
        prompt = engine.tokenizer.encode(PROMPT, add_special_tokens=True)
        # Ends of a prompt in a block, at its end, and behind several.
        for ids in (prompt[:1], prompt[: naive.size], [*prompt, *prompt][: 2 * naive.size + 1]):
            for rule, keeps in rules.items():
                expected = engine.tokenizer.decode(naive.text(ids, 21, keeps))
                reply = engine.generate(engine.tokenizer.decode(ids), block_rule=rule, **own, **OPTIONS)
                assert reply.text == expected, (rule, len(ids))
            expected = engine.tokenizer.decode(naive.text(ids, 21, best(3), guidance=2.5))
            guided = {"block_rule": "fixed:3", "strategies": [edgerun.strategy("negative-prompt", guidance=2.5)]}
            assert engine.generate(engine.tokenizer.decode(ids), **guided, **own, **OPTIONS).text == expected


def test_a_step_keeps_what_its_rule_says(engine: Engine) -> None:
    passes = {}
    for rule in ("in-order:1", "in-order:4", "fixed:2", "threshold:0", "threshold:1"):
        stats = engine.generate(PROMPT, block_rule=rule, **{**OPTIONS, "max_tokens": 40}).stats
        passes[rule] = stats.decode_passes
        assert stats.completion_tokens == 40
    begun = -len(engine.tokenizer.encode(PROMPT, add_special_tokens=True)) % 4  # masks of the prompt's last block
    blocks = -(-(40 - begun) // 4) + (begun > 0)
    assert passes["in-order:1"] == passes["threshold:1"] == 40 + (begun - 40) % 4 * (begun > 40)
    assert passes["in-order:4"] == passes["threshold:0"] == blocks


def test_a_seed_gives_one_text_alone_and_beside_others_and_from_a_cached_prompt(engine: Engine) -> None:
    def text(seed: int) -> str:
        return engine.generate(PROMPT, temperature=0.8, seed=seed, block_rule="threshold:0.1", **OPTIONS).text

    alone = [text(seed) for seed in range(4)]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text, range(4))) == alone
    longer = engine.generate(PROMPT + alone[0], block_rule="fixed:2", **OPTIONS)
    with edgerun.load(engine.model.bundle.folder, threads=1, cache=False) as fresh:
        assert fresh.generate(PROMPT + alone[0], block_rule="fixed:2", **OPTIONS).text == longer.text


def test_answers_end_at_stop_texts_at_the_context_and_when_cancelled(engine: Engine) -> None:
    whole = engine.generate(PROMPT, **OPTIONS).text
    stop = whole[5:7]
    assert engine.generate(PROMPT, **OPTIONS, stop=stop).text == whole[: whole.index(stop)]
    filled = engine.generate(PROMPT, raw=True, ignore_eos=True)
    assert filled.finish_reason is FinishReason.LENGTH
    assert filled.stats.prompt_tokens + filled.stats.completion_tokens == engine.model.context
    stream = engine.stream(PROMPT, **{**OPTIONS, "max_tokens": 200})
    next(stream)
    stream.cancel()
    assert list(stream)[-1].finish_reason is FinishReason.CANCELLED
    assert engine.generate(PROMPT, **OPTIONS).text == whole
    listed = engine.generate(PROMPT, logprobs=2, **OPTIONS)
    assert listed.text == whole
    assert len(listed.logprobs) == 21


class Six:
    """A model of five tokens and a mask, whose block of four tokens is enumerated."""

    def __init__(self, folder: Path) -> None:
        self.bundle = write_block_model(folder, vocab_size=6, seed=5)
        self._naive = NaiveBlocks(folder / "checkpoint")
        self.prompt = [5 - 2, 1, 4, 2]
        self.distributions = cache(self._distributions)

    def _distributions(self, cells: tuple[int, ...]) -> Confidence:
        logits = self._naive.logits([*self.prompt, *cells])[len(self.prompt) :]
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    @cache  # noqa: B019 -- lives as long as the tests
    def distribution(
        self, rule: CommitRule, cells: tuple[int, ...] = (5, 5, 5, 5), latest: tuple[int, ...] = ()
    ) -> dict[tuple[int, ...], float]:
        """The exact probabilities of the blocks that the rule leads to from some known tokens on.

        Args:
            rule: the rule; `Stable` with two passes reads the candidates of the pass before.
            cells: the tokens.
            latest: the candidates of the pass before, -1 for none; empty for rules that do not read them.
        """
        places = np.flatnonzero(np.asarray(cells) == 5)
        if not places.size:
            return {cells: 1.0}
        rows = self.distributions(cells)[places]
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.nansum(rows * np.log(rows), axis=1)
            gaps = np.diff(np.sort(np.log(rows), axis=1)[:, -2:], axis=1)[:, 0]
        found: Counter[tuple[int, ...]] = Counter()
        for tokens in product(range(5), repeat=places.size):
            confidence = rows[np.arange(places.size), tokens]
            ends = np.isin(tokens, LINE_ENDS)
            steady = 1 + (np.array(tokens) == np.array(latest)[places]) if latest else np.ones(places.size, np.int64)
            candidates = Candidates(places, confidence, gaps, entropy, steady, ends, 4)
            kept = rule.apply(candidates)
            kept = kept if kept.any() else most_confident(candidates, 1)
            after = np.array(cells)
            after[places[kept]] = np.asarray(tokens)[kept]
            before = np.full(4, -1)
            before[places] = tokens
            history = tuple(before.tolist()) if latest else ()
            for block, weight in self.distribution(rule, tuple(after.tolist()), history).items():
                found[block] += weight * float(confidence.prod())
        return dict(found)

    def sampled(self, rule: CommitRule, prompt: list[int], count: int) -> Counter[tuple[int, ...]]:
        """The tokens of 800 answers."""
        found: Counter[tuple[int, ...]] = Counter()
        with edgerun.load(self.bundle, threads=1, cache=False) as engine:
            bound, choices = engine.model.new_sequence().bound, BlockChoices(rule, 4, line_ends=frozenset(LINE_ENDS))
            for seed in range(800):
                sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), 6)
                steps = block_decode(bound, prompt, sampler, DecodeLimits(count), choices)
                found[tuple(token for step in steps for token in step.tokens)] += 1
        return found


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Six:
    return Six(tmp_path_factory.mktemp("six"))


@pytest.mark.parametrize("name", RULES)
def test_blocks_have_the_exact_distribution_of_their_rule(six: Six, name: str) -> None:
    rule = CommitRule.parse(name)
    distribution, in_order = six.distribution(rule), six.distribution(CommitRule.parse("in-order:1"))
    at_once = six.distribution(CommitRule.parse("threshold:0"))
    assert sum(distribution.values()) == pytest.approx(1)
    distances = [
        sum(abs(distribution.get(block, 0) - other.get(block, 0)) for block in {*distribution, *other}) / 2
        for other in (in_order, at_once)
    ]
    print(f"{name}: total variation {distances[0]:.3f} from one token at a time, {distances[1]:.3f} from all at once")
    expect_distribution(six.sampled(rule, six.prompt, 4), distribution, 800)


def test_blocks_have_the_exact_distribution_of_rules_that_read_more(six: Six, tmp_path: Path) -> None:
    learned, stable = CommitRule.parse(f"learned:{network(tmp_path, 3.0)},0.5"), CommitRule.parse("stable:2,0.2")
    # With the first token known, the passes before have few outcomes.
    for rule, prompt, latest in ((learned, six.prompt, ()), (stable, [*six.prompt, 2], (-1, -1, -1, -1))):
        cells = (*prompt[4:], *[5] * (8 - len(prompt)))
        distribution = six.distribution(rule, cells, latest)
        assert sum(distribution.values()) == pytest.approx(1)
        found = six.sampled(rule, prompt, 8 - len(prompt))
        expect_distribution(found, {block[len(prompt) - 4 :]: share for block, share in distribution.items()}, 800)


def test_stable_candidates_are_those_of_several_passes() -> None:
    stable = CommitRule.parse("stable:2,0.5")
    steady, confidence = np.array([1, 2, 3, 2]), np.array([0.9, 0.6, 0.4, 0.5])
    zeros = np.zeros(4)
    kept = stable.apply(Candidates(np.arange(4), confidence, zeros, zeros, steady, zeros > 0, 4))
    assert kept.tolist() == [False, True, False, True]


def test_a_bounded_factor_keeps_as_many_as_it_allows() -> None:
    zeros = np.zeros(4)
    candidates = Candidates(
        np.arange(4), np.array([0.6, 0.99, 0.9, 0.8]), zeros, zeros, np.ones(4, np.int64), zeros > 0, 4
    )
    # (n + 1)(1 - c): 0.02, 0.3, 0.8, 2.0
    for factor, kept in ((0.02, []), (0.5, [1, 2]), (1.0, [1, 2, 3]), (2.1, [0, 1, 2, 3])):
        assert np.flatnonzero(CommitRule.parse(f"factor:{factor}").apply(candidates)).tolist() == kept


def test_a_kept_cache_is_exact_with_one_layer_and_an_approximation_with_more(tmp_path: Path) -> None:
    texts = {}
    for family, layers in (("llada", 1), ("Dream", 1), ("Dream", 2)):
        bundle = write_block_model(tmp_path / f"{family}{layers}", family, num_hidden_layers=layers)
        with edgerun.load(bundle, threads=1, cache=False) as engine:
            options: dict[str, Any] = {"block_rule": "fixed:2", "block_size": 5, **OPTIONS}
            replies = [engine.generate(PROMPT, lossy_block_cache=kept, **options) for kept in (False, True, False)]
            assert replies[0].text == replies[2].text
            assert {each.stats.decode_passes for each in replies} == {13}
            texts[family, layers] = [each.text for each in replies]
            with pytest.raises(InputError, match="give another block_rule"):
                engine.generate(PROMPT, block_rule=f"learned:{network(tmp_path, 8.0)}", block_size=5, **OPTIONS)
            assert engine.generate(PROMPT).stats.completion_tokens <= 128
    # The keys and values of a first layer do not depend on other tokens.
    assert [kept == exact for exact, kept, _ in texts.values()] == [True, True, False]


def test_nothing_is_filled_behind_the_end_of_a_text(engine: Engine) -> None:
    options = {**OPTIONS, "ignore_eos": False, "temperature": 0.0, "block_rule": "fixed:1"}
    reply = engine.generate(PROMPT, logit_bias={0: 100.0}, **options)
    assert (reply.text, reply.finish_reason) == ("", FinishReason.STOP)
    begun = len(engine.tokenizer.encode(PROMPT, add_special_tokens=True)) % 4
    assert reply.stats.decode_passes <= 4 - begun


def network(folder: Path, least: float) -> Path:
    """The file of a network for blocks of four tokens, to which half is what is as probable as `least` / 10."""
    weights = {"hidden.weight": np.eye(4), "hidden.bias": np.zeros(4)}
    weights |= {"output.weight": 10 * np.eye(4), "output.bias": np.full(4, -least)}
    save_file({name: value.astype(np.float32) for name, value in weights.items()}, folder / "network.safetensors")
    return folder / "network.safetensors"


def test_a_network_chooses_and_others_are_refused(engine: Engine, tmp_path: Path) -> None:
    learned = f"learned:{network(tmp_path, 2.0)},0.5"
    assert engine.generate(PROMPT, block_rule=learned, **OPTIONS).text == (
        engine.generate(PROMPT, block_rule="threshold:0.2", **OPTIONS).text
    )
    assert str(CommitRule.parse(learned)) == learned
    save_file({"hidden.weight": np.eye(4, dtype=np.float32)}, tmp_path / "other.safetensors")
    for name in (tmp_path / "other.safetensors", tmp_path / "none", tmp_path, ""):
        with pytest.raises(InputError, match="is not a network for this rule; give learned:FILE"):
            engine.generate(PROMPT, block_rule=f"learned:{name}", **OPTIONS)


def test_log_probabilities_say_which_pass_found_a_token(engine: Engine) -> None:
    listed = engine.generate(PROMPT, logprobs=1, block_rule="in-order:1", **OPTIONS).logprobs
    begun = len(engine.tokenizer.encode(PROMPT, add_special_tokens=True)) % 4
    assert {each.origin.kind for each in listed if each.origin} == {OriginKind.FILLED}
    passes = [each.origin.block_pass for each in listed if each.origin]
    assert passes == [*range(1, 5 - begun), *[1 + each % 4 for each in range(17 + begun)]]


def test_the_command_line_and_the_server_take_rules(bundle: Path, engine: Engine, tmp_path: Path, capsys: Any) -> None:
    arguments = ("run", bundle, "-p", PROMPT, "--raw", "-n", "21", "--ignore-eos", "--threads", "1", "--no-cache")
    texts = {}
    for rule in ("fixed:2", "threshold:0"):
        texts[rule] = engine.generate(PROMPT, block_rule=rule, **OPTIONS).text
        found = json_of(capsys, *arguments, "--block-rule", rule, "--json")
        assert found["text"] == texts[rule]
    assert texts["fixed:2"] != texts["threshold:0"]
    with served_here(bundle, settings=ServerSettings(), threads=1) as server:
        body = chat_body(PROMPT, max_tokens=21, block_rule="fixed:2")
        message = server.post(CHAT, body)["choices"][0]["message"]["content"]
        lines = server.request("POST", CHAT, {**body, "stream": True}).body.decode().splitlines()
        pieces = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
        assert "".join(each[0]["delta"].get("content") or "" for each in pieces if each) == message
        refused = server.request("POST", CHAT, {**body, "block_rule": "often"})
        local = server.request("POST", CHAT, {**body, "block_rule": f"learned:{network(tmp_path, 8.0)}"})
    assert local.status == refused.status == 400
    assert "reads a file of this machine" in local.body.decode()
    assert "block_rule is 'often'; give one of in-order" in refused.body.decode()


def test_what_does_not_go_with_the_kind_of_model_is_refused(
    engine: Engine, tmp_path: Path, bundle: Path, capsys: Any
) -> None:
    for options, name in (
        ({"response_format": edgerun.ResponseFormat.regex("a*")}, "response_format"),
        ({"num_beams": 2}, "num_beams"),
        ({"exact": True}, "exact"),
        ({"block_size": 8}, "block_size"),
        ({"lossy_block_cache": True}, "lossy_block_cache"),
    ):
        with pytest.raises(InputError, match=f"^{name} is given, and this model (fills|has) blocks of .*; leave"):
            engine.generate(PROMPT, **options)
    for given in ([edgerun.strategy("dry")], [edgerun.strategy("cad", text="a")]):
        with pytest.raises(InputError, match="then the prompt is masked"):
            engine.generate(PROMPT, strategies=given)
    for rule in ("fixed:0", "threshold:2", "fixed:1,2", "fixed:x", "steps"):
        with pytest.raises(InputError):
            engine.generate(PROMPT, block_rule=rule)
    assert "generates token by token" in fails(capsys, "run", "-p", "a", "--block-rule", "fixed:2")
    assert set(COMMIT_RULES) >= {rule.partition(":")[0] for rule in RULES}


def test_an_export_refuses_what_reads_text_in_order(tmp_path: Path) -> None:
    write_block_model(tmp_path)
    for recipe, choice in (
        (ExportRecipe(device=DeviceChoice.GPU), "--device gpu"),
        (ExportRecipe(layout=GraphLayout.GENAI), "--layout genai"),
        (ExportRecipe(report=True), "--report"),
    ):
        with pytest.raises(InputError, match=f"^{choice}: not supported for sdar models, which have blocks"):
            exported(tmp_path / "checkpoint", tmp_path / "other", recipe)
