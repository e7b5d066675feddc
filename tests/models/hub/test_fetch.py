"""Downloading models from a server that answers like the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="needs the export extra")

import onnx
from huggingface_hub import hf_hub_download
from huggingface_hub.utils import are_progress_bars_disabled
from onnx import TensorProto, helper

import edgerun
from edgerun import BundleError, EdgeError, HubError, InputError
from edgerun.errors import CancelledError
from edgerun.models.bundle import open_bundle
from edgerun.models.find import find_model
from edgerun.models.hub.client import list_repository, search_models
from edgerun.models.hub.downloaded_model import HubId, is_safe_path, parse_hub_id
from edgerun.models.hub.fetch import fetch_checkpoint, fetch_model
from edgerun.models.hub.local_store import Store, models_root, stores
from edgerun.models.manifest import DeviceKind
from support.hub_server import HubServer, files_of, own_hub, sha256
from support.unusual_files import needs_links
from support.waiting import wait_until

TEXTS = {"config.json": b"{}", "tokenizer.json": b'{"version": "1.0"}', "README.md": b"# a model"}


def graph(data: str | None = None, fill: int = 1, size: int = 3000) -> bytes:
    """A small ONNX file whose weights lie in a file called `data`, if one is given."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[size])
    if data is None:
        tensor.raw_data = bytes([fill]) * 4 * size
    else:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=data)
    made = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [], [tensor])
    return bytes(helper.make_model(made).SerializeToString())


def weights(fill: int) -> bytes:
    return bytes([fill]) * 12000


