"""Prefixes on disk give the text that computing them gives, and whatever is wrong with a file, they are computed."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import Engine, GenerateOptions, Reply, Speculation
from edgerun.runtime import loaded_model
from edgerun.runtime.kv import prefix_files
from edgerun.runtime.kv.arena import InPlaceArena
from edgerun.runtime.kv.buffers import CacheTensorType
from edgerun.runtime.kv.prefix_cache import PrefixCache
from edgerun.runtime.kv.prefix_files import PrefixFiles, prefix_folder
from support.killed_process import keep_prefix, killing_server, needs_kills
from support.layouts import LAYOUTS, write_layout

SYSTEM = "the other and the one who is at the end of it, and on to " * 4
QUESTIONS = ("in the", "there", "and one of the others")
TENSOR_TYPES = (CacheTensorType(np.dtype(np.float32), (1, 1, 0, 2), 2),) * 2


pytestmark = pytest.mark.usefixtures("cache")


def loaded(model: Path, **options: object) -> Engine:
    return edgerun.load(model, threads=1, draft=None, **options)  # type: ignore[arg-type]


def asked(engine: Engine, question: str) -> Reply:
    return engine.generate(question, system=SYSTEM, keep_prefix=True, max_tokens=8, speculation=Speculation.OFF)


def files() -> list[Path]:
    return sorted(prefix_folder().glob("*/*.kv"))


def arena_of(tokens: int, value: float = 1.0) -> InPlaceArena:
    arena = InPlaceArena(TENSOR_TYPES, 512)
    arena.pad_to(tokens, value)
    return arena


def write(prefixes: PrefixFiles, arena: InPlaceArena, first: int = 0, stop: int = 100) -> None:
    prefixes.keep(arena, np.arange(first, stop))
    prefixes.wait()


def restored_slots(prefixes: PrefixFiles, first: int = 0, stop: int = 100) -> InPlaceArena | None:
    """An arena with the slots that a file has of a sequence; None if no file has any."""
    arena = arena_of(0)
    shared, stored = prefixes.find(np.arange(first, stop))
    assert stored is None or prefixes.restore(stored, shared, arena)
    return None if stored is None else arena


@pytest.mark.parametrize("kind", ["float", "int8", "optimum"])
def test_a_fresh_process_continues_from_the_file_with_the_same_text(
    tiny_bundle: Path, tmp_path: Path, kind: str
) -> None:
    model = write_layout(tmp_path / "model", LAYOUTS["optimum"]) if kind == "optimum" else tiny_bundle
    kv = "int8" if kind == "int8" else "float"

    def answers(engine: Engine) -> list[Reply]:
        if engine.template is not None:
            return [asked(engine, question) for question in QUESTIONS]
        options = GenerateOptions(raw=True, max_tokens=8)
        engine.keep_prefix(SYSTEM, options)
        return [engine.generate(SYSTEM + question, options) for question in QUESTIONS]

    with loaded(model, kv=kv, prefix_disk=0, prefix_cache=0) as engine:
        expected = [reply.text for reply in answers(engine)]
    assert not files()
    with loaded(model, kv=kv, prefix_cache=0) as engine:
        assert [reply.text for reply in answers(engine)] == expected
    (file,) = files()
    if os.name == "posix":
        assert [path.stat().st_mode & 0o777 for path in (file, file.parent)] == [0o600, 0o700]
    with loaded(model, kv=kv, prefix_cache=0) as engine:
        replies = answers(engine)
    assert [reply.text for reply in replies] == expected
    assert all(reply.stats.reused_tokens >= 64 for reply in replies)
    assert files() == [file]


def test_parked_prefixes_take_a_quarter_and_are_used_by_engines_that_park_alone(tiny_bundle: Path) -> None:
    with loaded(tiny_bundle, prefix_cache=0) as engine:
        expected = asked(engine, QUESTIONS[0])
    for reused in (False, True):
        with loaded(tiny_bundle, prefix_cache=0, lossy_parking=True) as engine:
            reply = asked(engine, QUESTIONS[0])
        assert (reply.stats.reused_tokens >= 64) is reused
        assert reply.stats.prompt_tokens == expected.stats.prompt_tokens
    exact, parked = sorted(files(), key=lambda file: -file.stat().st_size)
    assert exact.parent != parked.parent
    assert 3 < exact.stat().st_size / parked.stat().st_size < 4
    with loaded(tiny_bundle, prefix_cache=0) as engine:
        assert asked(engine, QUESTIONS[0]).text == expected.text
    parked.write_bytes(parked.read_bytes()[:-100])
    with loaded(tiny_bundle, prefix_cache=0, lossy_parking=True) as engine:
        assert asked(engine, QUESTIONS[0]).stats.reused_tokens == 0


def test_restored_slots_are_within_half_a_step_of_the_exact_ones() -> None:
    prefixes, arena = PrefixFiles(lambda: "model"), arena_of(100)
    prefixes.parks = True
    for tensor in arena.buffers.arrays:
        tensor[0, 0, :100, 0] = np.linspace(-1, 3, 100)
    write(prefixes, arena)
    restored = restored_slots(prefixes, stop=80)
    assert restored.length == 80
    assert restored.plain_length == 0
    for found, tensor in zip(restored.buffers.arrays, arena.buffers.arrays, strict=True):
        np.testing.assert_allclose(found[:, :, :80], tensor[:, :, :80], rtol=0, atol=0.51 * 3 / 127)
        np.testing.assert_allclose(found[:, :, :80, 1], 1.0, rtol=1e-6)


def test_messages_that_conversations_begin_with_are_read_in_advance(tiny_bundle: Path) -> None:
    beginning = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "in the"},
        {"role": "assistant", "content": "and of the"},
    ]
    with loaded(tiny_bundle) as engine:
        kept = engine.keep_prefix(beginning)
    with loaded(tiny_bundle) as engine:
        reply = engine.generate([*beginning, {"role": "user", "content": "there"}], max_tokens=4)
    assert reply.stats.reused_tokens == kept


def flipped(position: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        at = int(position * (len(content) - 1))
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return flip


DAMAGES = (
    *map(flipped, (0.0, 0.001, 0.01, 0.02, 0.3, 0.7, 0.9999, 1.0)),
    lambda content: content[: len(content) // 2],
    lambda content: content[:-1],
    lambda content: b"",
    lambda content: content + b"more",
    lambda content: os.urandom(2000),
    lambda content: redescribed(content, lambda about: b"[" * len(about)),
    lambda content: redescribed(content, lambda about: b"[]"),
    lambda content: redescribed(content, lambda about: b"{}"),
    lambda content: redescribed(content, lambda about: re.sub(rb": \d+}", b":1e999}", about.replace(b", ", b","))),
    lambda content: redescribed(content, lambda about: re.sub(rb": \d+}", b":-1}", about)),
)


def redescribed(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The content of a file with another description of the same length."""
    begin = content.index(b'{"format"')
    end = content.index(b"}", begin) + 1
    return content[:begin] + change(content[begin:end]).ljust(end - begin) + content[end:]


