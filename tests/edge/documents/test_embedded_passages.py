"""Passages that are found by the vectors of an embedding model: kept in the index, and ranked beside the words."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgerun
from edgerun import Encoder
from edgerun.edge.cli.main import main
from edgerun.edge.documents.document_index import DocumentIndex, with_index
from edgerun.errors import CancelledError
from support.commands import Capture, Patch, fails, json_of
from support.encoders import SIZE, states_of, write_encoder
from support.processes import started
from support.tiny_models import write_json

QUESTION = "qxqxqx qxqx"
EMBEDDING = """
import sys
from pathlib import Path
import edgerun
from edgerun.edge.documents.document_index import DocumentIndex

def say(_, fraction):
    print(round(fraction * 40), flush=True)

DocumentIndex(Path(sys.argv[1])).embed(edgerun.load_encoder(sys.argv[2]), say)
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGERUN_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 files of one passage, of which one is like the question and has none of its words."""
    folder = tmp_path / "town"
    folder.mkdir()
    for number in range(40):
        text = "qxqxqxqx qxqxq" if number == 23 else f"Report number {number} about the market and the harbour. " * 20
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


def install(home: Path, name: str = "encoder", output: str = "last_hidden_state") -> Path:
    """Put an encoder where the models of the app are."""
    folder = write_encoder(home / "models" / name, output)
    (folder / "onnx" / "model.onnx").rename(folder / "model.onnx")
    return folder


def stored(index: DocumentIndex) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(index.path)) as connection:
        return connection.execute("SELECT model, elements FROM vector ORDER BY passage").fetchall()


def counted(monkeypatch: Patch) -> list[int]:
    """The lengths of the texts that are embedded from now on, in tokens."""
    lengths: list[int] = []
    embed = Encoder.embed

    def counting(encoder: Encoder, texts: Sequence[Any], **options: Any) -> Any:
        lengths.extend(map(len, texts))
        return embed(encoder, texts, **options)

    monkeypatch.setattr(Encoder, "embed", counting)
    return lengths


@pytest.mark.parametrize("prompts", [{}, {"query": "query: ", "document": "passage: "}])
def test_the_nearest_passages_are_those_of_the_largest_cosine(
    folder: Path, tmp_path: Path, prompts: dict[str, str]
) -> None:
    write_encoder(tmp_path / "encoder")
    write_json(tmp_path / "encoder" / "config_sentence_transformers.json", {"prompts": prompts})
    with edgerun.load_encoder(tmp_path / "encoder") as encoder, DocumentIndex(folder) as index:

        def vector(text: str, kind: str) -> np.ndarray:
            ids = encoder.tokenizer.encode(prompts.get(kind, "") + text, add_special_tokens=True)
            states = states_of(ids if len(ids) <= encoder.context else [*ids[: encoder.context - 1], ids[-1]])
            return states.mean(axis=0) / np.linalg.norm(states.mean(axis=0))

        index.update()
        index.embed(encoder)
        found = index.nearest(encoder, QUESTION, 40)
        wanted = vector(QUESTION, "query")
        cosines = [float(vector(each.text.rstrip(), "document") @ wanted) for each in found]
        assert (len(set(found)), found[0].source) == (40, "town/23.txt")
        assert cosines == pytest.approx(sorted(cosines, reverse=True), abs=2e-3)
        assert index.nearest(encoder, " ", 5) == []
        assert {(model, len(elements)) for model, elements in stored(index)} == {(encoder.fingerprint, 2 * SIZE)}


def test_vectors_are_made_once_go_on_after_an_end_and_follow_the_files(
    folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    lengths, seen = counted(monkeypatch), []
    with edgerun.load_encoder(write_encoder(tmp_path / "encoder")) as encoder, DocumentIndex(folder) as index:
        index.update()
        with pytest.raises(CancelledError):
            index.embed(encoder, lambda _, fraction: seen.append(fraction), lambda: len(seen) == 2)
        assert 0 < len(stored(index)) == len(lengths) < 40
        index.embed(encoder)
        index.embed(encoder)
        assert (len(stored(index)), len(lengths)) == (40, 40)
        assert max(lengths) == encoder.context
        (folder / "1.txt").write_text("now about something else", encoding="utf-8")
        (folder / "2.txt").unlink()
        index.update()
        assert len(stored(index)) == 38
        index.embed(encoder)
        assert (len(stored(index)), len(lengths)) == (39, 41)
        with edgerun.load_encoder(write_encoder(tmp_path / "other", types=False)) as other:
            assert index.nearest(other, QUESTION, 5) == []
            index.embed(other)
            assert {model for model, _ in stored(index)} == {other.fingerprint}
            assert index.nearest(encoder, QUESTION, 5) == []


def test_several_may_make_vectors_at_a_time(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """None is made twice, because each batch is one transaction."""
    with_index(folder, DocumentIndex.update)
    lengths = counted(monkeypatch)
    with edgerun.load_encoder(write_encoder(tmp_path / "encoder")) as encoder, ThreadPoolExecutor(3) as pool:
        for each in [pool.submit(with_index, folder, lambda index: index.embed(encoder)) for _ in range(3)]:
            each.result()
    with DocumentIndex(folder) as index:
        assert (len(stored(index)), len(lengths)) == (40, 40)


@pytest.mark.parametrize("batches", [1, 2])
def test_killing_the_process_keeps_the_vectors_that_are_made(
    folder: Path, tmp_path: Path, monkeypatch: Patch, batches: int
) -> None:
    encoder_folder = write_encoder(tmp_path / "encoder")
    with_index(folder, DocumentIndex.update)
    with started([sys.executable, "-c", EMBEDDING, str(folder), str(encoder_folder)], stdout=-1) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(batches + 1)]
        process.kill()
        lines += process.stdout.readlines()
        process.wait()
    made = max(int(line) for line in lines if line.endswith(b"\n"))
    lengths = counted(monkeypatch)
    with edgerun.load_encoder(encoder_folder) as encoder, DocumentIndex(folder) as index:
        kept = len(stored(index))
        assert kept >= made > 0
        index.embed(encoder)
        assert (len(stored(index)), len(lengths)) == (40, 40 - kept)


def test_an_installed_encoder_is_used_and_another_is_chosen_by_its_name(
    long_bundle: Path, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    asked = [long_bundle, "-p", QUESTION, "-n", "2", "--documents", folder]

    def sources(*more: object) -> list[str]:
        return [each["source"] for each in json_of(capsys, *asked, "--json", *more)["passages"]]

    assert sources() == []
    install(tmp_path / "home", "a-reranker", "logits")
    (tmp_path / "home" / "models" / "broken").mkdir()
    (tmp_path / "home" / "models" / "broken" / "model.onnx").write_bytes(b"no graph")
    assert sources() == []
    encoder = install(tmp_path / "home")
    for found in (sources(), sources("--embedding-model", "encoder"), sources("--embedding-model", encoder)):
        assert found[0] == "town/23.txt"
        assert 1 < len(found) <= 8
    assert sources("--embedding-model", "none") == []
    assert main([*map(str, asked), "--embedding-model", "none"]) == 0
    assert "no passage of the documents fits the question" in capsys.readouterr().err.splitlines()
    error = fails(capsys, *asked, "--embedding-model", "missing")
    assert error == "missing does not exist; give an .onnx file or a model folder"
    error = fails(capsys, *asked, "--embedding-model", "a-reranker")
    assert error == "a-reranker makes scores of pairs of texts, not vectors; choose another model"


@pytest.mark.parametrize("chosen", [None, "none"])
def test_the_app_finds_passages_by_meaning(long_bundle: Path, folder: Path, tmp_path: Path, chosen: str | None) -> None:
    pytest.importorskip("starlette", reason="needs the app extra")
    from support.app_server import new_conversation, running_app, send, window

    install(tmp_path / "home")
    options = () if chosen is None else ("--embedding-model", chosen)
    with (
        running_app(tmp_path / "home", long_bundle, "--draft", "none", *options) as app,
        app.entered() as client,
        window(app, client.cookies) as page,
    ):
        conversation = new_conversation(page.client, documents=[str(folder)], sampling={"max_tokens": 2})
        answer = page.wait_for_end(send(page.client, conversation, QUESTION)["id"])
    sources = [each["source"] for each in answer["passages"]]
    assert (sources[:1], answer["stats"].get("no_passage")) == (
        (["town/23.txt"], None) if chosen is None else ([], True)
    )


def test_rankings_by_words_and_by_meaning_are_merged(
    long_bundle: Path, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    """What both rankings have comes before what one of them has."""
    install(tmp_path / "home")
    (folder / "both.txt").write_text("qxqxqx qxqx zebra", encoding="utf-8")
    (folder / "words.txt").write_text("zebra " + "The weather in the harbour was fine. " * 40, encoding="utf-8")
    asked = [long_bundle, "-p", "qxqxqx qxqx zebra", "-n", "2", "--documents", folder, "--json"]
    found = json_of(capsys, *asked)["passages"]
    assert found[0]["source"] == "town/both.txt"
    assert {"town/23.txt", "town/words.txt"} <= {each["source"] for each in found}