TRANSFORMERS_JS: Mapping[str, bytes] = {
    **TEXTS,
    "onnx/model.onnx": graph("model.onnx_data", 1),
    "onnx/model.onnx_data": weights(1),
    "onnx/model_q4.onnx": graph("model_q4.onnx_data", 2),
    "onnx/model_q4.onnx_data": weights(2),
    "onnx/model_q4f16.onnx": graph(None, 3),
    "pytorch_model.bin": b"pickles",
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with own_hub(tmp_path / "hf") as server:
        server.repo("org/js", TRANSFORMERS_JS)
        yield server


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {"hub.json"}


def test_only_the_files_of_one_graph_are_downloaded(hub: HubServer) -> None:
    repo = hub.repos["org/js"]
    found = fetch_model(HubId("org/js"))
    assert (found.id, found.commit) == ("org/js:q4", repo.refs["main"])
    assert names(found.folder) == {"config.json", "tokenizer.json", "model_q4.onnx", "model_q4.onnx_data"}
    assert sorted(hub.bodies()) == ["config.json", "onnx/model_q4.onnx", "onnx/model_q4.onnx_data", "tokenizer.json"]
    assert (found.folder / "model_q4.onnx_data").read_bytes() == weights(2)
    assert open_bundle(found.path).graph == found.folder / "model_q4.onnx"
    for path in found.folder.iterdir():
        assert not path.is_symlink()
        assert path.stat().st_nlink == 1
    assert onnx.load(str(found.folder / "model_q4.onnx")).graph.initializer[0].raw_data == weights(2)
    assert {seen.path.split("/")[1] for seen in hub.seen} == {"api", "org", "cdn"}
    assert [seen.path for seen in hub.seen if seen.path.startswith("/api")] == ["/api/models/org/js"]
    assert {seen.method for seen in hub.seen} == {"GET"}


def test_the_embedding_and_the_tower_of_a_multimodal_model_come_along(hub: HubServer) -> None:
    """Its encoder of sound does not."""
    parts = {
        f"onnx/{part}_q4.onnx{suffix}": graph(f"{part}_q4.onnx_data") if not suffix else weights(1)
        for part in ("decoder_model_merged", "embed_tokens", "vision_encoder", "audio_encoder")
        for suffix in ("", "_data")
    }
    hub.repo("org/parts", {**TEXTS, **parts})
    found = fetch_model(HubId("org/parts"))
    expected = {name.removeprefix("onnx/") for name in parts if "audio" not in name}
    assert names(found.folder) == {"config.json", "tokenizer.json", *expected}
    bundle = open_bundle(found.path)
    assert bundle.graph == found.folder / "decoder_model_merged_q4.onnx"
    assert bundle.embedding == found.folder / "embed_tokens_q4.onnx"


def test_a_downloaded_model_is_used_without_a_request(hub: HubServer) -> None:
    path = find_model("org/js:q4")
    hub.seen.clear()
    assert find_model("org/js:q4") == find_model("org/js") == find_model("org/js:onnx/model_q4.onnx") == path
    assert find_model("org/js@main") == path
    assert hub.seen == []


def test_the_device_decides_which_variant_is_downloaded_but_not_which_is_opened(hub: HubServer) -> None:
    assert fetch_model(HubId("org/js"), DeviceKind.GPU).variant == "q4f16"
    assert fetch_model(HubId("org/js"), DeviceKind.CPU).variant == "q4f16"
    assert fetch_model(HubId("org/js"), DeviceKind.CPU, newest=True).variant == "q4"
    assert fetch_model(HubId("org/js"), DeviceKind.CPU).variant == "q4"


def test_of_a_new_commit_only_changed_files_are_downloaded(hub: HubServer) -> None:
    repo = hub.repos["org/js"]
    first = fetch_model(HubId("org/js"))
    second = repo.put({**TRANSFORMERS_JS, "config.json": b'{"new": 1}'})
    assert fetch_model(HubId("org/js")).commit == first.commit
    hub.seen.clear()
    newest = fetch_model(HubId("org/js"), newest=True)
    assert newest.commit == second
    assert "onnx/model_q4.onnx_data" not in hub.bodies()
    assert (newest.folder / "config.json").read_bytes() == b'{"new": 1}'
    assert fetch_model(HubId("org/js")).commit == second
    assert fetch_model(HubId("org/js", None, first.commit)) == first


def test_revisions(hub: HubServer) -> None:
    repo = hub.repos["org/js"]
    old = repo.put({**TRANSFORMERS_JS, "config.json": b'{"old": 1}'}, "v1/x")
    assert fetch_model(parse_hub_id("org/js@v1/x")).commit == old
    assert fetch_model(parse_hub_id(f"org/js@{old}")).commit == old
    assert fetch_model(parse_hub_id("org/js")).commit == repo.refs["main"] != old
    with pytest.raises(InputError, match=r"^org/js has no revision v9; leave @v9 out for the newest$"):
        fetch_model(parse_hub_id("org/js@v9"))


def test_a_folder_for_each_device_becomes_a_model_folder(hub: HubServer) -> None:
    config = json.dumps({"model": {"decoder": {"filename": "phi.onnx"}}}).encode()
    files = {
        "README.md": b"",
        "cpu/cpu-int4/genai_config.json": config,
        "cpu/cpu-int4/phi.onnx": graph("phi.onnx.data", 4),
        "cpu/cpu-int4/phi.onnx.data": weights(4),
        "cpu/cpu-int4/mtp.onnx": graph(None, 5),
        "cpu/cpu-int4/tokenizer.json": b"{}",
        "cuda/cuda-fp16/genai_config.json": config,
        "cuda/cuda-fp16/phi.onnx": graph(None, 6),
        "config.json": b"{}",
    }
    hub.repo("org/genai", files)
    found = fetch_model(HubId("org/genai"))
    assert found.id == "org/genai:cpu-int4"
    assert names(found.folder) == {"genai_config.json", "phi.onnx", "phi.onnx.data", "tokenizer.json", "config.json"}
    hub.seen.clear()
    assert fetch_model(HubId("org/genai", "int4")) == found
    assert hub.seen == []


def test_separate_decoders_are_downloaded_together(hub: HubServer) -> None:
    hub.repo("org/old", {**TEXTS, "decoder_model.onnx": graph(), "decoder_with_past_model.onnx": graph(fill=2)})
    found = fetch_model(HubId("org/old"))
    assert {"decoder_model.onnx", "decoder_with_past_model.onnx"} < names(found.folder)
    opened = open_bundle(found.path)
    assert opened.first == found.folder / "decoder_model.onnx"
    assert fetch_model(HubId("org/old")) == found


def test_an_edge_run_bundle_is_downloaded_with_its_draft(hub: HubServer, tiny_bundle: Path) -> None:
    manifest = json.loads((tiny_bundle / "edge.json").read_text(encoding="utf-8"))
    with_draft = {**manifest, "draft": {"path": "draft"}}
    files = files_of(tiny_bundle) | files_of(tiny_bundle, "draft/") | {"edge.json": json.dumps(with_draft).encode()}
    hub.repo("org/ours", {**files, "notes.txt": b"-"})
    found = fetch_model(HubId("org/ours"))
    assert names(found.folder) == set(files)
    assert found.id == "org/ours"
    with edgerun.load("org/ours") as engine, edgerun.load(tiny_bundle) as plain:
        assert engine.generate("ab", max_tokens=8).text == plain.generate("ab", max_tokens=8).text
    (tokenizer,) = {body for body in hub.bodies() if body.endswith("tokenizer.json")}
    assert hub.bodies().count(tokenizer) == 1


def test_a_draft_head_is_downloaded_with_its_target(hub: HubServer, tiny_bundle: Path) -> None:
    manifest = json.loads((tiny_bundle / "edge.json").read_text(encoding="utf-8"))
    draft = (tiny_bundle / "model.onnx").read_bytes()
    digest = {"bytes": len(draft), "sha256": hashlib.sha256(draft).hexdigest()}
    named = {
        "draft": {"path": ".", "graph": "draft.onnx", "head": "eagle"},
        "files": {**manifest["files"], "draft.onnx": digest},
    }
    files = {**files_of(tiny_bundle), "draft.onnx": draft, "edge.json": json.dumps({**manifest, **named}).encode()}
    hub.repo("org/own", {**files, "notes.txt": b"-"})
    assert names(fetch_model(HubId("org/own")).folder) == set(files)


def test_a_checkpoint_is_downloaded_for_export(hub: HubServer) -> None:
    wanted = {
        "model-00001-of-00002.safetensors": weights(1),
        "model-00002-of-00002.safetensors": weights(2),
        "model.safetensors.index.json": b"{}",
    }
    files = {**TEXTS, **wanted, "flax_model.msgpack": b"", "adapter_model.safetensors": b""}
    hub.repo("org/ckpt", files)
    message = "^org/ckpt holds no .onnx file; export its checkpoint: edge-run export org/ckpt@main OUT$"
    with pytest.raises(BundleError, match=message):
        find_model("org/ckpt@main")
    hub.repo("org/data", {"README.md": b"", "data.csv": b""})
    message = "^org/data holds no .onnx file; and no safetensors or GGUF weights to export"
    with pytest.raises(BundleError, match=message):
        find_model("org/data")
    folder = fetch_checkpoint(HubId("org/ckpt"))
    assert names(folder) == {*wanted, "config.json", "tokenizer.json"}
    assert fetch_checkpoint(HubId("org/ckpt")) == folder


def test_gguf_files_are_downloaded_for_export(hub: HubServer) -> None:
    files = {"m-Q4_K_M.gguf": weights(1), "m-Q8_0.gguf": weights(2), "m-BF16-00001-of-00002.gguf": weights(3)}
    hub.repo("org/gguf", files)
    with pytest.raises(BundleError, match=re.escape(
        "org/gguf holds no .onnx file; export its GGUF weights: edge-run export org/gguf:Q4_K_M OUT "
        "(there are BF16, Q4_K_M, Q8_0)"
    )):  # fmt: skip
        find_model("org/gguf")
    path = fetch_checkpoint(HubId("org/gguf", "q8_0"))
    assert (path.name, path.read_bytes()) == ("m-Q8_0.gguf", weights(2))
    with pytest.raises(BundleError, match="has several GGUF files; name one: org/gguf:NAME, of BF16, Q4_K_M, Q8_0"):
        fetch_checkpoint(HubId("org/gguf"))
    with pytest.raises(BundleError, match="has no GGUF file Q2_K; name one"):
        fetch_checkpoint(HubId("org/gguf", "Q2_K"))
    with pytest.raises(BundleError, match="is one of several pieces"):
        fetch_checkpoint(HubId("org/gguf", "BF16"))
    hub.repo("org/seeing", {"m-Q8_0.gguf": weights(2), "mmproj-m-F16.gguf": weights(3)})
    assert fetch_checkpoint(HubId("org/seeing")).name == "m-Q8_0.gguf"


def test_an_export_prefers_safetensors(hub: HubServer) -> None:
    hub.repo("org/both", {**TRANSFORMERS_JS, "model.safetensors": weights(9)})
    assert "model.safetensors" in names(fetch_checkpoint(HubId("org/both")))
    assert "model_q4.onnx" in names(fetch_checkpoint(HubId("org/both", "q4")))
    assert "model_q4.onnx" in names(fetch_checkpoint(HubId("org/js")))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("../../secret", "keeps weights in '../../secret'; do not use this model"),
        (None, "onnx/model.onnx of org/bad is not an ONNX model; name another variant"),
        ("gone.bin", "org/bad lacks onnx/gone.bin, where onnx/model.onnx keeps weights; tell its authors"),
    ],
)
def test_invalid_graphs_are_errors(hub: HubServer, data: str | None, message: str) -> None:
    made = b"no model at all" if data is None else graph(data)
    hub.repo("org/bad", {**TEXTS, "onnx/model.onnx": made})
    with pytest.raises(BundleError, match=re.escape(message)):
        find_model("org/bad")


