"""Damaged bundles: exit code 0, 1 or 2, one line of error, no traceback, and bounded time and memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edgerun.models.find import bundled_folder
from support.command_worker import CommandWorker, needs_limits
from support.random_damage import Damage, fresh_copy, recompute_digests

PARTS = 4
CASES = 125
KINDS = (
    ("flip", ()),
    ("flip", (".onnx",)),
    ("truncate", ()),
    *((("change_json", (".json",)),) * 6),
    ("write_nonsense", (".json", ".jinja")),
    ("write_nonsense", ()),
    ("replace_file", ()),
    ("put_nan", (".data",)),
)


@needs_limits
@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_bundles(tiny_bundle: Path, tmp_path: Path, part: int) -> None:
    faults = []
    with CommandWorker(tmp_path) as worker:
        for seed in range(part * CASES, (part + 1) * CASES):
            choice = random.Random(seed)
            source = bundled_folder() if choice.random() < 0.25 else tiny_bundle
            model = fresh_copy(source, tmp_path / "model")
            damage = Damage(model, seed)
            damage.apply(KINDS, choice.choice((1, 1, 2, 4)))
            manifest = choice.random()
            if manifest < 0.5:
                recompute_digests(model)
                recompute_digests(model / "draft")
            elif manifest < 0.75 and (model / "edge.json").is_file():
                (model / "edge.json").unlink()
            outcome = worker.run(_command(choice, str(model)), choice.choice((b"", b"list files")))
            if outcome.fault:
                faults.append(f"seed {seed}, {', '.join(damage.done)}: {outcome}")
    assert not faults, f"{len(faults)} of {CASES}\n\n" + "\n\n".join(faults)


def _command(choice: random.Random, model: str) -> list[str]:
    kind = choice.random()
    if kind < 0.2:
        return ["inspect", model, *choice.choice(([], ["--json"]))]
    options = [["--raw"], [], ["-t", "1", "--seed", "1"], ["--json"], ["--draft", "none"], ["--stats"]]
    drafting = ["--spec", choice.choice((*(("off",) * 9), "suffix", "auto"))]
    return ["run", model, "-p", "a list", "-n", "3", "--no-cache", *choice.choice(options), *drafting]
