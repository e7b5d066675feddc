"""Models of a service: ids, loading on demand by several threads, unloading, and the memory budget."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun.edge.service.model_pool import ModelPool
from edgerun.edge.service.request_error import ErrorCode, RequestError
from edgerun.errors import CancelledError
from edgerun.models.progress import Progress
from edgerun.runtime.scheduling.idle_thread import IdleThread
from edgerun.runtime.scheduling.request_run import Cancellation
from support.commands import Patch
from support.hub_server import files_of, own_hub
from support.nightly import some_nightly
from support.waiting import wait_until

LIMIT_S = 120.0
NAMES = ("a", "b", "c", "d")
PLAIN = edgerun.GenerateOptions(max_tokens=6, speculation=edgerun.Speculation.OFF)
"""Without speculation a new model is not measured before its first answer."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path) -> Path:
    """A folder with the same model four times."""
    folder = tmp_path_factory.mktemp("pool")
    for name in NAMES:
        shutil.copytree(tiny_bundle, folder / name)
    return folder


class Opener:
    """Loads real models, counts the loads, and can be made to wait or fail."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.fail = False
        self.engines: list[edgerun.Engine] = []

    def __call__(self, source: str, progress: Progress) -> edgerun.Engine:
        self.opened.append(Path(source).name)
        assert self.go_on.wait(LIMIT_S)
        progress("reading", 0.5)
        if self.fail:
            raise edgerun.BundleError("the model is damaged")
        engine = edgerun.load(source, draft=None, cache=False, prefix_cache=0, progress=progress)
        self.engines.append(engine)
        return engine

    def is_closed(self, number: int) -> bool:
        """Whether the engine of a load was closed."""
        try:
            self.engines[number].generate("a", PLAIN)
        except edgerun.EdgeError as error:
            return "closed" in str(error)
        return False


def bytes_of(folder: Path) -> int:
    return (folder / "model.onnx").stat().st_size + (folder / "model.onnx.data").stat().st_size


def paths(models: Path, names: Sequence[str] = NAMES) -> list[str]:
    return [str(models / name) for name in names]


def in_memory(pool: ModelPool) -> list[str]:
    return [status.id for status in pool.status()]


@contextmanager
def used_elsewhere(pool: ModelPool, name: str) -> Iterator[None]:
    """Use a model in another thread for the length of the block."""
    begun, end = threading.Event(), threading.Event()

    def use() -> None:
        with pool.use(name):
            begun.set()
            assert end.wait(LIMIT_S)

    thread = threading.Thread(target=use)
    thread.start()
    assert begun.wait(LIMIT_S)
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_models_are_named_by_their_folders(models: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    shutil.copytree(models / "a", tmp_path / "a")
    twice = [str(models / "a"), str(tmp_path / "a"), str(models / "b" / "model.onnx"), f"{models / 'c'}:fp32"]
    with ModelPool([*twice, twice[2]], Opener()) as pool:
        assert [entry.id for entry in pool.offered.entries()] == [twice[0], twice[1], "b", "c:fp32"]
        assert pool.offered.find(None).id == twice[0]
        assert pool.offered.find("b").source == pool.offered.find(twice[2]).source == twice[2]
        assert pool.offered.find("c").id == "c:fp32"
        for name, said in (("a", "'a' names 2 models"), ("x", "there is no model 'x'; models are: .*, b, c:fp32")):
            with pytest.raises(RequestError, match=said) as caught:
                pool.offered.find(name)
            assert (caught.value.code, caught.value.param) == (ErrorCode.MODEL_NOT_FOUND, "model")
        assert in_memory(pool) == []
    monkeypatch.chdir(models)
    with ModelPool([f".{os.sep}a"], Opener()) as pool:
        assert [entry.id for entry in pool.offered.entries()] == ["a"]
        assert pool.load(f".{os.sep}a").id == "a"
    with pytest.raises(edgerun.BundleError, match="does not exist"):
        ModelPool([str(tmp_path / "none")], Opener())


def test_models_of_this_machine_and_of_the_hub_are_offered(
    tmp_path: Path, tiny_bundle: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("EDGERUN_HOME", str(tmp_path / "home"))
    with own_hub(tmp_path / "hf") as hub, ModelPool([], Opener()) as pool, ModelPool(["org/tiny"], Opener()) as named:
        hub.repo("org/tiny", files_of(tiny_bundle))
        assert [entry.id for entry in pool.offered.entries()] == ["shell-helper"]
        assert pool.offered.find(None).id == "shell-helper"
        # A hub id is downloaded when it is first used.
        assert [entry.id for entry in named.offered.entries()] == ["org/tiny"]
        assert hub.seen == []
        assert named.load("org/tiny").bytes == bytes_of(tiny_bundle)
        assert hub.seen
        assert [(entry.id, entry.owner) for entry in pool.offered.entries()] == [
            ("shell-helper", "edge-run"),
            ("org/tiny", "org"),
        ]
        with pool.use("org/tiny") as engine:
            assert engine.generate("ab", max_tokens=2).stats.completion_tokens == 2


def test_threads_that_ask_at_the_same_time_wait_for_one_load(models: Path) -> None:
    opener = Opener()
    opener.go_on.clear()
    stages: list[tuple[str, float]] = []
    with ModelPool(paths(models), opener) as pool, ThreadPoolExecutor(8) as threads:

        def answer(_: int) -> str:
            with pool.use("a", lambda *stage: stages.append(stage)) as engine:
                return engine.generate("ab", PLAIN).text

        answers = [threads.submit(answer, number) for number in range(8)]
        wait_until(lambda: pool.status()[0].users == 8 if pool.status() else False)
        assert not pool.status()[0].loaded
        opener.go_on.set()
        assert len({each.result(LIMIT_S) for each in answers}) == 1
        assert opener.opened == ["a"]
        assert stages.count(("reading", 0.5)) == 8
        (status,) = pool.status()
        assert (status.id, status.loaded, status.users) == ("a", True, 0)
        assert status.bytes == bytes_of(models / "a")
        assert status.load_s > 0
    assert opener.is_closed(0)


def test_progress_of_an_answer_goes_to_its_own_reader(models: Path) -> None:
    with ModelPool(paths(models), lambda path, progress: edgerun.load(path, cache=False, progress=progress)) as pool:
        pool.load("a")
        mine: list[str] = []
        others: list[str] = []
        with used_elsewhere(pool, "a"), pool.use("a", lambda stage, _: mine.append(stage)) as engine:
            engine.generate("ab " * 30, max_tokens=2)
        with pool.use("a", lambda stage, _: others.append(stage)):
            pass
        assert mine
        assert others == []


def test_a_failed_load_raises_for_all_and_is_tried_again(models: Path) -> None:
    opener = Opener()
    opener.go_on.clear()
    opener.fail = True
    with ModelPool(paths(models), opener) as pool, ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(pool.load, "a") for _ in range(3)]
        wait_until(lambda: bool(pool.status()) and pool.status()[0].users == 3)
        opener.go_on.set()
        for each in waiting:
            with pytest.raises(edgerun.BundleError, match="the model is damaged"):
                each.result(LIMIT_S)
        assert opener.opened == ["a"]
        assert in_memory(pool) == []
        opener.fail = False
        assert pool.load("a").loaded
        assert opener.opened == ["a", "a"]


def test_waiting_can_be_cancelled_and_a_load_nobody_waits_for_ends(models: Path) -> None:
    opener = Opener()
    opener.go_on.clear()
    with ModelPool(paths(models), opener) as pool, ThreadPoolExecutor(2) as threads:
        first, second = Cancellation(), Cancellation()
        loads = [threads.submit(pool.load, "a", cancellation=each) for each in (first, second)]
        wait_until(lambda: bool(pool.status()) and pool.status()[0].users == 2)
        first.cancel()
        with pytest.raises(CancelledError):
            loads[0].result(LIMIT_S)
        assert not loads[1].done()
        second.cancel()
        with pytest.raises(CancelledError):
            loads[1].result(LIMIT_S)
        opener.go_on.set()
        wait_until(lambda: in_memory(pool) == [])
        assert opener.engines == []
        with pytest.raises(CancelledError):
            pool.load("a", cancellation=first)

        # A request that comes while an abandoned load ends gets a load of its own.
        opener.go_on.clear()
        third, begun = Cancellation(), len(opener.opened)
        abandoned = threads.submit(pool.load, "b", cancellation=third)
        wait_until(lambda: len(opener.opened) > begun)
        third.cancel()
        with pytest.raises(CancelledError):
            abandoned.result(LIMIT_S)
        late = threads.submit(pool.load, "b")
        wait_until(lambda: pool.status()[0].users == 1)
        opener.go_on.set()
        assert late.result(LIMIT_S).loaded


def test_unused_models_are_unloaded_after_a_while(models: Path) -> None:
    before = threading.enumerate()  # pools of other tests may have some

    def started() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each not in before and each.name == "edge-run models"]

    opener = Opener()
    with ModelPool(paths(models), opener, idle_s=0.02) as pool:
        with pool.use("a"):
            pool.load("b")
            wait_until(lambda: in_memory(pool) == ["a"])
        wait_until(lambda: in_memory(pool) == [])
        assert opener.is_closed(0)
        assert opener.is_closed(1)
        assert pool.load("a").loaded
        wait_until(lambda: len(started()) == 1)  # the thread that loaded it may still be ending
    assert not started()


def test_a_model_in_use_is_not_unloaded(models: Path) -> None:
    with ModelPool(paths(models), Opener()) as pool:
        assert not pool.unload("a")
        with used_elsewhere(pool, "a"):
            with pytest.raises(RequestError, match="a is in use by a request or session; cancel or close") as caught:
                pool.unload("a")
            assert caught.value.code is ErrorCode.BUSY
            with pool.use("a"), pytest.raises(RequestError, match="a is in use by 2 requests or sessions"):
                pool.unload("a")
        assert pool.unload("a")
        assert not pool.unload("a")
        with pytest.raises(RequestError, match="there is no model 'x'"):
            pool.unload("x")


@pytest.mark.parametrize("reason", ["asked for", "unused", "room", "abandoned"])
def test_no_other_model_waits_for_one_that_closes(models: Path, reason: str) -> None:
    """Closing waits for a step of the engine's work in the background."""
    opener = Opener()
    begun, go_on = threading.Event(), threading.Event()

    def work(_: Progress) -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)

    def open_busy(source: str, progress: Progress) -> edgerun.Engine:
        engine = opener(source, progress)
        if engine is opener.engines[0]:
            engine.model.prefill_choice._background = IdleThread(engine.model.queue, work, "step")  # type: ignore[misc]
            engine.model.prefill_choice._background.start()
            assert begun.wait(LIMIT_S)
            if reason == "abandoned":
                token.cancel()
                wait_until(lambda: not pool.status()[0].users)
        return engine

    token = Cancellation()
    options: dict[str, Any] = {"unused": {"idle_s": 0.02}, "room": {"max_bytes": 2 * bytes_of(models / "a")}}.get(
        reason, {}
    )
    with ModelPool(paths(models), open_busy, **options) as pool, ThreadPoolExecutor(4) as threads:
        try:
            loading = threads.submit(pool.load, "a", cancellation=token)
            assert begun.wait(LIMIT_S)
            if reason != "abandoned":
                assert loading.result(LIMIT_S).loaded
            with used_elsewhere(pool, "b"):
                if reason == "asked for":
                    threads.submit(pool.unload, "a")
                elif reason == "room":
                    threads.submit(pool.load, "c")
                wait_until(lambda: opener.engines[0].model.queue._closed)
                assert threads.submit(pool.load, "b").result(LIMIT_S).loaded
                again = threads.submit(pool.load, "a")
                assert [status.id for status in pool.status() if status.loaded] == ["b"]
                assert not again.done()
                go_on.set()
                assert again.result(LIMIT_S).loaded
        finally:
            go_on.set()


