"""Names in the store of downloaded models: short enough for Windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgerun.edge.cli.main import main
from edgerun.models.bundle import digest_file
from edgerun.models.hub.local_store import Listing, RepoFile, Store, models_root, short_name, stores

ORG, NAME = "o" * 96, "n" * 96
REPO = f"{ORG}/{NAME}"
COMMIT = "0123456789" * 4
SOURCE = f"{'folder/' * 20}{'model' * 20}.onnx"
REVISION = "refs/" + "r" * 200
FILE = "f" * 64
LONGEST_PATH = 259
USUAL_PREFIX = len("C:\\Users\\" + 20 * "u" + "\\.cache\\huggingface\\assets\\edge-run\\models\\")
HIDDEN = len(".") + len(".0123456789ab.new")
"""What the hidden name of a folder that is being written is longer than its name."""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_ASSETS_CACHE", str(tmp_path))
    return models_root()


def store_model(repo: str = REPO, commit: str = COMMIT, source: str = SOURCE) -> Path:
    """Store a model of one file, and return its folder."""
    store = Store(repo)
    store.save_listing(Listing(repo, commit, {FILE: RepoFile(FILE, 4, None, COMMIT)}), REVISION)
    with store.locked():
        partial = store.partial(RepoFile(FILE * 4, 4, None, None))
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(b"file")
        return store.assemble(commit, source, "q4", {FILE: (partial, digest_file(partial))}).folder


def test_paths_of_the_longest_names_are_short_enough_for_windows(root: Path) -> None:
    folder = store_model()
    paths = [path.relative_to(root) for path in root.rglob("*")]
    assert max(len(str(path)) for path in paths) == len(str(folder.relative_to(root) / FILE))
    assert USUAL_PREFIX + len(str(folder.relative_to(root) / FILE)) + HIDDEN <= LONGEST_PATH
    partial = Store(REPO).partial(RepoFile(FILE, 4, "0" * 64, None))
    assert USUAL_PREFIX + len(str(partial.relative_to(root))) <= LONGEST_PATH


def test_what_was_stored_under_short_names_is_found(root: Path) -> None:
    folder = store_model()
    store = Store(REPO)
    found = store.downloaded(COMMIT, SOURCE)
    assert (found.folder, found.repo, found.commit) == (folder, REPO, COMMIT)
    assert store.commit_of(REVISION) == COMMIT
    assert (listing := store.listing(COMMIT)) is not None
    assert listing.files.keys() == {FILE}
    assert [each.repo for each in stores()] == [REPO]
    assert store.all_downloaded() == [found]
    assert Store(f"{ORG}/{NAME[:-1]}").downloaded(COMMIT, SOURCE) is None
    assert store.downloaded(COMMIT, SOURCE.replace("model", "other")) is None
    store.remove()
    assert list(root.iterdir()) == []
    assert stores() == []


def test_names_are_shortened_only_where_they_are_too_long() -> None:
    assert short_name("onnx--model_q4", 32) == "onnx--model_q4"
    shortened = [short_name(f"onnx--model_{'q' * 40}{number}", 32) for number in range(2)]
    assert [len(name) for name in shortened] == [32, 32]
    assert len(set(shortened)) == 2


def test_a_model_with_a_long_name_is_listed_and_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_model()
    assert main(["models", "--json"]) == 0
    listed = [model for model in json.loads(capsys.readouterr().out)["models"] if model["commit"]]
    assert [(model["id"], model["variant"]) for model in listed] == [(REPO, "q4")]
    assert main(["models", "--remove", REPO]) == 0
    assert list(root.iterdir()) == []
