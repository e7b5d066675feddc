"""Calibration text: sampled from a model, and read from files."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun.errors import InputError
from edgerun.models.find import bundled_folder
from edgerun.runtime.measure import self_text, text_sampler
from edgerun.runtime.measure.self_text import read_texts, sample_texts

tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")

BUNDLED = bundled_folder()


def decoded(bundle: Path, texts: list[np.ndarray]) -> list[str]:
    with edgerun.load(bundle, draft=None) as engine:
        return [engine.tokenizer._tokenizer.decode(text.tolist(), skip_special_tokens=False) for text in texts]


def total(texts: list[np.ndarray]) -> int:
    return sum(map(len, texts))


def test_a_chat_model_writes_requests_and_answers() -> None:
    fractions: list[float] = []
    texts = sample_texts(BUNDLED, 300, 100, 0, fractions.append)
    assert 300 <= total(texts) < 400
    assert fractions == sorted(fractions)
    assert 0 < fractions[0] < fractions[-1] == 1
    assert all(text.dtype == np.int64 and len(text) <= 100 for text in texts)
    for text in decoded(BUNDLED, texts):
        user, found, answer = text.partition("<|assistant|>")
        assert user.startswith("<|user|>")
        assert user.removeprefix("<|user|>").strip()
        assert found
        assert answer.endswith("<|end|>") or len(answer) > 50


def test_the_same_seed_gives_the_same_texts() -> None:
    first, same, other = (sample_texts(BUNDLED, 100, 64, seed) for seed in (1, 1, 2))
    assert [text.tolist() for text in first] == [text.tolist() for text in same]
    assert [text.tolist() for text in first] != [text.tolist() for text in other]


def test_the_same_seed_gives_the_same_texts_where_threads_wake_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding depends on how many texts share a pass, so every pass has to wait for all of them."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda _: sleep(0.01))
    first, *others = ([text.tolist() for text in sample_texts(BUNDLED, 100, 64, 1)] for _ in range(8))
    assert others == [first] * 7


def test_a_model_that_does_not_end_its_requests_answers_neutral_ones(tiny_bundle: Path) -> None:
    """A model with random weights seldom samples an end token."""
    texts = sample_texts(tiny_bundle, 400, 100, 0)
    assert total(texts) >= 400
    requests = [text.removeprefix("<|user|>").partition("<|assistant|>")[0] for text in decoded(tiny_bundle, texts)]
    assert set(requests) <= set(text_sampler._NEUTRAL_REQUESTS)
    assert len(set(requests)) == len(requests) > 3


def test_a_model_without_a_template_continues_from_its_first_token(tmp_path: Path) -> None:
    bundle = tiny.write_bundle(tmp_path)
    settings = json.loads((bundle / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["chat_template"]
    tiny.write_json(bundle / "tokenizer_config.json", settings)
    (bundle / "edge.json").unlink()
    texts = sample_texts(bundle, 300, 80, 0)
    assert total(texts) >= 300
    assert {int(text[0]) for text in texts} == {0}  # the tokenizer puts no token first, so the end token begins a text
    assert all(2 < len(text) <= 80 for text in texts)
    assert len({text.tobytes() for text in texts}) == len(texts)


def test_sampling_stops_at_a_model_that_samples_empty_texts_only(tmp_path: Path) -> None:
    from edgerun.export import FP32, ExportRecipe, export_checkpoint

    source = tiny.write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=False)
    tensors = tiny.tiny_weights(tiny.tiny_config(tie_word_embeddings=False))
    for name, value in tensors.items():
        # The layers add nothing to the residual, and the head prefers the end token always.
        if name.endswith(("o_proj.weight", "down_proj.weight")) or name == "lm_head.weight":
            value[:] = 0
    tensors["model.embed_tokens.weight"][:] = 1
    tensors["lm_head.weight"][0] = 10
    tiny.write_weights(source, tensors)
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32)).bundle
    assert sample_texts(bundle, 300, 80, 0) == []


def test_conversations_are_read_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    turns = [("user", "list files"), ("assistant", "ls"), ("user", "all of them")]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in turns[:count]]} for count in (1, 2, 3)
    ]
    rows[0]["messages"][0]["content"] = [{"type": "text", "text": "list"}, {"type": "text", "text": "files"}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert sorted(decoded(BUNDLED, read_texts(BUNDLED, file, 10_000, 100))) == [
        "<|user|>all of them<|assistant|>",  # as the template has it
        "<|user|>list\nfiles<|assistant|>",
        "<|user|>list files<|assistant|>ls<|end|>",
    ]
    pieces = read_texts(BUNDLED, file, 10_000, 4)
    assert all(len(piece) <= 4 for piece in pieces)
    assert total(pieces) >= total(read_texts(BUNDLED, file, 10_000, 100)) - 3


def test_conversations_are_read_up_to_the_number_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"show file {number}"}]} for number in range(500)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    texts = read_texts(BUNDLED, file, 300, 100)
    assert 300 <= total(texts) < 400
    numbers = [int(text.removesuffix("<|assistant|>").split()[-1]) for text in decoded(BUNDLED, texts)]
    assert min(numbers) < 150  # from all over the file
    assert max(numbers) > 350
    assert [text.tolist() for text in texts] == [text.tolist() for text in read_texts(BUNDLED, file, 300, 100)]


def test_plain_text_is_cut_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "text.txt"
    text = "\n".join(f"{number} files in the folder" for number in range(200))
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(self_text, "_CHARACTERS", 100)
    pieces = read_texts(BUNDLED, file, 10_000, 50)
    assert all(len(piece) == 50 for piece in pieces[:-1])
    assert "".join(decoded(BUNDLED, pieces)) == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"messages": []}', "row 1: no messages"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "row 1: no messages"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": ["hello"]}]}', "row 1: no messages"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": [{"text": "hello"}]}]}', "row 1: no messages"),
        ("a.jsonl", '{"messages": [[1]]}', "row 1: no messages"),
        ("a.jsonl", '{"prompt": "x"}', "row 1: no messages"),
        ("a.jsonl", '{"messages": []}\n[]', "line 2: not an object"),
        ("a.jsonl", "text", "line 1: not JSON"),
        ("a.txt", "  \n", "is empty"),
        ("a.txt", "x", "holds no text"),
    ],
)
def test_files_without_text_are_errors(tmp_path: Path, name: str, content: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_texts(BUNDLED, file, 10_000, 50)
    with pytest.raises(InputError, match="cannot be read"):
        read_texts(BUNDLED, tmp_path / "absent", 10_000, 50)
