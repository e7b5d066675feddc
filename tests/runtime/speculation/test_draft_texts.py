"""Drafts of every kind, from the outside: whatever they draft, the text is plain decoding's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the export extra")


from edgerun import Engine, GenerateOptions
from edgerun.edge.cli.main import main
from edgerun.export import INT4
from edgerun.export.drafts.trimmed_head import trim_own_draft, write_trimmed
from edgerun.models.bundle import open_bundle
from edgerun.models.pairing import find_draft, name_draft
from edgerun.runtime.kv import layer_states
from edgerun.runtime.speculation import drafter_set
from edgerun.runtime.speculation.choice import DraftSampling, Speculation
from edgerun.runtime.speculation.drafters.draft_model import TopTokens
from support.draft_heads import check_counts, eager_engine, export_with_eagle_head, export_with_mtp_module
from support.nightly import some_nightly
from support.tiny_models import write_bundle, write_checkpoint

OFF, AUTO = Speculation.OFF, Speculation.AUTO
GREEDY = GenerateOptions(max_tokens=20, ignore_eos=True)
SAMPLED = GREEDY.changed({"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repeat_penalty": 1.1, "seed": 3})
OPTIONS = {
    "greedy": GREEDY,
    "until the end of the answer": GREEDY.changed({"ignore_eos": False}),
    "exact": GREEDY.changed({"exact": True}),
    "sampled": SAMPLED,
}
PROMPTS = ("the other thing", "in the in the in the", "a")
TRIMMED = np.arange(1, 300, 3)
"""Tokens of a trimmed LM head."""


def paired(target: Path, write_draft: Callable[[Path], object]) -> Path:
    """A bundle with a draft of its own files."""
    write_draft(target / "draft")
    name_draft(target, target / "draft")
    return target


def separate(folder: Path, target: str, draft: str, *layers: str) -> Path:
    """A bundle with another model as its draft, which has only these layers if there are any."""
    fewer = {"num_hidden_layers": len(layers), "layer_types": layers} if layers else {}
    bundle = write_bundle(folder, target, max_position_embeddings=600)
    own = write_bundle(folder / "own", draft, weights=INT4, **fewer)
    return paired(bundle, lambda place: shutil.copytree(own, place))


def with_trimmed_draft(folder: Path) -> Path:
    bundle = write_bundle(folder, max_position_embeddings=600)
    return paired(bundle, lambda place: write_trimmed(open_bundle(bundle), place, TRIMMED))


def trimmed(bundle: Path) -> Path:
    trim_own_draft(bundle, TRIMMED)
    return bundle


KINDS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "suffix": ("suffix", lambda folder: write_bundle(folder, max_position_embeddings=600)),
    "recycle": ("recycle", lambda folder: write_bundle(folder, max_position_embeddings=600)),
    "jacobi": ("jacobi", lambda folder: write_bundle(folder, max_position_embeddings=600)),
    "few slots": ("sparse", lambda folder: write_bundle(folder, max_position_embeddings=600)),
    "trimmed head": ("model", with_trimmed_draft),
    "hybrid": ("model", lambda folder: separate(folder, "llama", "qwen3_5_text", "linear_attention", "full_attention")),
    "hybrid pair": ("model", lambda folder: separate(folder, "lfm2", "lfm2", "conv", "full_attention")),
    "EAGLE-3": ("eagle", lambda folder: export_with_eagle_head(folder).bundle),
    "EAGLE-3 of a hybrid": ("eagle", lambda folder: export_with_eagle_head(folder, family="lfm2").bundle),
    "MTP, tied head": ("mtp", lambda folder: export_with_mtp_module(folder).bundle),
    "MTP, separate head": ("mtp", lambda folder: export_with_mtp_module(folder, tie_word_embeddings=False).bundle),
    "MTP, trimmed head": ("mtp", lambda folder: trimmed(export_with_mtp_module(folder).bundle)),
}
"""By kind: the name of the drafter, and what writes a bundle with its draft."""


class Drafted(NamedTuple):
    """An engine with a draft model, for which every draft token pays."""

    engine: Engine
    drafter: str

    def answer(self, prompt: str, options: GenerateOptions, *others: Speculation) -> int:
        """Assert that the texts of all choices are plain decoding's; returns the fewest tokens of the drafter."""
        plain, drafted = self.engine.generate(prompt, options, speculation=OFF), []
        assert (plain.stats.drafted, plain.stats.by_source, plain.stats.tokens_per_pass) == (0, {}, 1.0)
        check_counts(plain.stats)
        for choice in (Speculation.parse(self.drafter), *others):
            reply = self.engine.generate(prompt, options, speculation=choice)
            assert (reply.text, reply.finish_reason) == (plain.text, plain.finish_reason)
            check_counts(reply.stats)
            counts = reply.stats.by_source.get(self.drafter)
            drafted.append(0 if counts is None else counts.drafted)
        return min(drafted)


