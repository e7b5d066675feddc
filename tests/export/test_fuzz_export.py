"""Damaged inputs of exports: exit code 0, 1 or 2, one line of error, no traceback, and bounded time and memory."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.command_worker import CommandWorker, needs_limits
from support.random_damage import UNUSUAL, Damage, fresh_copy

tiny_models = pytest.importorskip("support.tiny_models", reason="needs the export extra")
gguf_files = pytest.importorskip("support.gguf_files", reason="needs the gguf extra")

PARTS = 4
CASES = 125
SETTINGS = ((("change_json", (".json",)),) * 6) + (("write_nonsense", ()), ("replace_file", ()), ("truncate", ()))
LINEARS = [f"layers.0.{name}" for name in ("qkv", "o", "gate_up", "down")] + ["head"]
FORMATS = ("fp32", "int8/32", "int4/64 gptq", "int4/32", "int2/64+rank32", "int3/7", "", "int4/64 magic", "x" * 500)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer, and the same as a GGUF file."""
    folder = tmp_path_factory.mktemp("sources")
    tiny_models.write_checkpoint(folder / "checkpoint", num_hidden_layers=1)
    (folder / "gguf").mkdir()
    gguf_files.write_gguf(folder / "gguf" / "model.gguf", folder / "checkpoint", "Q8_0")
    return folder


@needs_limits
@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_inputs_of_exports(sources: Path, tmp_path: Path, part: int) -> None:
    faults = []
    makers = (_checkpoint, _checkpoint, _header, _gguf, _gguf, _plan, _calibration, _recipe)
    with CommandWorker(tmp_path) as worker:
        for seed in range(part * CASES, (part + 1) * CASES):
            choice = random.Random(seed)
            arguments = choice.choice(makers)(choice, sources, tmp_path, seed)
            outcome = worker.run(["export", *arguments])
            if outcome.fault:
                faults.append(f"seed {seed}: {outcome}")
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert not faults, f"{len(faults)} of {CASES}\n\n" + "\n\n".join(faults)


def _checkpoint(choice: random.Random, sources: Path, place: Path, seed: int) -> list[str]:
    """Settings, tokenizer and other files of a checkpoint."""
    folder = fresh_copy(sources / "checkpoint", place / "checkpoint")
    Damage(folder, seed).apply(SETTINGS, choice.choice((1, 1, 2)))
    return [str(folder), str(place / "out"), "--weights", "fp32"]


def _header(choice: random.Random, sources: Path, place: Path, seed: int) -> list[str]:
    """The header of safetensors."""
    folder = fresh_copy(sources / "checkpoint", place / "checkpoint")
    damage, path = Damage(folder, seed), folder / "model.safetensors"
    if choice.random() < 0.3:
        choice.choice((damage.flip, damage.truncate, damage.overwrite_number, damage.put_nan))(path)
    else:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = place / "header.json"
        header.write_bytes(data[8 : 8 + length])
        damage.change_json(header)
        changed = header.read_bytes()
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    return [str(folder), str(place / "out"), "--weights", "fp32"]


def _gguf(choice: random.Random, sources: Path, place: Path, seed: int) -> list[str]:
    """Header and metadata of a GGUF file."""
    folder = fresh_copy(sources / "gguf", place / "gguf")
    damage, path = Damage(folder, seed), folder / "model.gguf"
    for _ in range(choice.choice((1, 2, 5))):
        choice.choice((damage.flip, damage.overwrite_number, damage.overwrite_number, damage.truncate))(path)
    if choice.random() < 0.05:
        damage.replace_file(path)
    return [str(path), str(place / "out")]


def _plan(choice: random.Random, sources: Path, place: Path, seed: int) -> list[str]:
    """A plan file."""
    lines = ["[linears]", *(f'"{name}" = "{choice.choice(FORMATS)}"' for name in LINEARS)]
    for _ in range(choice.choice((0, 1, 3))):
        lines[choice.randrange(len(lines))] = choice.choice(("", "[", "x = 3", '"head" = 5', "[linears]", "a" * 5000))
    path = place / "plan.toml"
    _make_file(path, "\n".join(lines).encode(), choice, seed)
    return [str(sources / "checkpoint"), str(place / "out"), "--plan", str(path), "--calibration-tokens", "64"]


def _calibration(choice: random.Random, sources: Path, place: Path, seed: int) -> list[str]:
    """A calibration text that cannot be used."""
    message = {"role": choice.choice(("user", 5, None)), "content": choice.choice(UNUSUAL)}
    row = {"messages": choice.choice(([message], message, UNUSUAL, 5))}
    path = place / choice.choice(("text.txt", "text.jsonl"))
    content = choice.choice((b"a", b" \n", b"{", b"\xff\xfe", json.dumps(row).encode(), json.dumps(message).encode()))
    _make_file(path, content, choice, seed)
    return [str(sources / "checkpoint"), str(place / "out"), "--calibration", str(path), "--calibration-tokens", "64"]


def _recipe(choice: random.Random, sources: Path, place: Path, seed: int) -> list[str]:
    """Options that contradict each other or the checkpoint."""
    numbers = ("0", "-1", "1", "7", "64", "nan", "inf", "1e400", str(1 << 70), "", "x")
    words = ("fp32", "int8", "int2", "mixed", "auto", "rtn", "k-quant", "genai", "edge", "", "x")
    options: dict[str, tuple[str, ...]] = {
        **dict.fromkeys(("--block", "--context", "--time-limit", "--bandwidth", "--seed", "--draft-vocab"), numbers),
        **dict.fromkeys(("--weights", "--head", "--method", "--layout", "--draft-weights"), words),
        "--budget": ("3.5bpw", "0bpw", "-1MB", "nanbpw", "1e999ms", "9ms@0", "x", ""),
        "--draft": (str(sources / "checkpoint"), "nothing", str(place), "/dev/null"),
        "--work": (str(place / "work"), "/dev/null/x", ""),
    }
    chosen = choice.sample(sorted(options), choice.choice((2, 3, 4)))
    flags = choice.sample(("--zero-points", "--half-scales", "--offline"), choice.choice((0, 1)))
    pairs = [word for name in chosen for word in (name, choice.choice(options[name]))]
    if "mixed" in pairs and "--budget" in pairs:
        pairs += ["--time-limit", "0"]
    source = sources / choice.choice(("checkpoint", "gguf", "gguf/model.gguf"))
    return [str(source), str(place / "out"), *pairs, *flags, "--calibration-tokens", "64"]


def _make_file(path: Path, content: bytes, choice: random.Random, seed: int) -> None:
    for old in path.parent.glob(f"{path.stem}.*"):
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()
    path.write_bytes(content)
    damage = Damage(path.parent, seed)
    kinds: tuple[Callable[[Path], None], ...] = (damage.flip, damage.write_nonsense, damage.replace_file)
    if choice.random() < 0.5:
        choice.choice(kinds)(path)