def test_a_model_whose_end_fails_takes_no_room(models: Path, monkeypatch: Patch) -> None:
    opener = Opener()
    token = Cancellation()

    def fail() -> None:
        raise edgerun.EdgeError("it cannot be closed")

    def open_abandoned(source: str, progress: Progress) -> edgerun.Engine:
        engine = opener(source, progress)
        if len(opener.engines) == 2:
            monkeypatch.setattr(engine, "close", fail)
            token.cancel()
            wait_until(lambda: not any(status.users for status in pool.status()))
        return engine

    def crashed(_: threading.ExceptHookArgs) -> None:
        """The thread that loads has nobody to tell."""

    monkeypatch.setattr(threading, "excepthook", crashed)
    with (
        ThreadPoolExecutor(1) as threads,
        ModelPool(paths(models), open_abandoned, max_bytes=bytes_of(models / "a")) as pool,
    ):
        pool.load("a")
        monkeypatch.setattr(opener.engines[0], "close", fail)
        with pytest.raises(edgerun.EdgeError, match="it cannot be closed"):
            pool.unload("a")
        with pytest.raises(CancelledError):
            threads.submit(pool.load, "b", cancellation=token).result(LIMIT_S)
        wait_until(lambda: not pool.status())
        assert threads.submit(pool.load, "b").result(LIMIT_S).loaded
        monkeypatch.undo()
    for engine in opener.engines:
        engine.close()