def test_paths_out_of_the_folder_are_ignored(hub: HubServer, tmp_path: Path) -> None:
    hub.repo("org/evil", {**TEXTS, "model.onnx": graph(), "../../evil.json": b"x", "/etc/x": b"", "c:\\x": b""})
    assert names(fetch_model(HubId("org/evil")).folder) == {"model.onnx", "config.json", "tokenizer.json"}
    assert not list(tmp_path.rglob("evil.json"))
    for path in ("", "..", "a/../b", "/a", "C:a", "a\\b", "a:b", "a\0"):
        assert not is_safe_path(path)
    assert is_safe_path("onnx/model.onnx")


@pytest.mark.parametrize("no_ranges", [False, True])
def test_a_download_resumes_where_it_stopped(hub: HubServer, no_ranges: bool) -> None:
    repo = hub.repos["org/js"]
    hub.faults.no_ranges = no_ranges
    partial = models_root() / "org--js" / "partial" / sha256(weights(2))
    partial.parent.mkdir(parents=True)
    partial.write_bytes(weights(2)[:7000])
    assert next(iter(stores())).unfinished_bytes() == 7000
    found = fetch_model(HubId("org/js"))
    assert (found.folder / "model_q4.onnx_data").read_bytes() == weights(2)
    ranges = [seen.range for seen in hub.seen if "/cdn/" in seen.path and seen.path.endswith("_data")]
    assert ranges[0] == "bytes=7000-"
    assert no_ranges or len(ranges) == 1
    assert repo.refs["main"] == found.commit
    assert next(iter(stores())).unfinished_bytes() == 0


