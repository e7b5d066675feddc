"""The bundled model."""

from __future__ import annotations

import pytest

import edgerun
from edgerun.models.bundle import open_bundle
from edgerun.models.find import bundled_folder


@pytest.fixture(scope="module")
def llm():
    with edgerun.load() as engine:
        yield engine


@pytest.mark.parametrize(
    ("request_text", "parts"),
    [
        ("find files larger than 100 MB", ("find ", "-size +100M")),
        ("count lines in main.c", ("wc -l", "main.c")),
        ("extract archive.tar.gz", ("tar ", "archive.tar.gz")),
    ],
)
def test_common_requests_are_answered_with_the_right_commands(
    llm: edgerun.Engine, request_text: str, parts: tuple[str, ...]
) -> None:
    reply = llm.generate(request_text, max_tokens=64)
    assert reply.finish_reason is edgerun.FinishReason.STOP
    assert all(part in reply.text for part in parts), reply.text


def test_requests_of_a_chat_are_answered_independently(llm: edgerun.Engine) -> None:
    alone = llm.generate("extract archive.tar.gz", max_tokens=64).text
    with llm.session() as chat:
        for _ in range(30):
            chat.send("count lines in main.c", max_tokens=64)
        assert chat.send("extract archive.tar.gz", max_tokens=64).text == alone


def test_the_draft_shares_the_tokenizer_and_is_much_smaller() -> None:
    target, draft = open_bundle(bundled_folder()), open_bundle(bundled_folder() / "draft")
    assert draft.weight_bytes * 5 < target.weight_bytes < 60e6
    tokenizers = [bundle.folder / "tokenizer.json" for bundle in (target, draft)]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()
    with edgerun.load(draft.folder) as engine:
        assert engine.generate("count lines in main.c", max_tokens=32).text


def test_it_has_a_model_card() -> None:
    card = (bundled_folder().parent / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "CC BY 4.0" in card
    assert "never runs what a model writes" in card