def test_a_load_waits_for_requests_and_not_for_sessions(models: Path) -> None:
    with (
        ModelPool(paths(models), Opener(), max_bytes=bytes_of(models / "a")) as pool,
        ThreadPoolExecutor(1) as threads,
    ):
        with used_elsewhere(pool, "a"):
            waiting = threads.submit(pool.load, "b")
            wait_until(lambda: len(pool.status()) == 2)
            assert not waiting.done()
        assert waiting.result(LIMIT_S).loaded
        assert in_memory(pool) == ["b"]
        with (
            pool.use("b", kept=True),
            pytest.raises(RequestError, match=r"of which open sessions hold b \(\d+ kB\)") as caught,
        ):
            pool.load("a")
        assert caught.value.code is ErrorCode.BUSY
        assert pool.load("a").loaded
    opener = Opener()
    with ModelPool(paths(models), opener, max_bytes=1000) as pool:
        with pytest.raises(RequestError, match=r"a takes \d+ kB of memory, and models may take 1 kB; choose a smaller"):
            pool.load("a")
        assert opener.opened == []
        assert pool.status() == ()


def test_closing_ends_answers_waiting_and_loading(models: Path) -> None:
    opener = Opener()
    pool = ModelPool(paths(models), opener)
    with ThreadPoolExecutor(3) as threads:
        begun = threading.Event()

        def answer() -> edgerun.FinishReason | None:
            reason = None
            with pool.use("a") as engine:
                for chunk in engine.stream("ab", ignore_eos=True):
                    begun.set()
                    reason = chunk.finish_reason
            return reason

        running: Future[edgerun.FinishReason | None] = threads.submit(answer)
        assert begun.wait(LIMIT_S)
        opener.go_on.clear()
        loading = threads.submit(pool.load, "b")
        wait_until(lambda: "b" in opener.opened)
        closing = threads.submit(pool.close)
        with pytest.raises(RequestError, match="the program is ending"):
            loading.result(LIMIT_S)
        opener.go_on.set()
        closing.result(LIMIT_S)
        running.result(LIMIT_S)
    pool.close()
    with pytest.raises(RequestError, match="the program is ending"):
        pool.load("a")
    assert len(opener.engines) == 1
    assert opener.is_closed(0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["use", "hold", "drop", "unload"]), st.sampled_from(NAMES)), min_size=4, max_size=12
)