def test_damaged_files_are_computed_and_written_again(tiny_bundle: Path) -> None:
    with loaded(tiny_bundle) as engine:
        expected = asked(engine, "in the").text
    (file,) = files()
    good = file.read_bytes()
    for damage in DAMAGES:
        file.write_bytes(damage(good))
        with loaded(tiny_bundle) as engine:
            reply = asked(engine, "in the")
            engine.model.prefixes.wait()
            assert file.read_bytes() == good
        assert (reply.text, reply.stats.reused_tokens) == (expected, 0)
    with loaded(tiny_bundle) as engine:
        assert asked(engine, "in the").stats.reused_tokens >= 64


def test_files_of_another_model_format_or_build_are_not_used(
    tiny_bundle: Path, tiny_bundle_of: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny_bundle_of("llama", "int8")
    with loaded(other) as engine:
        expected = asked(engine, "in the").text
    (own,) = files()
    content = own.read_bytes()
    for model, kv, build in ((tiny_bundle, "float", None), (other, "int8", None), (other, "float", "another build")):
        with monkeypatch.context() as patch:
            if build is not None:
                patch.setattr(loaded_model, "RUNTIME_BUILD", build)
            with loaded(model, kv=kv) as engine:
                assert asked(engine, "in the").stats.reused_tokens == 0
    assert len({file.parent for file in files()}) == 4
    # A file that was copied to this model's folder says itself that it is not of this model.
    (foreign,) = [file for file in files() if file.stat().st_size == own.stat().st_size and file != own][:1]
    shutil.copy(foreign, own)
    with loaded(other) as engine:
        reply = asked(engine, "in the")
    assert (reply.text, reply.stats.reused_tokens) == (expected, 0)
    assert own.read_bytes() == content


def test_a_full_disk_loses_the_file_and_says_so_once(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    usage = shutil.disk_usage(tiny_bundle)
    with caplog.at_level(logging.WARNING, "edgerun"), loaded(tiny_bundle) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(prefix_files, "_write_prefix", failing)
            text = asked(engine, "in the").text
            engine.model.prefixes.wait()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
            assert asked(engine, "in the").text == text
            engine.model.prefixes.wait()
    assert caplog.messages == ["a prefix is not kept on disk: No space left on device"]
    assert not [path for path in prefix_folder().rglob("*") if path.is_file()]


def test_the_least_recently_used_files_of_all_models_make_room() -> None:
    size = 0
    kept: list[Path] = []
    for number in range(3):
        prefixes = PrefixFiles(lambda number=number: f"model {number}")  # type: ignore[misc]
        write(prefixes, arena_of(100))
        (new,) = set(files()) - set(kept)
        os.utime(new, (1000 + number, 1000 + number))
        kept.append(new)
        size = new.stat().st_size
    first = PrefixFiles(lambda: "model 0", 3 * size)
    assert restored_slots(first, 0, 120) is not None
    write(first, arena_of(100), 1, 101)
    assert sorted(files()) == sorted({*kept, *files()} - {kept[1]})
    assert len(files()) == 3
    # What can never fit removes nothing.
    write(PrefixFiles(lambda: "model 0", 100), arena_of(100), 2, 102)
    assert len(files()) == 3


def test_a_prefix_within_another_takes_no_file_unless_it_is_much_shorter() -> None:
    prefixes = PrefixFiles(lambda: "a model")
    write(prefixes, arena_of(400), 0, 400)
    for tokens, number in ((300, 1), (100, 2), (prefix_files.MIN_STORED - 1, 2)):
        write(prefixes, arena_of(400), 0, tokens)
        assert len(files()) == number
    # Few tokens of a long file are not worth reading it, and of two files that have them the shorter one is read.
    assert [prefixes.find(np.arange(shared))[0] for shared in (10, 60, 350)] == [0, 60, 350]
    assert prefixes.find(np.arange(60))[1].token_ids.size == 100  # type: ignore[union-attr]


def test_slots_are_restored_once_to_an_arena_with_room_for_the_whole_prompt() -> None:
    prefixes = PrefixFiles(lambda: "model")
    write(prefixes, arena_of(100))
    cache = PrefixCache(lambda: InPlaceArena(TENSOR_TYPES, 8192), 1 << 30, prefixes)
    arena = cache.take(range(4000))
    assert arena.length == 100
    assert isinstance(arena, InPlaceArena)
    assert arena.capacity == 4608
    cache.keep(arena, range(100))
    copied = cache.take([*range(60), *range(200, 5000)])
    assert copied.length == 60
    assert copied.capacity > 4860


def test_slots_of_another_graph_are_used_only_where_it_may_read_prompts() -> None:
    arena = arena_of(100, 2.0)
    arena.plain_length = 40  # a further graph computed the others
    either, plain = (PrefixFiles(lambda: "a model", plain_only=lambda only=only: only) for only in (False, True))
    write(either, arena)
    assert [prefixes.find(np.arange(100))[0] for prefixes in (either, plain)] == [100, 40]
    restored = restored_slots(plain)
    assert (restored.length, restored.plain_length) == (40, 40)
    written = files()[0].stat().st_ino
    write(plain, restored_and_computed := arena_of(100, 2.0))
    assert restored_and_computed.plain_length == 0  # no more plain slots than the file has: it stays
    assert files()[0].stat().st_ino == written
    computed = arena_of(100, 1.0)
    computed.plain_length = 100
    write(plain, computed)
    assert [prefixes.find(np.arange(100))[0] for prefixes in (either, plain)] == [100, 100]
    assert len(files()) == 1


def test_a_cache_that_is_being_written_is_copied_and_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Event()
    write = prefix_files._write_prefix

    def waiting(*arguments: object) -> None:
        begin.wait()
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(prefix_files, "_write_prefix", waiting)
    prefixes = PrefixFiles(lambda: "a model")
    memory = PrefixCache(lambda: arena_of(0), 1 << 20, prefixes)
    arena = arena_of(100, 5.0)
    memory.keep(arena, range(100), 100)
    taken = memory.take([*range(90), 7])
    assert taken is not arena
    taken.buffers.fill(0, 90, 3.0)
    begin.set()
    memory.wait()
    restored = restored_slots(prefixes)
    assert all((each == 5.0).all() for each in restored.snapshot())
    assert memory.take([*range(90), 7]) is arena


@pytest.fixture(scope="module")
def kills() -> Iterator[Callable[[Path, int], bool]]:
    with killing_server() as server:
        yield lambda root, step: server.steps("keep_prefix", root, 1, kill_at=step) is None


@needs_kills
def test_a_kill_at_any_step_leaves_a_whole_file_or_none(kills: Callable[[Path, int], bool], tmp_path: Path) -> None:
    steps = 0
    for step in count(1):
        root = tmp_path / str(step)
        root.mkdir()
        if not kills(root, step):
            break
        steps += 1
        keep_prefix(root, 2)
        names = [path.name for path in prefix_folder().rglob("*") if path.is_file()]
        assert all(name.endswith(".kv") and not name.startswith(".") for name in names)
        for value in (1, 2):
            restored = restored_slots(PrefixFiles(lambda: "a model"), value, value + 100)
            assert value == 1 if restored is None else all((each == value).all() for each in restored.snapshot())
    assert steps >= 5
