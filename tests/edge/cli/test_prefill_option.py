"""`--prefill`: which graph reads a long prompt, in statistics, `tune` and `inspect`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgerun.edge.cli.main import main
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph import open_graph
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.measure import bundle_timing, prompt_choice
from edgerun.runtime.measure.measurement_store import model_key
from support.commands import Capture, Patch, fails, json_of, output_of

LONG = "the cat sat on the mat and " * 12


FAMILIES = pytest.mark.parametrize("bundle", ["llama", "lfm2", "qwen3_5_text"], indirect=True)
"""Also models whose states every token changes."""


@pytest.fixture
def bundle(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Patch) -> str:
    """An int4 model with a cache folder of its own, as if it were not small."""
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    from edgerun.export import INT4

    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(open_graph, "_SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(bundle_timing, "_MAX_ROUNDS", 2)
    monkeypatch.setattr(prompt_choice, "_SECONDS_BUDGET", 0.0)
    return str(tiny.write_bundle(tmp_path, getattr(request, "param", "llama"), weights=INT4))


@FAMILIES
def test_statistics_say_what_read_the_prompt(bundle: str, capsys: Capture) -> None:
    def answer(*options: str) -> tuple[dict[str, Any], str]:
        assert main([bundle, "--raw", "-p", LONG, "-n", "3", "--stats", "--json", "--threads", "1", *options]) == 0
        out, err = capsys.readouterr()
        return json.loads(out)["prompt_graphs"], err

    asked, line = answer("--prefill", "int8")
    tokens = sum(asked["tokens"].values())
    assert asked == {"tokens": {"int8": tokens}, "int8_refusal": None}
    assert f"int8 prompt graph: {tokens} of {tokens} tokens read" in line
    unmeasured, line = answer()
    assert unmeasured == {"tokens": {"base": tokens}, "int8_refusal": "not made yet (edge-run tune makes it)"}
    assert "int8 prompt graph: not made yet (edge-run tune makes it)" in line
    plain, line = answer("--prefill", "plain")
    assert plain == {"tokens": {"base": tokens}, "int8_refusal": "not asked for"}
    assert "int8" not in line
    assert "--prefill" in fails(capsys, bundle, "-p", "x", "--prefill", "fast")


def test_tune_measures_and_inspect_shows_it(bundle: str, capsys: Capture, monkeypatch: Patch) -> None:
    assert "int8 prompt graph: not made yet (edge-run tune makes it)" in output_of(capsys, "inspect", bundle)
    assert main(["tune", bundle, "--threads", "1", "--prefill", "plain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == {"int8_used": False, "reason": "not asked for"}
    for worth, used in ((0.0, True), (1e9, False)):
        monkeypatch.setattr(prompt_choice, "_WORTH", worth)
        prompts = json_of(capsys, "tune", bundle, "--threads", "1", "--json")["prompts"]
        assert prompts["int8_used"] is used
        assert prompts["speedup"] > 0
        assert 0 <= prompts["mean_kl"] <= prompts["kl_limit"]
        assert set(prompts["int8_milliseconds"]) == {"64", "128"}, "wider passes do not fit the context of 256"
    assert "int8 prompt graph: not faster here" in output_of(capsys, "tune", bundle, "--threads", "1")


def test_verify_finds_damage(bundle: str, tmp_path: Path, capsys: Capture) -> None:
    assert main([bundle, "--raw", "-p", "the", "-n", "1", "--threads", "1", "--prefill", "int8"]) == 0
    (weights,) = tmp_path.glob("cache/prompt-int8/*/int8.data")
    weights.write_bytes(bytes(weights.stat().st_size))
    capsys.readouterr()
    assert main(["verify", bundle, "--threads", "1", "--limit", "1"]) == 2
    assert str(weights) in capsys.readouterr().err
    assert not weights.exists()


@FAMILIES
def test_the_exactness_report_does_not_depend_on_it(bundle: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "prompts.txt").write_text(LONG, encoding="utf-8")
    verify = ["verify", bundle, "--threads", "1", "--prompts", str(tmp_path / "prompts.txt"), "-n", "12", "--json"]

    def report() -> dict[str, Any]:
        assert main(verify) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        texts = {
            mode: {name: found[mode][name] for name in ("texts", "identical", "near_ties")}
            for mode in ("greedy", "exact")
        }
        return {**texts, **{name: found[name] for name in ("noise", "epsilon", "counterexample", "passed")}}

    before = report()
    assert main([bundle, "--raw", "-p", LONG, "-n", "1", "--threads", "1", "--prefill", "int8"]) == 0
    faster = prompt_choice.PromptChoice(None, {64: 0.03}, {64: 0.02}, 0.0, 0.001, 0.02)
    prompt_choice.PROMPT_CHOICES.save(model_key(open_bundle(Path(bundle)), SessionConfig(cpu_device(), 1)), faster)
    capsys.readouterr()
    assert main([bundle, "--raw", "-p", LONG, "-n", "1", "--threads", "1", "--json"]) == 0
    assert "int8" in json.loads(capsys.readouterr().out)["prompt_graphs"]["tokens"]
    assert report() == before


def test_a_graph_of_earlier_weights_is_not_used(
    bundle: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    from edgerun.export import INT4
    from support.tiny_models import write_bundle

    def answer() -> str:
        asked = [bundle, "--raw", "-p", LONG, "-n", "12", "--threads", "1", "--prefill", "int8", "--json"]
        assert main(asked) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["prompt_graphs"]["tokens"]["int8"] >= 128
        return str(found["text"])

    first = answer()
    other = write_bundle(tmp_path / "other", weights=INT4, seed=5)
    shutil.rmtree(bundle)
    shutil.copytree(other, bundle)
    second = answer()
    assert second != first
    assert len(list(tmp_path.glob("cache/prompt-int8/*"))) == 2
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "empty"))
    assert answer() == second
