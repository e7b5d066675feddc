"""Grammars over real tokenizers: byte-level ones, and SentencePiece with single bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("llguidance", reason="needs the extra structured")

from edgerun.runtime.sampling.token_mask import DeadEndError
from edgerun.runtime.structure.grammar import Grammars
from edgerun.runtime.structure.response_format import ResponseFormat
from edgerun.runtime.text.tokenizer import TextTokenizer
from support.shared_data import real_tokenizer

VOCABULARY = {"qwen2.5": 151_936, "phi-3-mini": 32_064, "smollm": 49_152}
"""Number of logits of the models, which may be more than there are tokens."""
FIELDS = ("größe", "name", "tags", "漢字")
SCHEMA = {
    "type": "object",
    "properties": {"größe": {"type": "integer"}, "name": {"type": "string"}, "tags": {"type": "array"}, "漢字": {}},
    "required": FIELDS,
    "additionalProperties": False,
}
VALUE = {"größe": 12, "name": 'Zoë "Q" 漢字 🙂\n', "tags": ["a b", None, -1.5], "漢字": {"é": [True]}}


@pytest.fixture(scope="module", params=VOCABULARY)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[TextTokenizer, Grammars, int]]:
    tokenizer, count = real_tokenizer(request.param), VOCABULARY[request.param]
    grammars = Grammars(tokenizer, count)
    yield tokenizer, grammars, count
    grammars.close()


def content_ids(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Token ids of a text as they are behind other text: SentencePiece puts a space before the first word."""
    ids = tokenizer.encode(f"\n{text}", add_special_tokens=False)
    while tokenizer.token_bytes.of(ids[0]) in (b" ", b"\n", b""):
        ids = ids[1:]
    return ids


def test_the_tokens_of_a_valid_text_may_come_and_forced_ones_are_the_tokenizers(
    model: tuple[TextTokenizer, Grammars, int],
) -> None:
    """Characters are split over tokens, and what is forced is tokenized as the tokenizer does it, seams included."""
    tokenizer, grammars, count = model
    state = grammars.compile(ResponseFormat.json_schema(SCHEMA)).start()
    ids = content_ids(tokenizer, json.dumps(VALUE, ensure_ascii=False))
    forced_tokens = 0
    for place, token in enumerate(ids):
        forced, mask = list(state.forced()), state.mask()
        assert mask.allows(token)
        assert not mask.allows(count - 1) or count == 49_152
        assert not any(mask.allows(end) for end in tokenizer.eos)
        assert forced == ids[place : place + len(forced)]
        assert not forced or mask.single == token
        forced_tokens += bool(forced)
        assert state.ends_with(token) == (place == len(ids) - 1)
        state.observe((token,))
        state.prepare()
    assert forced_tokens > 8
    if tokenizer.eos:
        mask = state.mask()
        assert any(mask.allows(end) for end in tokenizer.eos)
    else:
        with pytest.raises(DeadEndError, match="the model has no token for it"):
            state.mask()
    state.end()


def test_an_end_is_possible_exactly_where_a_text_is_complete(model: tuple[TextTokenizer, Grammars, int]) -> None:
    tokenizer, grammars, _ = model
    if not tokenizer.eos:
        pytest.skip("the files name no end-of-sequence token")
    state = grammars.compile(ResponseFormat.regex("é+(漢字)?")).start()
    ids = content_ids(tokenizer, "éé漢字")
    complete = []
    for token in ids:
        state.observe((token,))
        mask = state.mask()
        complete.append(any(mask.allows(end) for end in tokenizer.eos))
    texts = [b"".join(map(tokenizer.token_bytes.of, ids[: place + 1])) for place in range(len(ids))]
    assert complete == [text in ("é".encode(), "éé".encode(), "éé漢字".encode()) for text in texts]