@pytest.mark.parametrize("there", [weights(2), weights(2) + b"more", b"\0" * 12000])
def test_partial_files_are_checked(hub: HubServer, there: bytes) -> None:
    partial = models_root() / "org--js" / "partial" / sha256(weights(2))
    partial.parent.mkdir(parents=True)
    partial.write_bytes(there)
    if len(there) == 12000 and there != weights(2):
        with pytest.raises(
            HubError,
            match="onnx/model_q4.onnx_data of org/js is damaged after the download: its checksum differs",
        ):
            fetch_model(HubId("org/js"))
    found = fetch_model(HubId("org/js"))
    assert (found.folder / "model_q4.onnx_data").read_bytes() == weights(2)


def test_a_download_continues_after_a_lost_connection(hub: HubServer) -> None:
    hub.faults.cut["model_q4.onnx_data"] = 5000
    found = fetch_model(HubId("org/js"))
    assert (found.folder / "model_q4.onnx_data").read_bytes() == weights(2)


@pytest.mark.parametrize("path", ["onnx/model_q4.onnx_data", "config.json"])
def test_a_changed_byte_is_noticed(hub: HubServer, path: str) -> None:
    hub.repo("org/js", {**TRANSFORMERS_JS, "config.json": b'{"a": 1}'})
    hub.faults.flip.add(path)
    with pytest.raises(
        HubError,
        match=f"^{path} of org/js is damaged after the download: its checksum differs; run the command",
    ):
        fetch_model(HubId("org/js"))
    assert Store("org/js").all_downloaded() == []
    hub.faults.flip.clear()
    assert fetch_model(HubId("org/js")).variant == "q4"


def test_a_damaged_model_is_refused_and_pull_downloads_it_again(hub: HubServer) -> None:
    found = fetch_model(HubId("org/js"))
    (found.folder / "model_q4.onnx_data").write_bytes(weights(7))
    with pytest.raises(BundleError, match="is damaged: its checksum.*; download it again: edge-run pull org/js:q4$"):
        find_model("org/js")
    assert fetch_model(HubId("org/js"), newest=True) == found
    assert find_model("org/js") == found.folder
    (found.folder / "config.json").unlink()
    with pytest.raises(BundleError, match="config.json is missing; download it again"):
        find_model("org/js")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"files": 3}', '{"id": 1, "commit": 1, "variant": 1, "source": 1, "files": {}}']
)
def test_a_damaged_record_is_written_again(hub: HubServer, text: str) -> None:
    found = fetch_model(HubId("org/js"))
    for name in (found.folder / "hub.json", found.folder.parent / "files.json"):
        name.write_text(text, encoding="utf-8")
    assert fetch_model(HubId("org/js")) == found


