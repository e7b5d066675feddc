"""Text to calibrate with: a model's own, and that of files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun.errors import InputError
from edgerun.models.find import bundled_folder
from edgerun.runtime.measure import self_text
from edgerun.runtime.measure.self_text import read_texts, write_texts

tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")

BUNDLED = bundled_folder()


def shown(bundle: Path, texts: list[np.ndarray]) -> list[str]:
    with edgerun.load(bundle, draft=None) as engine:
        return [engine.tokenizer._tokenizer.decode(text.tolist(), skip_special_tokens=False) for text in texts]


def total(texts: list[np.ndarray]) -> int:
    return sum(map(len, texts))


def test_a_chat_model_writes_both_sides() -> None:
    heard: list[float] = []
    texts = write_texts(BUNDLED, 300, 100, 0, heard.append)
    assert 300 <= total(texts) < 400
    assert heard == sorted(heard)
    assert 0 < heard[0] < heard[-1] == 1
    assert all(text.dtype == np.int64 and len(text) <= 100 for text in texts)
    for text in shown(BUNDLED, texts):
        user, found, answer = text.partition("<|assistant|>")
        assert user.startswith("<|user|>")
        assert user.removeprefix("<|user|>").strip()
        assert found
        assert answer.endswith("<|end|>") or len(answer) > 50


def test_the_same_seed_writes_the_same() -> None:
    first, same, other = (write_texts(BUNDLED, 100, 64, seed) for seed in (1, 1, 2))
    assert [text.tolist() for text in first] == [text.tolist() for text in same]
    assert [text.tolist() for text in first] != [text.tolist() for text in other]


def test_a_model_that_ends_no_request_is_asked_neutral_things(tiny_bundle: Path) -> None:
    """Weights are random: a special token comes seldom, if at all."""
    texts = write_texts(tiny_bundle, 400, 100, 0)
    assert total(texts) >= 400
    asked = [text.removeprefix("<|user|>").partition("<|assistant|>")[0] for text in shown(tiny_bundle, texts)]
    assert set(asked) <= set(self_text._NEUTRAL)
    assert len(set(asked)) == len(asked) > 3


def test_without_a_template_text_goes_on_from_its_first_token(tmp_path: Path) -> None:
    bundle = tiny.write_bundle(tmp_path)
    settings = json.loads((bundle / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["chat_template"]
    tiny.write_json(bundle / "tokenizer_config.json", settings)
    (bundle / "edge.json").unlink()
    texts = write_texts(bundle, 300, 80, 0)
    assert total(texts) >= 300
    assert {int(text[0]) for text in texts} == {0}  # no token of its own begins a text, so it is what ends one
    assert all(2 < len(text) <= 80 for text in texts)
    assert len({text.tobytes() for text in texts}) == len(texts)


def test_a_model_with_nothing_to_say_comes_to_an_end(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=False)
    tensors = tiny.tiny_weights(tiny.tiny_config(tie_word_embeddings=False))
    for name, value in tensors.items():
        # Every layer adds nothing, and the head knows one token: the one that ends a text.
        if name.endswith(("o_proj.weight", "down_proj.weight")) or name == "lm_head.weight":
            value[:] = 0
    tensors["model.embed_tokens.weight"][:] = 1
    tensors["lm_head.weight"][0] = 10
    tiny.write_weights(source, tensors)
    bundle = exported(source, tmp_path / "bundle")
    assert write_texts(bundle, 300, 80, 0) == []


def exported(source: Path, destination: Path) -> Path:
    from edgerun.export import FP32, ExportRecipe, ExportRequest, export_checkpoint

    return export_checkpoint(ExportRequest(source, destination, ExportRecipe(FP32))).bundle


def test_conversations_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    turns = [("user", "list files"), ("assistant", "ls"), ("user", "all of them")]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in turns[:count]]} for count in (1, 2, 3)
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert sorted(shown(BUNDLED, read_texts(BUNDLED, file, 10_000, 100))) == [
        "<|user|>all of them<|assistant|>",  # as the template has it
        "<|user|>list files<|assistant|>",
        "<|user|>list files<|assistant|>ls<|end|>",
    ]
    pieces = read_texts(BUNDLED, file, 10_000, 4)
    assert all(len(piece) <= 4 for piece in pieces)
    assert total(pieces) >= total(read_texts(BUNDLED, file, 10_000, 100)) - 3


def test_no_more_conversations_are_read_than_are_wanted(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"show file {number}"}]} for number in range(500)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    texts = read_texts(BUNDLED, file, 300, 100)
    assert 300 <= total(texts) < 400
    numbers = [int(text.removesuffix("<|assistant|>").split()[-1]) for text in shown(BUNDLED, texts)]
    assert min(numbers) < 150  # from all over the file
    assert max(numbers) > 350
    assert [text.tolist() for text in texts] == [text.tolist() for text in read_texts(BUNDLED, file, 300, 100)]


def test_plain_text_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "text.txt"
    text = "\n".join(f"{number} files in the folder" for number in range(200))
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(self_text, "_CHARACTERS", 100)
    pieces = read_texts(BUNDLED, file, 10_000, 50)
    assert all(len(piece) == 50 for piece in pieces[:-1])
    assert "".join(shown(BUNDLED, pieces)) == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"messages": []}', "row 1: no messages"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "row 1: no messages"),
        ("a.jsonl", '{"prompt": "x"}', "row 1: no messages"),
        ("a.jsonl", '{"messages": []}\n[]', "line 2: not an object"),
        ("a.jsonl", "text", "line 1: not JSON"),
        ("a.txt", "  \n", "is empty"),
        ("a.txt", "x", "holds no text"),
    ],
)
def test_files_that_hold_no_text(tmp_path: Path, name: str, content: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_texts(BUNDLED, file, 10_000, 50)
    with pytest.raises(InputError, match="cannot be read"):
        read_texts(BUNDLED, tmp_path / "absent", 10_000, 50)