@pytest.fixture(scope="module", params=[*KINDS, pytest.param("hybrid pair of experts", marks=pytest.mark.nightly)])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    experts = ("model", lambda folder: separate(folder, "granitemoehybrid", "granitemoehybrid"))
    drafter, write = KINDS.get(request.param, experts)
    return write(tmp_path_factory.mktemp("drafted")), drafter


@pytest.fixture(scope="module")
def drafted(bundle: tuple[Path, str]) -> Iterator[Drafted]:
    with eager_engine(bundle[0]) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter_set, "LONG_CONTEXT", 0 if bundle[1] == "sparse" else 4096)
        yield Drafted(engine, bundle[1])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_text_is_that_of_plain_decoding(drafted: Drafted, options: GenerateOptions) -> None:
    assert sum(drafted.answer(prompt, options, AUTO) for prompt in PROMPTS) > 0 or not options.ignore_eos


@pytest.mark.parametrize("step", some_nightly([4, 1], 2))
def test_edited_prompts_and_kept_prefixes_stay_the_targets(drafted: Drafted, step: int) -> None:
    for length in range(3, 12, step):
        for options in (GREEDY, SAMPLED):
            drafted.answer("the other thing in the other"[: 2 * length], options)


def test_an_answer_that_is_closed_leaves_valid_caches(drafted: Drafted) -> None:
    for options in (GREEDY, SAMPLED):
        stream = drafted.engine.stream("the other", options, speculation=Speculation.parse(drafted.drafter))
        next(iter(stream))
        stream.close()
        drafted.answer("the other thing", options)


def test_a_long_answer_grows_the_cache_under_the_draft(drafted: Drafted) -> None:
    assert drafted.answer("in the other thing " * 16, GREEDY.changed({"max_tokens": 100})) > 0


@pytest.mark.parametrize("draft_sampling", [DraftSampling.CHAIN, DraftSampling.TREE])
def test_draft_tokens_can_be_sampled_from_it(drafted: Drafted, draft_sampling: DraftSampling) -> None:
    if drafted.engine.model.drafters.draft_model() is None:
        pytest.skip("there is no draft model")
    reply = drafted.engine.generate("the other thing", SAMPLED, draft_sampling=draft_sampling)
    check_counts(reply.stats)
    assert reply.stats.by_source[drafted.drafter].drafted > 0


def test_draft_tokens_can_be_sampled_from_what_the_model_gave_before(tmp_path: Path) -> None:
    """Answers share what they learn, and the first one learns as it goes."""
    options = SAMPLED.changed({"max_tokens": 60, "draft_sampling": DraftSampling.NGRAM})
    with eager_engine(write_bundle(tmp_path, max_position_embeddings=600)) as engine:
        replies = [engine.generate("in the in the", options, seed=seed) for seed in range(4)]
        for reply in replies:
            check_counts(reply.stats)
            assert set(reply.stats.by_source) <= {"ngram"}
        assert replies[-1].stats.by_source["ngram"].accepted > 0
        off = engine.generate("in the in the", options, speculation=OFF)
        assert (off.stats.drafted, off.text) == (0, engine.generate("in the in the", SAMPLED, max_tokens=60).text)


