"""A target and its draft side by side: how they are run, and which drafts cannot be."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import BundleError, DeviceError, InputError
from edgerun.edge.cli.main import main
from edgerun.export.drafts.trimmed_head import write_trimmed
from edgerun.models.bundle import Bundle, open_bundle
from edgerun.models.manifest import DeviceKind, HeadKind
from edgerun.models.pairing import DraftPair, name_draft, pair
from edgerun.runtime.devices.providers import Device, choose_device
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.measure.measurement_store import model_key
from edgerun.runtime.measure.pass_timing import PASS_COSTS
from edgerun.runtime.speculation.draft_loading import (
    DraftTarget,
    PlacedDraft,
    load_separate_draft,
    place_draft,
    share_cores,
)
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from support.tiny_models import write_bundle

CONFIG = SessionConfig(choose_device("cpu"), 1)
KEPT = np.arange(20, 120)


def loaded(target: Bundle, draft: Bundle, context: int = 256, *, cache: bool = True) -> DraftModel:
    graph_io = GraphSession(target.graph, CONFIG).graph_io
    return load_separate_draft(pair(target, draft), CONFIG, DraftTarget(target, graph_io, context, cache))()


def refusal(target: Bundle, draft: Bundle) -> str:
    with pytest.raises(BundleError) as caught:
        loaded(target, draft)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def trimmed(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A draft bundle whose head has only the tokens of KEPT, without a map."""
    folder = tmp_path / "draft"
    write_trimmed(open_bundle(tiny_bundle), folder, KEPT)
    for name in ("d2t.npy", "edge.json"):
        (folder / name).unlink()
    return folder


def test_the_shorter_context_counts(tiny_bundle: Path) -> None:
    target = open_bundle(tiny_bundle)
    for context, longest in ((10, 10), (1000, 256)):
        model = loaded(target, target, context)
        model.reset([20] * longest)
        assert model.top_tokens((), 1).tokens
        model.append(20)
        assert not model.top_tokens((), 1).tokens


def test_the_pass_cost_is_stored_unless_caching_is_off(tmp_path: Path) -> None:
    draft = open_bundle(write_bundle(tmp_path, seed=5))
    loaded(draft, draft, cache=False)
    assert PASS_COSTS.load(model_key(draft, CONFIG)) is None
    first = loaded(draft, draft)
    assert PASS_COSTS.load(model_key(draft, CONFIG)) is not None
    assert loaded(draft, draft).cost.measured == first.cost.measured


def test_padding_of_another_size_does_not_matter(tiny_bundle: Path, tmp_path: Path) -> None:
    padded = write_bundle(tmp_path, vocab_size=320)
    (padded / "edge.json").unlink()
    shutil.copy(tiny_bundle / "tokenizer.json", padded)
    small, large = open_bundle(tiny_bundle), open_bundle(padded)
    model = loaded(small, large)
    model.reset([20, 21])
    everything = model.top_tokens((), 400)
    assert sorted(everything.tokens) == list(range(300))
    assert sum(everything.probabilities) == pytest.approx(1, abs=1e-5)
    # Conversely, the target's padding tokens are not in the draft's embedding; they never occur.
    model = loaded(large, small)
    model.reset([20, 21])
    assert sorted(model.top_tokens((), 400).tokens) == list(range(300))
    assert model.top_tokens((310,), 1).tokens == ()


def test_a_trimmed_head_needs_its_map(tiny_bundle: Path, trimmed: Path) -> None:
    target, draft = open_bundle(tiny_bundle), open_bundle(trimmed)
    assert refusal(target, draft) == (
        f"the draft {trimmed} has an LM head of 100 tokens, but no map to the target's; "
        "put its d2t.npy beside the graph"
    )
    np.save(trimmed / "d2t.npy", KEPT)
    model = loaded(target, draft)
    model.reset([5, 299])
    assert sorted(model.top_tokens((), 300).tokens) == KEPT.tolist()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (KEPT[1:], "has 99 ids for a head of 100 tokens"),
        (KEPT + 190, "has ids from 210 to 309, but the target 300 tokens"),
    ],
)
def test_a_map_of_another_head_is_refused(tiny_bundle: Path, trimmed: Path, ids: np.ndarray, message: str) -> None:
    np.save(trimmed / "d2t.npy", ids)
    assert refusal(open_bundle(tiny_bundle), open_bundle(trimmed)) == (
        f"the draft {trimmed} cannot be used: its map to the target's ids {message}; "
        "restore it or export the draft again"
    )


