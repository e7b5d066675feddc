"""Prompts for filling in the middle equal the published templates, whatever the texts contain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

pytest.importorskip("support.tiny_models", reason="needs the export extra")

from edgerun import InputError
from edgerun.runtime.text.infill import InfillTokens
from edgerun.runtime.text.tokenizer import TextTokenizer
from support.infill_models import QWEN
from support.shared_data import real_tokenizer, saved_tokenizer
from support.tiny_models import tiny_tokenizer

PREFIX, SUFFIX = "the sea <and\n", "\n is >on the other\n"
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")  # noqa: RUF001  the tokens are written so
STARCODER2 = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<repo_name>", "<file_sep>")
TEMPLATES = [
    (QWEN, "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"),
    (
        ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|file_separator|>"),
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    ),
    (STARCODER2, "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>"),
    (("<fim-prefix>", "<fim-middle>", "<fim-suffix>"), "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>"),
    (DEEPSEEK, "{}{{prefix}}{}{{suffix}}{}".format(*DEEPSEEK)),
    (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), "[SUFFIX]{suffix}[PREFIX]{prefix}"),
]


def tokenizer_with(
    folder: Path, tokens: Sequence[str], *, special: bool = False, begins: bool = False
) -> TextTokenizer:
    library: Tokenizer = tiny_tokenizer(300)
    library.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    if begins:
        library.post_processor = processors.TemplateProcessing("<|user|> $A", None, [("<|user|>", 2)])
    return saved_tokenizer(folder, library)


@pytest.mark.parametrize(
    ("tokens", "template"), TEMPLATES, ids=["qwen", "gemma", "star", "santa", "deepseek", "codestral"]
)
@pytest.mark.parametrize("special", [False, True])
def test_prompts_equal_the_published_template(
    tmp_path: Path, tokens: Sequence[str], template: str, special: bool
) -> None:
    tokenizer = tokenizer_with(tmp_path, tokens, special=special, begins=True)
    written = template.format(prefix=PREFIX, suffix=SUFFIX)
    found = InfillTokens.of(tokenizer)
    assert found.prompt_ids(PREFIX, SUFFIX) == tokenizer.encode(written, add_special_tokens=True)
    assert found.ends == {tokenizer.token_id(token) for token in tokens}


@pytest.mark.parametrize("suffix", ["b a", " b a", "\nb a", ""])
def test_a_suffix_does_not_begin_with_the_dummy_prefix_of_a_text(tmp_path: Path, suffix: str) -> None:
    """Tokenizers of SentencePiece put a space before a text, which Codestral's template has before the prefix alone."""
    letters = ["▁", "a", "b", "\n", "▁a", "▁b"]
    library = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, [("▁", "a"), ("▁", "b")]))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("[PREFIX]", "[SUFFIX]")])
    tokenizer = saved_tokenizer(tmp_path, library)
    ids = InfillTokens.of(tokenizer).prompt_ids("a b", suffix)
    assert "".join(map(tokenizer.written, ids)) == f"[SUFFIX]{suffix}[PREFIX] a b".replace(" ", "▁")


def test_the_suffix_comes_first_where_it_is_wanted(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, QWEN)
    written = f"<|fim_prefix|><|fim_suffix|>{SUFFIX}<|fim_middle|>{PREFIX}"
    ids = InfillTokens.of(tokenizer).prompt_ids(PREFIX, SUFFIX, suffix_first=True)
    assert ids == tokenizer.encode(written, add_special_tokens=True)