def test_the_command_line_samples_from_ngrams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = write_bundle(tmp_path, max_position_embeddings=600)
    choices = ["--raw", "-n", "200", "-t", "1", "--seed", "3", "--draft-sampling", "ngram", "--ignore-eos", "--json"]
    assert main([str(bundle), "-p", "in the in the", *choices]) == 0
    speculation = json.loads(capsys.readouterr().out)["speculation"]
    assert set(speculation["by_source"]) == {"ngram"}


def test_it_drafts_beside_an_int8_cache(bundle: tuple[Path, str]) -> None:
    with eager_engine(bundle[0], kv="int8") as engine:
        assert Drafted(engine, bundle[1]).answer("in the in the", GREEDY) > 0


@pytest.mark.parametrize("put_aside", [False, True], ids=["", "put aside"])
def test_alternating_conversations_use_their_own_caches(drafted: Drafted, tmp_path: Path, put_aside: bool) -> None:
    engine = drafted.engine

    def talk(choice: Speculation, *, put_aside: bool) -> list[str]:
        sessions, answers = [engine.session(), engine.session(system="be brief")], []
        for text in ("the", "and then", "of it"):
            for number, session in enumerate(sessions):
                answers.append(session.send(text, GREEDY, max_tokens=12, speculation=choice).text)
                if put_aside:
                    session.save(tmp_path / f"{number}.session")
                    session.close()
                    sessions[number] = engine.session(resume=tmp_path / f"{number}.session")
        return answers

    assert talk(Speculation.parse(drafted.drafter), put_aside=put_aside) == talk(OFF, put_aside=False)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_wrong_draft_changes_nothing(bundle: tuple[Path, str], options: GenerateOptions) -> None:
    """The draft model is sure of the least likely tokens."""
    with eager_engine(bundle[0]) as engine:
        draft = engine.model.drafters.draft_model()
        if draft is None:
            pytest.skip("there is no draft model")
        right = draft.logits
        draft.logits = lambda path: None if (found := right(path)) is None else -20 * found  # type: ignore[method-assign]
        assert Drafted(engine, bundle[1]).answer("the other thing", options) > 10


def test_paths_that_nobody_drafts_change_nothing(bundle: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model is asked about them before it answers; of one that keeps states, one position is held."""
    monkeypatch.setattr(layer_states, "_HELD_BYTES", 1)
    with eager_engine(bundle[0]) as engine:
        draft: Any = engine.model.drafters.draft_model()
        if draft is None:
            pytest.skip("there is no draft model")
        answer = draft.top_tokens

        def asked_first(path: tuple[int, ...], count: int, temperature: float = 1.0) -> TopTokens:
            for other in ((*path, 7), path[:-1], (*path[:1], 9, 11)):
                answer(other, count, temperature)
            return answer(path, count, temperature)

        draft.top_tokens = asked_first
        for options in (GREEDY, SAMPLED):
            assert Drafted(engine, bundle[1]).answer("in the in the", options) > 0


@pytest.mark.parametrize("target", some_nightly(["lfm2", "llama"], 2))
def test_export_with_a_draft_that_keeps_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, cache: Path
) -> None:
    checkpoint, out = write_checkpoint(tmp_path / "checkpoint", target), tmp_path / "bundle"
    draft = write_checkpoint(tmp_path / "draft", "lfm2", tie_word_embeddings=False)
    text, words = tmp_path / "text.txt", np.random.default_rng(0).choice(["the", "sea", "and", "sand"], 1200)
    text.write_text(" ".join(words), encoding="utf-8")
    choices = ["--draft", str(draft), "--draft-vocab", "60", "--calibration", str(text), "--calibration-tokens", "1100"]
    assert main(["export", str(checkpoint), str(out), *choices]) == 0
    found = find_draft(open_bundle(out))
    assert found.target_ids.size == 60
    texts = []
    for spec in ("off", "model"):
        capsys.readouterr()
        assert main([str(out), "-p", PROMPTS[0], "--raw", "-n", "20", "--device", "cpu", "--spec", spec]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
