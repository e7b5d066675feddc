"""Mixed exports of random tiny shapes: whatever the family, widths, budget and scales, a bundle within its budget."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from support.nightly import some_nightly

tiny_models = pytest.importorskip("support.tiny_models", reason="needs the export extra")
from edgerun.edge.cli.main import main  # noqa: E402
from edgerun.export import WeightFormat, parse_budget  # noqa: E402
from edgerun.export.allocation.format_candidates import BASE_FORMATS, is_allowed, planned_linears  # noqa: E402
from edgerun.export.allocation.plan_costs import bytes_read, bytes_stored, weight_count  # noqa: E402
from edgerun.export.checkpoint.config import DecoderConfig, read_config  # noqa: E402
from edgerun.export.checkpoint.layer_weights import FusedLinear  # noqa: E402
from edgerun.models.bundle import open_bundle  # noqa: E402
from support.known_timings import KnownMachine, use_machine  # noqa: E402

EXPERTS = ("qwen3_moe", "gpt_oss", "qwen3_5_moe_text", "qwen3_next")
FAMILIES = sorted(tiny_models.FAMILY_SETTINGS.keys() - {"gemma4_text"})
"""All families but the one whose layers differ, which mixed exports refuse."""
METHODS = ("gptq", "awq+gptq", "k-quant", "awq+k-quant", "rtn")
SCALES = ("--zero-points", "--half-scales")


@pytest.mark.parametrize("seed", some_nightly(range(200), every=200))
def test_mixed_exports_of_random_shapes(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    use_machine(monkeypatch, KnownMachine())
    choice = random.Random(seed)
    source = _checkpoint(choice, tmp_path / "checkpoint", seed)
    options = _options(choice, source, tmp_path)
    code = main(["export", str(source), str(tmp_path / "out"), *options, "--seed", str(seed), "--debug"])
    about = f"{json.loads((source / 'config.json').read_text(encoding='utf-8'))}\n{options}\n{capsys.readouterr().err}"
    assert code == 0, about
    assert _is_within_budget(source, tmp_path / "out", options[options.index("--budget") + 1]), about


def _checkpoint(choice: random.Random, folder: Path, seed: int) -> Path:
    family = choice.choice(FAMILIES)
    settings = {
        "hidden_size": choice.choice((32, 64, 96, 128, 160)),
        "vocab_size": choice.choice((300, 517, 1024)),
        "tie_word_embeddings": choice.random() < 0.5,
    }
    if family not in EXPERTS:
        settings["intermediate_size"] = choice.choice((48, 96, 172, 256, 320))
    if not tiny_models.FAMILY_SETTINGS[family].keys() & {"layer_types", "mlp_only_layers", "no_rope_layers"}:
        settings["num_hidden_layers"] = choice.choice((1, 2, 3))
    if family == "granitemoehybrid":
        settings["mamba_d_head"] = settings["hidden_size"] // 4
    found: Path = tiny_models.write_checkpoint(folder, family, seed=seed, **settings)
    return found


def _options(choice: random.Random, source: Path, folder: Path) -> list[str]:
    config = read_config(source)
    place, measure = choice.choice(("", "@file")), choice.choice(("bpw", "MB"))
    cheapest, dearest = _extremes(config, place)
    size = choice.uniform(1.1 * cheapest, dearest)
    budget = f"{size / 1e6:.5f}MB" if measure == "MB" else f"{8 * size / weight_count(config):.2f}bpw"
    options = ["--weights", "mixed", "--budget", budget + place, "--calibration-tokens", "1100"]
    options += ["--time-limit", choice.choice(("0", "0.005"))]
    if choice.random() < 0.8:
        text = folder / "text.txt"
        text.write_text(" ".join(choice.choices(tiny_models.WORDS, k=1200)), encoding="utf-8")
        options += ["--calibration", str(text)]
    if choice.random() < 0.7:
        options += ["--method", choice.choice(METHODS)]
    if config.experts is None:  # the operator of experts has plain scales only
        options += choice.sample(SCALES, choice.choice((0, 1)))
    return options


def _extremes(config: DecoderConfig, place: str) -> tuple[float, float]:
    """Bytes of the smallest and of the largest plan."""
    sizes = [
        [_bytes(config, linear, each, place) for each in BASE_FORMATS if is_allowed(linear, each)]
        for linear in planned_linears(config)
    ]
    return sum(map(min, sizes)), sum(map(max, sizes))


def _bytes(config: DecoderConfig, linear: FusedLinear, weight_format: WeightFormat, place: str) -> int:
    return (
        bytes_stored(linear, weight_format, tied_head=config.tied_head) if place else bytes_read(linear, weight_format)
    )


def _is_within_budget(source: Path, bundle: Path, typed: str) -> bool:
    config, budget, manifest = read_config(source), parse_budget(typed), open_bundle(bundle).manifest
    place = "@file" if budget.in_file else ""
    sizes = (_bytes(config, each, manifest.weights[each.name], place) for each in planned_linears(config))
    return sum(sizes) <= budget.limit(config)