@pytest.mark.parametrize("special", [False, True])
def test_special_tokens_in_files_are_text(tmp_path: Path, special: bool) -> None:
    tokenizer = tokenizer_with(tmp_path, QWEN, special=special)
    text = "the <|fim_middle|><|file_sep|> sea <|user|>"
    ids = InfillTokens.of(tokenizer).prompt_ids(text, text, [{"filename": text, "text": text}])
    controls = {tokenizer.token_id(token) for token in (*QWEN, "<|user|>")}
    shown = [tokenizer.written(token) for token in ids if token in controls]
    order = ("<|repo_name|>", "<|file_sep|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    assert shown == list(order)
    parts = tokenizer.decode([token for token in ids if token not in controls])
    assert parts == f"project\n{text}\n{text}\n\n{text}{text}"


def test_other_files_come_first_each_with_its_name(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, QWEN)
    extra = [{"filename": "a.py", "text": "the sea"}, {"text": "sand"}]
    ids = InfillTokens.of(tokenizer).prompt_ids("in", "on", extra, document="b.py")
    written = (
        "<|repo_name|>project\n<|file_sep|>a.py\nthe sea\n<|file_sep|>\nsand\n<|file_sep|>b.py\n"
        "<|fim_prefix|>in<|fim_suffix|>on<|fim_middle|>"
    )
    assert ids == tokenizer.encode(written, add_special_tokens=False)
    assert InfillTokens.of(tokenizer).prompt_ids("in", "on", document="b.py") == ids[-5:]


def test_without_a_token_for_files_names_are_comments(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, DEEPSEEK)
    extra = [{"filename": "a.py", "text": "the sea"}, {"text": "sand"}]
    ids = InfillTokens.of(tokenizer).prompt_ids("in", "on", extra, document="b.py")
    written = "#a.py\nthe sea\nsand\n#b.py\n{}in{}on{}".format(*DEEPSEEK)
    assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(written, add_special_tokens=False))
    assert ids[-5:] == tokenizer.encode("{}in{}on{}".format(*DEEPSEEK), add_special_tokens=False)


def test_of_long_texts_what_is_near_the_gap_stays(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, QWEN)
    infill, room = InfillTokens.of(tokenizer), 64
    before, after = "".join(f"a{n}." for n in range(400)), "".join(f"b{n}," for n in range(400))
    grown = [infill.prompt_ids(before[:end], after, [{"text": "sea"}], room=room) for end in range(300, 420)]
    prefix, suffix, middle = (tokenizer.token_id(f"<|fim_{part}|>") for part in ("prefix", "suffix", "middle"))
    kept = []
    for end, ids in zip(range(300, 420), grown, strict=True):
        assert len(ids) <= room
        assert (ids[0], ids[-1]) == (prefix, middle)
        border = ids.index(suffix)
        assert before[:end].endswith(tokenizer.decode(ids[1:border]))
        assert after.startswith(tokenizer.decode(ids[border + 1 : -1]))
        assert border - 1 >= room // 2
        assert len(ids) - border - 2 >= room // 5
        kept.append(ids[1:9])
    changes = sum(one != other for one, other in pairwise(kept))
    assert 0 < changes <= 120 // (room // 12)
    short = infill.prompt_ids("the", after, room=room)
    assert room - room // 4 <= len(short) <= room
    assert infill.prompt_ids("the", "sea", [{"text": before}, {"text": "sand"}], room=room) == infill.prompt_ids(
        "the", "sea", [{"text": "sand"}]
    )


def test_a_model_without_such_tokens_is_refused_in_one_line(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, ["<|fim_prefix|>", "<|fim_suffix|>"])
    with pytest.raises(
        InputError, match="the model has no tokens for filling in the middle.*; use a model that was"
    ) as caught:
        InfillTokens.of(tokenizer)
    assert "\n" not in str(caught.value)


def test_the_tokens_of_qwen_are_the_published_ones() -> None:
    tokenizer = real_tokenizer("qwen2.5")
    infill = InfillTokens.of(tokenizer)
    assert (infill.prefix, infill.middle, infill.suffix) == (151659, 151660, 151661)
    assert infill.ends == {151643, *range(151659, 151665)}
    ids = infill.prompt_ids("def add(a, b):\n    ", "\n\nprint(add(1, 2))\n", [{"filename": "a.py", "text": "x = 1"}])
    written = (
        "<|repo_name|>project\n<|file_sep|>a.py\nx = 1\n<|file_sep|>\n<|fim_prefix|>def add(a, b):\n    "
        "<|fim_suffix|>\n\nprint(add(1, 2))\n<|fim_middle|>"
    )
    assert ids == tokenizer.encode(written, add_special_tokens=False)


@pytest.mark.parametrize("name", ["smollm", "phi-3-mini"])
def test_models_that_were_not_trained_for_it_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="no tokens for filling in the middle"):
        InfillTokens.of(real_tokenizer(name))
