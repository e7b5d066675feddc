"""Fill in the middle: prompts of the text before and after a gap, with the special tokens that a model has for it.

The tokens are found in the tokenizer's vocabulary, whatever the model is called. A model has seen the parts in the
order of its published template, most often prefix, suffix, middle. With the suffix first, what changes while somebody
types stands at the end of the prompt, so that the KV cache of everything before it can be used again.

Source: Bavarian et al., "Efficient training of language models to fill in the middle" (2022). The templates are those
of Qwen2.5-Coder, CodeGemma, StarCoder, StarCoder2, SantaCoder, Granite, DeepSeek-Coder and Codestral.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeVar

from ...errors import InputError
from .tokenizer import TextTokenizer

_Items = TypeVar("_Items", str, list[int])

SUGGESTION_TOKENS: Final = 128
"""Largest number of tokens of a suggestion that asks for none."""
_MARKERS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001  the token is written so
    ("[PREFIX]", "[SUFFIX]", ""),
)
"""Tokens before the prefix, before the suffix and before the middle; Codestral has none for the middle."""
_SUFFIX_FIRST: Final = ("[SUFFIX]",)
"""Tokens before the suffix of the families whose template begins with it."""
_FILES: Final = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|filename|>", "<filename>")
"""Tokens before the name of each file."""
_REPOSITORIES: Final = ("<|repo_name|>", "<repo_name>", "<|reponame|>", "<reponame>")
_REPOSITORY_NAME: Final = "project\n"
_FURTHER_ENDS: Final = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "[MIDDLE]", "<|endoftext|>")
"""Tokens that stand behind the middle in training data, besides those above and the end of the text."""
_DUMMY_PREFIX: Final = "▁"
"""What some tokenizers of SentencePiece put before a text; a suffix does not have it in the templates."""
_CHARACTERS: Final = 16
"""Characters of a text that are encoded for each token that has room: more than a token of code has."""
_STEPS: Final = 8
"""A text that is too long is cut by this part of the room at a time, one in so many, and not token by token: while
somebody types, most prompts then leave out the same tokens, and their KV cache is used again."""


@dataclass(frozen=True)
class InfillTokens:
    """The token ids by which a model fills in the middle."""

    tokenizer: TextTokenizer
    prefix: int
    suffix: int
    middle: int | None
    """None where nothing stands before the middle."""
    suffix_first: bool
    """Whether the template begins with the suffix."""
    repository: int | None
    """The token before the name of a repository; None where the model has none."""
    file: int | None
    """The token before the name of a file; None where the model has none."""
    ends: frozenset[int]
    """Tokens that end a suggestion, besides the end-of-sequence tokens."""

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> InfillTokens:
        """Find the tokens in a vocabulary.

        Raises:
            InputError: it does not have them.
        """
        for texts in _MARKERS:
            before, after, middle = map(tokenizer.token_id, texts)
            if before is None or after is None or (middle is None and texts[2]):
                continue
            repositories, files, others = (
                [token for text in group if (token := tokenizer.token_id(text)) is not None]
                for group in (_REPOSITORIES, _FILES, (*filter(None, texts), *_FURTHER_ENDS))
            )
            repository, file = (next(iter(found), None) for found in (repositories, files))
            ends = frozenset((*repositories, *files, *others))
            return cls(tokenizer, before, after, middle, texts[1] in _SUFFIX_FIRST, repository, file, ends)
        raise InputError(
            "the model has no tokens for filling in the middle, such as <|fim_prefix|>",
            "use a model that was trained for it, such as Qwen/Qwen2.5-Coder-0.5B, or leave the suffix out",
        )

    def prompt_ids(
        self,
        prefix: str,
        suffix: str,
        extra: Sequence[Mapping[str, str]] = (),
        *,
        document: str = "",
        suffix_first: bool | None = None,
        room: int | None = None,
    ) -> list[int]:
        """Token ids of the prompt for what stands between two texts, in which texts of special tokens are plain text.

        Args:
            prefix: the text before.
            suffix: the text after.
            extra: other files, the most important last: objects with a `text`, and perhaps a `filename`.
            document: name of the file that has the gap, which is told where there are other files.
            suffix_first: whether the suffix comes first; None for the order of the model's template.
            room: number of tokens that fit. Of a longer prompt the first of the other files are left out, then the
                beginning of the prefix and the end of the suffix. None for no limit.
        """
        begin = self.tokenizer.encode("", add_special_tokens=True)
        before, after = self._texts(prefix, suffix, None if room is None else max(room - len(begin) - 3, 0))
        parts = [[self.prefix, *before], [self.suffix, *after]]
        if self.suffix_first if suffix_first is None else suffix_first:
            # Where a token stands before the middle, the prefix follows it, as in training data (Bavarian et al., SPM).
            parts = [parts[1], parts[0]] if self.middle is None else [[self.prefix, *parts[1]], [self.middle, *before]]
        elif self.middle is not None:
            parts.append([self.middle])
        left = math.inf if room is None else room - len(begin) - sum(map(len, parts))
        return [*begin, *self._files(extra, document, left), *chain.from_iterable(parts)]

    def _files(self, extra: Sequence[Mapping[str, str]], document: str, room: float) -> list[int]:
        """Token ids of other files, of the last ones that fit, and of the name of the document."""
        files = [self._file(each.get("filename", ""), f"{each['text']}\n") for each in extra]
        first = [] if self.repository is None else [self.repository, *self._plain(_REPOSITORY_NAME)]
        last = self._file(document, "")
        while files and len(first) + sum(map(len, files)) + len(last) > room:
            del files[0]
        return [*first, *chain.from_iterable(files), *last] if files else []

    def _file(self, name: str, text: str) -> list[int]:
        """A file with its name; where the model has no token for the name, in a comment, as DeepSeek-Coder has it."""
        if self.file is None:
            return self._plain(f"#{name}\n{text}" if name else text)
        return [self.file, *self._plain(f"{name}\n{text}")]

    def _texts(self, prefix: str, suffix: str, room: int | None) -> tuple[list[int], list[int]]:
        """Token ids of the end of the prefix and of the beginning of the suffix that fit."""
        if room is None:
            return self._plain(prefix), self._plain(suffix, continued=True)
        before = self._plain(_end_of(prefix, room * _CHARACTERS))
        after = self._plain(suffix[: room * _CHARACTERS], continued=True)
        if len(before) + len(after) > room:
            step = max(room // _STEPS, 1)
            after = after[: max(room // 4, (room - len(before)) // step * step)]
        return _end_of(before, room - len(after)), after

    def _plain(self, text: str, *, continued: bool = False) -> list[int]:
        """Token ids of a text in which special tokens are plain text; `continued` does without a dummy prefix."""
        ids: list[int] = []
        # Some of these tokens are not special for the tokenizer, so each is encoded in two pieces.
        for part in _INSIDE_TOKENS.split(text):
            ids += self.tokenizer.encode_plain(part)
        if continued and ids and self.tokenizer.written(ids[0]).startswith(_DUMMY_PREFIX):
            lead = self.tokenizer.encode_plain("\n")
            led = self._plain(f"\n{text}")
            return led[len(lead) :] if led[: len(lead)] == lead else ids
        return ids


_TOKEN_TEXTS: Final = (*(text for texts in _MARKERS for text in texts if text), *_FILES, *_REPOSITORIES, *_FURTHER_ENDS)
_INSIDE_TOKENS: Final = re.compile(
    "|".join(f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in _TOKEN_TEXTS)
)
"""The places behind the first character of a token's text."""


def _end_of(items: _Items, most: int) -> _Items:
    """At most this number of items from the end, of which the first is the same for many lengths."""
    step = max(most // _STEPS, 1)
    return items[max(-(-(len(items) - most) // step), 0) * step :]