@pytest.mark.parametrize(
    ("path", "status", "error", "message"),
    [
        ("/api/models", 401, InputError, "org/js is neither a model on the hub nor a file or folder on this machine; "),
        ("/api/models", 404, InputError, "org/js is neither a model on the hub nor a file"),
        ("/resolve/", 403, InputError, "org/js is neither a model on the hub nor a file"),
        ("/api/models", 429, HubError, "the hub received too many requests from this address; wait a little"),
        ("/api/models", 500, HubError, "the hub refused the list of files of org/js (status 500); run the command"),
        ("/api/models", 400, HubError, "the hub refused the list of files of org/js (status 400); check the name"),
    ],
)
def test_refusals_of_the_hub_are_errors_of_one_line(
    hub: HubServer, path: str, status: int, error: type[EdgeError], message: str
) -> None:
    hub.faults.status[path] = status
    with pytest.raises(error, match=f"^{re.escape(message)}") as caught:
        fetch_model(HubId("org/js"))
    assert "\n" not in str(caught.value)


def test_private_and_gated_models_need_a_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo("org/private", TRANSFORMERS_JS).token = "hf_secret"  # noqa: S105  valid only for the test server
    hub.repo("org/gated", TRANSFORMERS_JS).gated = True
    with pytest.raises(InputError, match="a private model needs a log-in with access to it: hf auth login"):
        find_model("org/private")
    with pytest.raises(
        InputError, match=f"org/gated requires that you accept its terms; accept them at {hub.url}/org/gated"
    ):
        find_model("org/gated")
    assert not any(seen.token for seen in hub.seen)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    find_model("org/private")
    find_model("org/gated")
    assert {seen.token for seen in hub.seen if "/resolve/" in seen.path and "private" in seen.path} == {"hf_secret"}
    assert {seen.token for seen in hub.seen if "/cdn/" in seen.path} == {None}


@pytest.mark.parametrize(
    "sibling",
    [
        {"rfilename": 5, "size": 3},
        {"rfilename": ["model.onnx"], "size": 3},
        {"rfilename": "a.txt", "size": 3, "blobId": "../../../a"},
        {"rfilename": "a.txt", "size": 3, "blobId": 7},
        {"rfilename": "a.txt", "size": 3, "lfs": {"sha256": "../a", "size": 3, "pointerSize": 1}},
        {"rfilename": "a.txt", "size": "3"},
    ],
)
def test_files_with_impossible_values_are_left_out(hub: HubServer, sibling: dict[str, Any]) -> None:
    hub.faults.change = lambda info: info["siblings"].append(sibling)
    assert set(list_repository(HubId("org/js")).files) == set(TRANSFORMERS_JS)


@pytest.mark.parametrize(
    "change",
    [
        lambda info: info.update(siblings=[{"rfilename": "model.onnx"}]),
        lambda info: info.update(siblings=[{"size": 3}]),
        lambda info: info.update(siblings=3),
        lambda info: info.update(sha=None),
        lambda info: info.update(sha="../../x"),
        lambda info: info.pop("id"),
        None,
    ],
)
def test_invalid_listings_are_errors(hub: HubServer, change: Callable[[dict[str, Any]], None] | None) -> None:
    hub.faults.change = change
    hub.faults.html = change is None
    with pytest.raises(HubError, match=f"^{hub.url} does not answer like the hub; check HF_ENDPOINT"):
        find_model("org/js")


