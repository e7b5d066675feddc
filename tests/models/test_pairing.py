"""Pairing drafts with targets: vocabularies and maps of token ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgerun
from edgerun import BundleError
from edgerun.models.bundle import open_bundle
from edgerun.models.find import bundled_folder
from edgerun.models.pairing import _read_map, find_draft, name_draft, pair

Change = Callable[[dict[str, Any]], Any]


def copied(bundle: Path, folder: Path, change: Change | None = None) -> Path:
    """Copy the bundle; with a changed tokenizer it gets no manifest."""
    shutil.copytree(bundle, folder)
    if change is not None:
        (folder / "edge.json").unlink()
        path = folder / "tokenizer.json"
        data = json.loads(path.read_text(encoding="utf-8"))
        change(data)
        path.write_text(json.dumps(data), encoding="utf-8")
    return folder


def swap(data: dict[str, Any], first: int, second: int) -> None:
    vocabulary = data["model"]["vocab"]
    names = {number: token for token, number in vocabulary.items()}
    vocabulary[names[first]], vocabulary[names[second]] = second, first


def refusal(target: Path, draft: Path) -> str:
    with pytest.raises(BundleError) as caught:
        pair(open_bundle(target), open_bundle(draft))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def as_older_programs_write_it(data: dict[str, Any]) -> None:
    data["model"]["merges"] = [" ".join(merge) for merge in data["model"]["merges"]]
    data["truncation"] = None
    data["added_tokens"].reverse()


def test_equal_tokens_match_also_in_different_files(tiny_bundle: Path, tmp_path: Path) -> None:
    draft = copied(tiny_bundle, tmp_path / "draft", as_older_programs_write_it)
    assert (draft / "tokenizer.json").read_bytes() != (tiny_bundle / "tokenizer.json").read_bytes()
    for folder in (draft, copied(tiny_bundle, tmp_path / "same")):
        found = pair(open_bundle(tiny_bundle), open_bundle(folder))
        assert (found.target_ids, found.token_count) == (None, 300)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda data: swap(data, 7, 8), "id 7 is 'a', not 't'"),
        (
            lambda data: data["added_tokens"].append({"id": 300, "content": "<x>"}),
            "its highest token id is 300, not 299",
        ),
        (lambda data: data["model"]["vocab"].update({"<x>": 299}), "id 299 is '<x>', not"),
        (lambda data: data["model"]["vocab"].update({"<x>": 7}), "id 7 is '<x>', not 't'"),
        (lambda data: data["model"]["merges"].reverse(), "its tokens are the same, but not its merges"),
        (lambda data: data["model"].pop("merges"), "its tokens are the same, but not its merges"),
        (
            lambda data: data.update(model={"type": "Unigram", "vocab": [["a", 0.0]]}, added_tokens=[]),
            "its highest token id is 0, not 299",
        ),
    ],
    ids=["order", "more", "another", "twice", "merge order", "no merges", "unigram"],
)
def test_another_vocabulary_is_refused(tiny_bundle: Path, tmp_path: Path, change: Change, difference: str) -> None:
    draft = copied(tiny_bundle, tmp_path / "draft", change)
    message = refusal(tiny_bundle, draft)
    assert message.startswith(f"the draft {draft} has another vocabulary than {tiny_bundle}: {difference}")
    assert message.endswith("; give a draft model made for this model, or --draft none")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("model"),
        lambda data: data.update(model=[]),
        lambda data: data["model"].update(vocab=5),
        lambda data: data["model"].update(vocab=[[]]),
        lambda data: data["model"].update(vocab={"a": "b"}),
        lambda data: data["model"].update(merges=[5]),
        lambda data: data.update(added_tokens=[{"id": 5}]),
        lambda data: data.update(added_tokens=[{"content": "x", "id": -5}]),
    ],
)
def test_unknown_vocabulary_formats_are_errors(tiny_bundle: Path, tmp_path: Path, change: Change) -> None:
    draft = copied(tiny_bundle, tmp_path / "draft", change)
    assert refusal(tiny_bundle, draft) == (
        f"{draft / 'tokenizer.json'} cannot be read: its vocabulary has an unknown format; "
        "restore it or export the model again"
    )


def test_a_draft_without_a_tokenizer_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    draft = copied(tiny_bundle, tmp_path / "draft", dict.copy)
    (draft / "tokenizer.json").unlink()
    expected = f"{draft} holds no tokenizer.json; put the model's tokenizer.json beside the graph"
    assert refusal(tiny_bundle, draft) == expected


def with_map(bundle: Path, folder: Path, ids: Any) -> Path:
    np.save(copied(bundle, folder) / "d2t.npy", ids, allow_pickle=True)
    return folder


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=50))
def test_maps_of_ids_and_of_offsets_are_the_same(tiny_bundle: Path, kept: set[int]) -> None:
    ids = np.array(sorted(kept))
    path = tiny_bundle.parent / "map.npy"
    np.save(path, ids)
    assert _read_map(path, offsets=False).tolist() == ids.tolist()
    np.save(path, ids - np.arange(ids.size))
    assert _read_map(path, offsets=True).tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([1.0]), "cannot be read: it does not hold a list of integers"),
        (np.array([[1]]), "cannot be read: it does not hold a list of integers"),
        (np.array([], np.int64), "cannot be read: it does not hold a list of integers"),
        (np.array([{"a": 1}]), "cannot be read: it is not an .npy file of numbers"),
        (np.array([1, 1]), "cannot be used: its token ids must be distinct and at least 0"),
        (np.array([1, -1]), "cannot be used: its token ids must be distinct and at least 0"),
        (np.array([1, 1 << 40]), "cannot be used: its token ids must be distinct and at least 0"),
    ],
)
def test_invalid_maps_are_errors(tiny_bundle: Path, tmp_path: Path, ids: Any, message: str) -> None:
    draft = with_map(tiny_bundle, tmp_path / "draft", ids)
    assert refusal(tiny_bundle, draft).startswith(f"{draft / 'd2t.npy'} {message}; ")


def test_a_truncated_map_is_an_error(tiny_bundle: Path, tmp_path: Path) -> None:
    draft = with_map(tiny_bundle, tmp_path / "draft", np.arange(100))
    path = draft / "d2t.npy"
    for size in (0, 5, 90, 300):
        path.write_bytes(path.read_bytes()[:size])
        assert "d2t.npy cannot be read: it is not an .npy file of numbers; " in refusal(tiny_bundle, draft)


def cut_to(count: int) -> Change:
    """Keep the first tokens only, and move the first of them to the end."""

    def change(data: dict[str, Any]) -> None:
        kept = {token: number for token, number in data["model"]["vocab"].items() if number < count}
        data["model"] = {"type": "BPE", "vocab": {token: (n - 1) % count for token, n in kept.items()}, "merges": []}
        data["added_tokens"] = []

    return change


def test_another_vocabulary_is_used_through_a_correct_map(tiny_bundle: Path, tmp_path: Path) -> None:
    draft = copied(tiny_bundle, tmp_path / "draft", cut_to(50))
    assert "has another vocabulary" in refusal(tiny_bundle, draft)
    correct = np.array([*range(1, 50), 0])
    np.save(draft / "d2t.npy", correct)
    found = pair(open_bundle(tiny_bundle), open_bundle(draft))
    assert (found.target_ids.dtype, found.target_ids.tolist()) == (np.int32, correct.tolist())
    assert found.token_count == 50

    np.save(draft / "d2t.npy", np.arange(50))
    assert "id 0, '<|system|>', is mapped to '<|end|>'; give" in refusal(tiny_bundle, draft)
    np.save(draft / "d2t.npy", correct[:-1])
    assert ": 49 and others of its ids are not in the map to the target's, which has 49; " in refusal(
        tiny_bundle, draft
    )
    np.save(draft / "d2t.npy", np.array([*correct[:-1], 5000]))
    assert "id 49, '<|end|>', is mapped to no token; " in refusal(tiny_bundle, draft)


def test_the_manifest_names_the_draft(tiny_bundle: Path, tmp_path: Path) -> None:
    target, draft = copied(tiny_bundle, tmp_path / "target"), copied(tiny_bundle, tmp_path / "small" / "draft")
    assert find_draft(open_bundle(target)) is None
    name_draft(target, draft)
    bundle = open_bundle(target)
    assert json.loads((target / "edge.json").read_text(encoding="utf-8"))["draft"] == {"path": "../small/draft"}
    for asked in ("auto", draft, str(draft / "model.onnx")):
        found = find_draft(bundle, asked)
        assert found.draft.folder.resolve() == draft
    assert find_draft(bundle, None) is None
    assert find_draft(bundle, "none") is None
    shutil.rmtree(draft)
    assert find_draft(bundle) is None
    with pytest.raises(BundleError, match=r"draft does not exist; give an \.onnx file or a model folder"):
        find_draft(bundle, draft)


def test_the_manifest_names_the_map_of_a_draft(tiny_bundle: Path, tmp_path: Path) -> None:
    target, draft = copied(tiny_bundle, tmp_path / "target"), with_map(tiny_bundle, tmp_path / "draft", np.arange(9))
    name_draft(target, draft)
    assert json.loads((target / "edge.json").read_text(encoding="utf-8"))["draft"] == {
        "path": "../draft",
        "d2t": "d2t.npy",
    }
    (draft / "d2t.npy").unlink()
    for asked in ("auto", draft):
        with pytest.raises(BundleError) as caught:
            find_draft(open_bundle(target), asked)
        assert str(caught.value) == f"{draft / 'd2t.npy'} is missing; copy the whole model folder"


def test_a_map_of_offsets_is_read(tiny_bundle: Path, tmp_path: Path) -> None:
    target, draft = copied(tiny_bundle, tmp_path / "target"), copied(tiny_bundle, tmp_path / "draft")
    np.save(draft / "eagle.npy", np.array([5, 5, 7]))
    manifest = json.loads((target / "edge.json").read_text(encoding="utf-8"))
    manifest["draft"] = {"path": "../draft", "d2t": "eagle.npy", "d2t_offsets": True}
    (target / "edge.json").write_text(json.dumps(manifest), encoding="utf-8")
    for asked in ("auto", draft):
        found = find_draft(open_bundle(target), asked)
        assert found.target_ids.tolist() == [5, 6, 9]


def test_a_bundle_with_a_draft_of_its_own_layers_runs_without_it(tiny_bundle: Path, tmp_path: Path) -> None:
    target = copied(tiny_bundle, tmp_path / "target")
    manifest = json.loads((target / "edge.json").read_text(encoding="utf-8"))
    manifest["draft"] = {"path": ".", "graph": "draft.onnx", "skips": ["1.attention"]}
    (target / "edge.json").write_text(json.dumps(manifest), encoding="utf-8")
    with edgerun.load(target) as engine, edgerun.load(tiny_bundle) as plain:
        assert engine.generate("ab", max_tokens=8).text == plain.generate("ab", max_tokens=8).text
        assert engine.model.drafters.draft_model() is None


def test_a_draft_with_another_vocabulary_is_not_named(tiny_bundle: Path, tmp_path: Path) -> None:
    target = copied(tiny_bundle, tmp_path / "target")
    draft = copied(tiny_bundle, tmp_path / "draft", lambda data: swap(data, 7, 8))
    before = (target / "edge.json").read_bytes()
    with pytest.raises(BundleError, match="another vocabulary"):
        name_draft(target, draft)
    assert (target / "edge.json").read_bytes() == before
    with pytest.raises(BundleError, match=r"draft has no edge\.json; export the model again"):
        name_draft(draft, target)


def test_the_bundled_model_has_its_draft() -> None:
    found = find_draft(open_bundle(bundled_folder()))
    assert (found.draft.folder, found.target_ids) == (bundled_folder().resolve() / "draft", None)