def test_a_small_draft_does_not_change_the_targets_configuration(tiny_bundle: Path, tmp_path: Path) -> None:
    config = SessionConfig(choose_device("cpu"), 2)
    small = Bundle(tiny_bundle, tiny_bundle / "model.onnx", None)
    assert share_cores(config, small) == (config, SessionConfig(config.device, 1))
    shutil.copytree(tiny_bundle, tmp_path / "large")
    with (tmp_path / "large" / "model.onnx.data").open("ab") as file:
        file.truncate(100 << 20)
    large = Bundle(tmp_path / "large", tmp_path / "large" / "model.onnx", None)
    shared = SessionConfig(config.device, 2, shares_cores=True)
    assert share_cores(config, large) == (shared, shared)


def test_a_draft_takes_turns_on_the_targets_device_and_overlaps_elsewhere(tiny_bundle: Path) -> None:
    target = open_bundle(tiny_bundle)
    found, cpu = pair(target, target), SessionConfig(choose_device("cpu"), 2)
    gpu = replace(cpu, device=Device("WebGpuExecutionProvider", DeviceKind.GPU, "test"))
    for request in ("auto", "cpu"):
        assert place_draft(found, cpu, request) == (cpu, PlacedDraft(found, replace(cpu, threads=1)))
        # Beside a GPU, the CPU drafts while the GPU verifies, and leaves it the cores when it waits.
        config, placed = place_draft(found, gpu, request)
        assert config == gpu
        assert placed == PlacedDraft(found, replace(cpu, threads=1, shares_cores=True), overlaps=True)


def test_a_draft_head_runs_where_the_target_runs(tiny_bundle: Path) -> None:
    target = open_bundle(tiny_bundle)
    own = DraftPair(target, None, HeadKind.EAGLE)
    gpu = SessionConfig(Device("WebGpuExecutionProvider", DeviceKind.GPU, "test"))
    config, placed = place_draft(own, gpu)
    assert (config.device, placed.config.device, placed.overlaps) == (gpu.device, gpu.device, False)
    with pytest.raises(InputError, match="a draft head runs on the model's device, WebGpu, and not on CPU"):
        place_draft(own, gpu, "cpu")


def test_a_draft_device_that_is_not_there_is_refused(tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DeviceError, match="no device 'Abacus'"):
        edgerun.load(tiny_bundle, draft=tiny_bundle, draft_device="Abacus")
    with edgerun.load(tiny_bundle, draft=None, draft_device="cpu"):
        assert f"draft_device is cpu, but {tiny_bundle} has no draft model" in caplog.text


@pytest.fixture
def trimmed_pair(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A target with a draft whose head has only the tokens of KEPT."""
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "target"))
    write_trimmed(open_bundle(tiny_bundle), folder / "draft", KEPT)
    name_draft(folder, folder / "draft")
    return folder


def test_a_draft_with_a_trimmed_head_is_refused_as_a_target(trimmed_pair: Path) -> None:
    with pytest.raises(BundleError) as caught:
        edgerun.load(trimmed_pair / "draft")
    expected = f"{trimmed_pair / 'draft'} is a draft whose head has 100 of 300 tokens; run the model that it drafts for"
    assert str(caught.value) == expected


def test_inspect_reports_the_size_of_the_head(trimmed_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(trimmed_pair), "--json"]) == 0
    draft = json.loads(capsys.readouterr().out)["draft"]
    assert (draft["name"], draft["head_tokens"], draft["weights"]) == ("draft", KEPT.size, {"fp32": 10})
    assert draft["bytes"] == open_bundle(trimmed_pair / "draft").weight_bytes
