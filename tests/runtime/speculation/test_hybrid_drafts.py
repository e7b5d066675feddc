"""Draft models that keep states, from the outside: whatever they draft, the text is the target's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import GenerateOptions
from edgerun.edge.cli.main import main
from edgerun.export import INT4
from edgerun.models.bundle import open_bundle
from edgerun.models.pairing import find_draft
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.drafters.draft_model import DraftModel, Floats, TopTokens
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.pool import DrafterPool
from edgerun.runtime.speculation.tree import Source
from support.adversarial_drafters import NEARLY_FREE, FixedCost, eager
from support.nightly import some_nightly
from support.tiny_models import write_bundle, write_checkpoint

VOCABULARY = 300
CONTEXT = 256
PROMPT = "the and of the and of to in the and"
FREE = FixedCost({0: {1: 1e-9, 2: 1e-9}})


class WrongDraft(DraftModel):
    """Is certain of the tokens that it takes for the least likely."""

    def _largest(self, logits: Floats, count: int, temperature: float) -> TopTokens:
        return TopTokens(super()._largest(-logits, count, temperature).tokens, (0.999, *[0.0005] * (count - 1)))


class ChangingDraft(DraftModel):
    """Asks the model about paths that nobody drafts, before it answers."""

    def top_tokens(self, path: tuple[int, ...], count: int, temperature: float = 1.0) -> TopTokens:
        for other in ((*path, 7), path[:-1], (*path[:1], 9, 11)):
            super().top_tokens(other, count, temperature)
        return super().top_tokens(path, count, temperature)


DRAFTS: dict[str, tuple[type[DraftModel], int, bool]] = {
    "of the same weights": (DraftModel, 0, False),
    "quantized": (DraftModel, 0, True),
    "random": (DraftModel, 1, False),
    "always wrong": (WrongDraft, 0, False),
    "asked about other paths": (ChangingDraft, 0, True),
}
"""By name: how it drafts, the seed of its weights (the target's is 0), and whether they are quantized."""


@pytest.fixture(scope="module")
def graph_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GraphSession]:
    graphs: dict[tuple[str, int, bool], GraphSession] = {}

    def graph(family: str, seed: int = 0, *, int4: bool = False) -> GraphSession:
        key = (family, seed, int4)
        if key not in graphs:
            folder = tmp_path_factory.mktemp(family)
            weights = {"weights": INT4} if int4 else {}
            bundle = write_bundle(folder, family, seed=seed, **weights)
            graphs[key] = GraphSession(bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))
        return graphs[key]

    return graph


ALL_FAMILIES = [
    *(("lfm2", "lfm2"), ("llama", "lfm2"), ("llama", "qwen3_5_text"), ("qwen3_5_text", "qwen3_5_text")),
    *(("granitemoehybrid", "granitemoehybrid"), ("llama", "granitemoehybrid")),
]
"""Targets and their drafts."""


@pytest.mark.parametrize("families", some_nightly(ALL_FAMILIES, 2), ids="-".join)
def test_no_draft_changes_the_text(graph_of: Callable[..., GraphSession], families: tuple[str, str]) -> None:
    target, family = families
    graph = graph_of(target)
    trees, random, replays = graph.graph_io.supports_trees, np.random.default_rng(0), 0
    accepted: dict[str, int] = {}
    for name, (kind, seed, int4) in DRAFTS.items():
        own = graph_of(family, seed, int4=int4)
        model = kind(own.bind(own.arena(CONTEXT)), FREE, VOCABULARY)
        arena = model._arena
        assert arena.states is not None
        arena.states._most_held = 3
        speculator = eager(SuffixDrafter(), model=model, trees=trees)
        for params in (SamplingParams(), SamplingParams(0.8, top_k=40, seed=3)):
            prompt = random.integers(5, VOCABULARY, 9).tolist()
            texts = []
            for each in (None, speculator):
                bound, sampler = graph.bind(graph.arena(CONTEXT)), Sampler(params, VOCABULARY)
                steps = list(decode(bound, prompt, sampler, DecodeLimits(40), each))
                texts.append([token for step in steps for token in step.tokens])
                rounds = [step.round for step in steps if step.round is not None]
                accepted[name] = accepted.get(name, 0) + sum(one.accepted[Source.MODEL] for one in rounds)
            assert texts[0] == texts[1]
        assert model.passes > 40
        replays += arena.replayed
    assert replays > 0  # at most three positions were held
    if target == family:
        assert accepted["of the same weights"] > 20 > accepted["random"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    def made(target: str, draft: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("pair")
        return write_bundle(folder / "t", target), write_bundle(folder / "d", draft, weights=INT4)

    return made


@pytest.mark.parametrize("families", some_nightly(ALL_FAMILIES, 4), ids="-".join)
def test_a_conversation_with_a_draft_is_that_without(
    bundles: Callable[[str, str], tuple[Path, Path]], families: tuple[str, str]
) -> None:
    """Several turns, so that the draft goes back into a prompt that it has read."""
    folder, drafts = bundles(*families)
    options = GenerateOptions(ignore_eos=True, max_tokens=24)
    texts, drafted = [], 0
    for chosen in ("off", "model"):
        with (
            edgerun.load(folder, draft=drafts, device="cpu", learned=False) as engine,
            engine.session(system=PROMPT) as chat,
        ):
            engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
            replies = [chat.send(text, options, speculation=Speculation.parse(chosen)) for text in ("in", "to", "of")]
            texts.append([reply.text for reply in replies])
            drafted += sum(reply.stats.drafted for reply in replies)
    assert texts[0] == texts[1]
    assert drafted > 0


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_drafting_from_the_command_line(
    bundles: Callable[[str, str], tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(DrafterPool, "pass_cost", lambda _: FixedCost(NEARLY_FREE))
    target, draft = bundles("qwen3_5_text", "qwen3_5_text")
    answer = ["-p", PROMPT, "--raw", "-n", "30", "--json", "--device", "cpu", "--draft", str(draft)]
    code, plain, _ = run([str(target), *answer, "--spec", "off"], capsys)
    assert code == 0
    code, out, err = run([str(target), *answer, "--spec", "model"], capsys)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["text"] == json.loads(plain)["text"]
    assert found["speculation"]["by_source"]["model"]["drafted"] > 0


@pytest.mark.parametrize("target", some_nightly(["lfm2", "llama"], 2))
def test_export_with_a_draft_that_keeps_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    checkpoint = write_checkpoint(tmp_path / "checkpoint", target)
    draft = write_checkpoint(tmp_path / "draft", "lfm2", tie_word_embeddings=False)
    text, words = tmp_path / "text.txt", np.random.default_rng(0).choice(["the", "sea", "and", "sand"], 1200)
    text.write_text(" ".join(words), encoding="utf-8")
    choices = ["--draft", str(draft), "--draft-vocab", "60", "--calibration", str(text)]
    out = tmp_path / "bundle"
    code, _, err = run(["export", str(checkpoint), str(out), *choices, "--calibration-tokens", "1100"], capsys)
    assert code == 0, err
    found = find_draft(open_bundle(out))
    assert found is not None
    assert found.target_ids is not None
    assert found.target_ids.size == 60
    answer = [str(out), "-p", PROMPT, "--raw", "-n", "20", "--device", "cpu"]
    assert run([*answer, "--spec", "model"], capsys)[:2] == run([*answer, "--spec", "off"], capsys)[:2]
