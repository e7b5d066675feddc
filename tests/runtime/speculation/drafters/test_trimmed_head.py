"""A draft with a trimmed head does not change the output, whatever it drafts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import BundleError, Engine
from edgerun.edge.cli.main import main
from edgerun.models.bundle import holds_only_bundle_files, open_bundle
from edgerun.models.pairing import find_draft, name_draft
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.draft_loading import DraftTarget, load_layer_skip_draft
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.nightly import some_nightly

pytest.importorskip("onnx", reason="needs the export extra")
from edgerun.export import WeightFormat
from edgerun.export.drafts.skipped_layers import SubLayer, SubLayerKind, write_layer_skip_draft
from edgerun.export.drafts.trimmed_head import trim_own_draft, write_trimmed
from support.tiny_models import write_bundle

HEAD = 60
REQUESTS = ("what is the time", "in the end", "0123 and on")
OFF = Speculation.OFF


@pytest.fixture(scope="module")
def pair(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with itself as a draft, without most tokens of its head: its tokens are right where the target
    chooses one of them, and the target often chooses others."""
    folder = tmp_path_factory.mktemp("pair") / "target"
    shutil.copytree(tiny_bundle, folder)
    with edgerun.load(tiny_bundle) as engine:
        written = [tokens_of(engine, request, 1.0) for request in REQUESTS]
    often = np.bincount(np.concatenate(written), minlength=300).argsort(kind="stable")[::-1]
    write_trimmed(open_bundle(tiny_bundle), folder / "draft", np.sort(often[:HEAD]))
    name_draft(folder, folder / "draft")
    return folder


def tokens_of(engine: Engine, request: str, temperature: float) -> list[int]:
    text = engine.generate(request, max_tokens=60, seed=1, temperature=temperature, speculation=OFF).text
    return engine.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def engine(pair: Path) -> Iterator[Engine]:
    """An engine for which every draft token pays."""
    with edgerun.load(pair, threads=1, cache=False) as engine:
        drafter_pool = engine.model.drafters
        drafter_pool._pass_cost = FixedCost(NEARLY_FREE)
        draft = drafter_pool.draft_model()
        assert draft is not None
        draft.cost = FixedCost({128: {1: 1e-6, 16: 1.1e-6}})
        yield engine


def test_the_pair_is_found_with_its_map(pair: Path) -> None:
    found = find_draft(open_bundle(pair))
    assert found is not None
    assert found.target_ids is not None
    assert (found.draft.folder, found.target_ids.size) == ((pair / "draft").resolve(), HEAD)


@pytest.mark.parametrize("choice", some_nightly(["model", "auto", "suffix,model", "recycle,model"], every=2))
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}])
def test_the_output_is_that_of_plain_decoding(engine: Engine, choice: str, sampling: dict[str, float]) -> None:
    drafted = accepted = 0
    for seed, request in enumerate(REQUESTS):
        options = {**sampling, "seed": seed, "max_tokens": 40}
        plain = engine.generate(request, speculation=OFF, **options)
        speculative = engine.generate(request, speculation=Speculation.parse(choice), **options)
        assert (speculative.text, speculative.finish_reason) == (plain.text, plain.finish_reason)
        drafted += speculative.stats.drafted
        accepted += speculative.stats.accepted
    assert 0 < accepted < drafted


def test_it_reads_tokens_that_its_head_lacks_and_proposes_target_ids(engine: Engine) -> None:
    model = engine.model.drafters.draft_model()
    kept = set(model.target_ids.tolist())
    text = engine.encode_chat([{"role": "user", "content": REQUESTS[0]}])
    text += tokens_of(engine, REQUESTS[0], 0.0)
    assert set(text) - kept
    assert len(kept) == HEAD
    bound = engine.model._graph.bind(engine.model._graph.arena(len(text)))
    wanted = bound.forward(np.array(text), logits_for=np.arange(len(text)))
    said = 0
    for end in range(10, len(text)):
        model.reset(text[:end])
        (candidate,) = model.top_tokens((), 1).tokens
        best = max(kept, key=lambda token: wanted[end - 1, token])
        assert candidate == best
        said += candidate == wanted[end - 1].argmax()
    assert said


def test_a_draft_of_the_targets_own_layers_may_have_a_trimmed_head(tmp_path: Path, pair: Path) -> None:
    folder = write_bundle(tmp_path, num_hidden_layers=4, weights=WeightFormat(8, 32))
    write_layer_skip_draft(folder, (SubLayer(1, SubLayerKind.ATTENTION), SubLayer(2, SubLayerKind.FEED_FORWARD)))
    kept = np.load(pair / "draft" / "d2t.npy")
    weights = (folder / "model.onnx.data").read_bytes()
    whole = own_logits(folder)
    trim_own_draft(folder, kept)
    assert (folder / "model.onnx.data").read_bytes() == weights
    assert holds_only_bundle_files(folder)
    np.testing.assert_allclose(own_logits(folder), whole[:, kept], atol=1e-5)
    with edgerun.load(folder, cache=False) as llm:
        for request in REQUESTS:
            # With activations of 8 bits, a near tie decides otherwise in a wider pass unless it is recomputed.
            texts = {
                llm.generate(request, max_tokens=40, speculation=each, exact=True).text
                for each in (OFF, Speculation.parse("model"))
            }
            assert len(texts) == 1


def own_logits(folder: Path) -> np.ndarray:
    """Logits [5, head] of a bundle's own draft."""
    text = np.arange(20, 25)
    with edgerun.load(folder, cache=False) as llm:
        found = find_draft(llm.bundle)
        assert found is not None
        target = DraftTarget(llm.bundle, llm.graph_io, 64, cache=False)
        draft = load_layer_skip_draft(found, SessionConfig(llm.device, 1), target)()
        arena = llm.model._graph.arena(64)
        llm.model._graph.bind(arena).forward(text)
        arena.commit(text.size)
        draft.attach(arena)
        rows = []
        for end in range(1, 6):
            draft.reset(text[:end].tolist())
            rows.append(draft.logits(()))
        return np.stack(rows)


def test_a_draft_with_a_trimmed_head_is_refused_as_a_target(pair: Path) -> None:
    with pytest.raises(BundleError) as caught:
        edgerun.load(pair / "draft")
    expected = f"{pair / 'draft'} is a draft whose head has 60 of 300 tokens; run the model that it drafts for"
    assert str(caught.value) == expected


def test_inspect_and_bench_report_the_size_of_the_head(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(pair), "--json"]) == 0
    draft = json.loads(capsys.readouterr().out)["draft"]
    assert (draft["name"], draft["head_tokens"], draft["weights"]) == ("draft", HEAD, {"fp32": 10})
    assert draft["bytes"] == open_bundle(pair / "draft").weight_bytes
    assert main(["bench", str(pair), "--limit", "1", "-n", "8", "--no-cache"]) == 0
    assert "draft model draft (head of 60 tokens)" in capsys.readouterr().out
    assert main(["bench", str(pair), "--limit", "1", "-n", "8", "--no-cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft_head"] == HEAD


def test_a_draft_with_a_whole_head_reports_no_head_size(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"] is None
    measured = ["bench", str(tiny_bundle), "--draft", str(tiny_bundle), "--limit", "1", "-n", "8", "--no-cache"]
    assert main([*measured, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft_head"] is None