def check_unloading_order(models: Path, steps: list[tuple[str, str]], room: int) -> None:
    """Take steps, and compare what is in memory with a model of it: a list, the least recently used first."""
    expected: list[str] = []
    held: dict[str, ExitStack] = {}
    opener = Opener()

    def expect_use(name: str) -> None:
        if name in expected:
            expected.remove(name)
        while len(expected) >= room:
            expected.remove(next(other for other in expected if other not in held))
        expected.append(name)

    with ModelPool(paths(models), opener, max_bytes=room * bytes_of(models / "a")) as pool, ExitStack() as all_held:
        for action, name in steps:
            others = [other for other in held if other != name]
            if action == "use" and (name in expected or len(others) < room):
                pool.load(name)
                expect_use(name)
            elif action == "hold" and name not in held and (name in expected or len(held) < room):
                held[name] = all_held.enter_context(ExitStack())
                expect_use(name)
                held[name].enter_context(pool.use(name, kept=True))
            elif action == "drop" and name in held:
                held.pop(name).close()
                expected.remove(name)
                expected.append(name)
            elif action == "unload" and name not in held:
                assert pool.unload(name) == (name in expected)
                if name in expected:
                    expected.remove(name)
            assert in_memory(pool) == expected
        assert [number for number in range(len(opener.engines)) if not opener.is_closed(number)] == sorted(
            len(opener.opened) - 1 - opener.opened[::-1].index(name) for name in expected
        )


@pytest.mark.parametrize("examples", [6, pytest.param(150, marks=pytest.mark.nightly)])
def test_the_least_recently_used_model_is_unloaded_first(models: Path, examples: int) -> None:
    @settings(max_examples=examples)
    @given(STEPS, st.integers(1, 3))
    def check(steps: list[tuple[str, str]], room: int) -> None:
        check_unloading_order(models, steps, room)

    check()


@pytest.mark.parametrize("seed", some_nightly(range(6), 6))
def test_threads_that_load_use_cancel_and_unload_disturb_nobody(models: Path, seed: int) -> None:
    import random

    expected = edgerun.load(models / "a", draft=None, cache=False).generate("ab", PLAIN).text
    budget = 2 * bytes_of(models / "a")
    with ModelPool(paths(models), Opener(), max_bytes=budget, idle_s=0.01) as pool, ThreadPoolExecutor(4) as threads:

        def work(worker: int) -> int:
            random_ = random.Random(f"{seed} {worker}")
            answered = 0
            for _ in range(8):
                token = Cancellation()
                name = random_.choice(NAMES)
                timer = threading.Timer(random_.random() * 0.05, token.cancel)
                if random_.random() < 0.3:
                    timer.start()
                try:
                    with pool.use(name, cancellation=token) as engine:
                        assert sum(status.bytes for status in pool.status()) <= budget
                        assert engine.generate("ab", PLAIN).text == expected
                        answered += 1
                    if random_.random() < 0.3:
                        pool.unload(name)
                except CancelledError:
                    assert token.cancelled
                except RequestError as error:
                    if error.code is not ErrorCode.BUSY:
                        raise
                finally:
                    timer.cancel()
            return answered

        assert sum(threads.map(work, range(4))) > 0
        wait_until(lambda: in_memory(pool) == [])
