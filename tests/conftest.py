"""Fixtures that several rooms share: a cache folder of the tests' own, and tiny models exported once."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, find, settings
from hypothesis.strategies import booleans

import edgerun  # noqa: F401  before tests import ONNX Runtime, so that it sends no telemetry
from support.foreign_exporters import ForeignExports
from support.nightly import NEW_EXAMPLES, examples
from support.processes import share_machine

# Examples are not timed, since other programs may be running. They are the same ones every time, so no change fails
# for what it did not touch; with EDGERUN_NEW_EXAMPLES property tests look for new ones, and for three times as many.
settings.register_profile("new", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("new"), derandomize=True, max_examples=examples(100))
settings.load_profile("new" if NEW_EXAMPLES else "same")

# A process started in the background of a script ignores Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files in use cannot be removed or replaced then, as on Windows.
pytest_plugins = ["support.windows_files"] if os.environ.get("EDGERUN_WINDOWS_FILES") else []

# Only the tests' own processes warn of default encodings: programs that tests start would warn of other packages'.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("PYTHONWARNDEFAULTENCODING", None)

# Workers and processes import the same modules, which each would compile if the first did not keep their bytecode.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Inherited by workers, which share the processors: two threads take twice the processor time for tiny matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

os.environ["TERM"] = "dumb"
os.environ["COLUMNS"] = "110"
share_machine()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than processors: a quarter of the time, a worker waits for a process, a server or a browser."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    """No garbage is looked for among half a million objects of modules and tests, which stay until the end."""
    # hypothesis looks once for what refers to its random numbers, among objects that are not frozen.
    find(booleans(), bool)
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test reads or writes the user's cache, or the user's conversations."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGERUN_CACHE", str(folder))
        patch.setenv("HF_HOME", str(folder / "hugging-face"))
        patch.setenv("EDGERUN_HOME", str(folder / "home"))
        yield folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of one test, which does not exist yet."""
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 300 tokens and a context of 256, float32, with a chat template."""
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    return tiny.write_bundle(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def long_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a context of 4096 tokens."""
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    return tiny.write_bundle(tmp_path_factory.mktemp("long"), max_position_embeddings=4096)


@pytest.fixture(scope="session")
def endless_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context of 30,000 tokens that never ends an answer by itself."""
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    return tiny.write_endless_bundle(tmp_path_factory.mktemp("endless"))


@pytest.fixture(scope="session")
def foreign_exports(tmp_path_factory: pytest.TempPathFactory) -> ForeignExports:
    """Models as other tools export them; asking for a tool that is not at hand skips the test."""
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    folder = tmp_path_factory.mktemp("foreign")
    return ForeignExports(folder, tiny.write_checkpoint(folder / "tokenizer"))
