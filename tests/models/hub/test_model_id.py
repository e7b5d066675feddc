"""Ids of models on the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun import BundleError, InputError
from edgerun.models.find import find_model, is_on_hub
from edgerun.models.hub.downloaded_model import HubId, looks_like_hub_id, parse_hub_id


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("org/name", HubId("org/name")),
        ("onnx-community/Qwen2.5-0.5B-Instruct:q4", HubId("onnx-community/Qwen2.5-0.5B-Instruct", "q4")),
        ("a/b@v1.0", HubId("a/b", None, "v1.0")),
        ("a/b:cpu_and_mobile/cpu-int4@refs/pr/3", HubId("a/b", "cpu_and_mobile/cpu-int4", "refs/pr/3")),
        ("a/b:Q4_K_M@0123456789abcdef", HubId("a/b", "Q4_K_M", "0123456789abcdef")),
    ],
)
def test_ids_are_split_into_their_parts(name: str, parts: HubId) -> None:
    assert looks_like_hub_id(name)
    assert parse_hub_id(name) == parts
    assert str(parts) == name


@pytest.mark.parametrize(
    "name",
    [
        "model",
        "a/b/c",
        "./a",
        "../a/b",
        "/a/b",
        "~/a",
        "a/model.onnx",
        "a/w.gguf",
        "a\\b",
        "C:/a",
        "a b/c",
        "",
        "a/",
        "/a",
    ],
)
def test_paths_are_not_ids(name: str) -> None:
    assert not looks_like_hub_id(name)


@pytest.mark.parametrize("name", ["org/a--b", "org/..", "org/name.", "-org/x", "a/b.git", "a/" + "x" * 200, "org"])
def test_invalid_ids_are_errors(name: str) -> None:
    with pytest.raises(InputError, match="is not an id of a model on the Hugging Face Hub; write org/name"):
        parse_hub_id(name)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("a/b:", "variant"),
        ("a/b:/q4", "variant"),
        ("a/b:x/../y", "variant"),
        ("a/b@", "revision"),
        ("a/b:q4@", "revision"),
        ("a/b@../x", "revision"),
        ("a/b@a b", "revision"),
    ],
)
def test_invalid_variants_and_revisions_are_errors(name: str, part: str) -> None:
    with pytest.raises(InputError, match=f"the {part} in .* is not valid; write org/name"):
        parse_hub_id(name)


def test_a_path_is_not_sent_to_the_hub_also_if_it_is_mistyped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_on_hub("org/name")
    assert not is_on_hub(Path("org/name"))
    os.makedirs("org/name")
    assert not is_on_hub("org/name")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    os.makedirs("exports")
    assert not is_on_hub("exports/my-model")
    message = "^exports/my-model does not exist; .* for a model on the hub: edge-run pull exports/my-model$"
    with pytest.raises(BundleError, match=message):
        find_model("exports/my-model")


@given(st.text(alphabet="ab/:@.-_~\\ C\0", max_size=20))
def test_any_text_is_a_path_an_id_or_an_error_of_one_line(text: str) -> None:
    if looks_like_hub_id(text):
        try:
            assert str(parse_hub_id(text)) == text
        except InputError as error:
            assert error.hint.startswith("write org/name")  # noqa: PT017  the other outcome is checked too