@pytest.mark.parametrize("address", ["nowhere", "http://[bad", "ftp://127.0.0.1", "http://host.invalid", "http://:x"])
def test_invalid_addresses_are_errors(hub: HubServer, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(HubError) as caught:
        find_model("org/js")
    assert address in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreachable_hub_is_an_error_only_for_models_not_downloaded(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = find_model("org/js")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert find_model("org/js") == path
    with pytest.raises(
        HubError,
        match="^the list of files of org/other cannot be downloaded from http://127.0.0.1:9: .*refused.*; check the",
    ):
        find_model("org/other")


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = find_model("org/js")
    hub.seen.clear()
    monkeypatch.setenv(name, "1")
    assert find_model("org/js") == path
    assert fetch_model(HubId("org/js"), newest=True).folder == path
    with pytest.raises(HubError, match=r"^org/x is not downloaded, and edge-run is offline; run edge-run pull org/x"):
        find_model("org/x")
    with pytest.raises(HubError, match=r"model.onnx of org/js is not downloaded, and edge-run is offline"):
        find_model("org/js:fp32")
    assert hub.seen == []


def test_a_search_lists_language_models_with_onnx_files(hub: HubServer) -> None:
    hub.repo("org/Chat-1", {"a": b"12"}).downloads = 3
    hub.repo("other/chat-2", {"a": b"123"}).downloads = 4
    hub.repo("org/Chat-3", {}).tags = ("onnx", "fill-mask")
    hub.repo("org/Other", {})
    first = {"repo": "other/chat-2", "downloads": 4, "bytes": 3}
    assert search_models("chat", 5) == [first, {"repo": "org/Chat-1", "downloads": 3, "bytes": 2}]
    assert search_models("chat", 1) == [first]
    hub.faults.html = True
    with pytest.raises(HubError, match="does not answer like the hub"):
        search_models("chat", 5)
    hub.faults.status["/api/models"] = 503
    with pytest.raises(HubError, match=r"^the hub refused the search \(status 503\); try again in a while$"):
        search_models("chat", 5)


@pytest.mark.parametrize("offline", [False, True])
def test_files_in_the_hub_librarys_cache_are_not_downloaded_again(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    for path in ("config.json", "tokenizer.json", "onnx/model_q4.onnx", "onnx/model_q4.onnx_data"):
        hf_hub_download("org/js", path, cache_dir=tmp_path / "hf" / "hub", endpoint=hub.url)
    hub.seen.clear()
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = fetch_model(HubId("org/js"))
    assert (found.folder / "model_q4.onnx_data").read_bytes() == weights(2)
    assert not any(path.is_symlink() for path in found.folder.iterdir())
    assert hub.bodies() == []
    assert bool(hub.seen) != offline


def test_a_download_that_does_not_fit_the_disk_is_refused(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, (64 << 20) + 10000))
    with pytest.raises(
        HubError, match="^org/js needs 12.1 kB more, but .* has room for 10 kB; make room, or set HF_HOME"
    ):
        find_model("org/js")
    assert hub.bodies() == []


def test_an_unwritable_hf_home_is_an_error(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    with pytest.raises(HubError, match="cannot be written: .*; check the disk, or set HF_HOME to another folder"):
        find_model("org/js")


def test_concurrent_downloads_download_once(hub: HubServer) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(find_model("org/js"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert hub.bodies().count("onnx/model_q4.onnx_data") == 1


def test_the_library_stays_silent_when_another_download_ends(hub: HubServer) -> None:
    hub.repo("org/other", {**TEXTS, "model.onnx": graph()})
    hub.faults.stall["model_q4.onnx_data"] = 5000
    slow = threading.Thread(target=fetch_model, args=(HubId("org/js"),), kwargs={"progress": lambda *_: None})
    assert not are_progress_bars_disabled("huggingface_hub.http_get")
    slow.start()
    wait_until(lambda: "onnx/model_q4.onnx_data" in hub.bodies())
    fetch_model(HubId("org/other"))
    assert are_progress_bars_disabled("huggingface_hub.http_get")
    hub.faults.stall.clear()
    hub.faults.go_on.set()
    slow.join()
    assert not are_progress_bars_disabled("huggingface_hub.http_get")


def test_who_waits_for_another_download_can_stop(hub: HubServer) -> None:
    def stop(name: str, here: int, total: int) -> None:
        raise CancelledError(f"{name}: {here} of {total}")

    Store("org/js").folder.mkdir(parents=True)
    with Store("org/js").locked(), pytest.raises(CancelledError, match="^org/js: 0 of 0$"):
        fetch_model(HubId("org/js"), progress=stop)


def test_a_model_that_is_being_downloaded_is_not_removed(hub: HubServer) -> None:
    found = fetch_model(HubId("org/js"))
    with (
        Store("org/js").locked(),
        pytest.raises(HubError, match="^org/js is being downloaded by another process; wait"),
    ):
        Store("org/js").remove()
    assert found.folder.is_dir()


@needs_links
def test_removing_leaves_other_files_alone(hub: HubServer, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x", encoding="utf-8")
    store = Store("org/js")
    one, two = fetch_model(HubId("org/js", "q4")), fetch_model(HubId("org/js", "fp32"))
    os.symlink(outside, store.folder / "link")
    assert store.remove([one]) > 12000
    assert not one.folder.exists()
    assert store.all_downloaded() == [two]
    store.remove()
    assert not store.folder.exists()
    assert (outside / "keep").exists()
    os.symlink(outside, store.folder)
    store.remove()
    assert not store.folder.is_symlink()
    assert (outside / "keep").exists()
