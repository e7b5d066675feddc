"""Answers are taken apart token by token, where the signs of calls and reasoning are special tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken

from edgerun.models.bundle import Bundle
from edgerun.runtime.text.detokenizer import StreamDecoder
from edgerun.runtime.text.tokenizer import TextTokenizer
from edgerun.runtime.tools.answer_format import AnswerFormat
from support.tiny_models import tiny_tokenizer
from support.tool_answers import ANSWERS, FAMILIES, TOOLS, Parsed, joined_parts

SHARED_SIGNS = ("<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>", "<think>", "</think>")
SIGNS = {
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "gemma": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    "function-gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "llama3": ("<|python_tag|>",),
    "tool-code": (),
}
"""What is one special token each, in the tokenizers of the models."""


def tokenizer_with(folder: Path, signs: tuple[str, ...]) -> TextTokenizer:
    """The tokenizer of tiny models, with some special tokens more."""
    tokenizer = tiny_tokenizer(300)
    tokenizer.add_special_tokens([AddedToken(sign, special=True, normalized=False) for sign in signs])
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextTokenizer(Bundle(folder, folder / "model.onnx", None), tokenizer.get_vocab_size())


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_recovered_from_their_tokens(family: str, tmp_path: Path) -> None:
    template = FAMILIES[family].template().written
    signs = SIGNS.get(FAMILIES[family].tool_format, SHARED_SIGNS)
    tokenizer = tokenizer_with(tmp_path, signs)
    answer_format = AnswerFormat(template, "auto", tokenizer)
    for number, answer in enumerate(ANSWERS):
        expected = FAMILIES[family].fitted(answer)
        prompt, text = FAMILIES[family].written(expected)
        prompt_ids, ids = (tokenizer.encode(each, add_special_tokens=False) for each in (prompt, text))
        reading = answer_format.reading(TOOLS, prompt_ids)
        assert reading is not None
        parser, marks = reading.begin()
        assert parser is not None
        decoder = StreamDecoder(tokenizer, marks)
        source, parts = random.Random(number), []
        while ids:
            # A pass gives several tokens where drafts are accepted.
            count = source.randint(1, 4)
            parts.append(parser.push(decoder.push(ids[:count])))
            ids = ids[count:]
        parts += [parser.push(decoder.flush()), parser.finish()]
        assert joined_parts(parts) == Parsed(expected.text, expected.reasoning, expected.calls, unparsed=False), text
