"""The tokenizer of a model, with its special and end-of-sequence tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, TypeVar

from ...errors import BundleError, InputError
from ...models.bundle import Bundle
from ...models.json_file import is_whole, shown
from ...models.variants import GENAI_CONFIG
from .message_marks import MessageMarks, PlainEncoding
from .tokenizer_library import decode_ids, encode_text, failures_as, is_failure, read_tokenizer, reason

_Encoded = TypeVar("_Encoded")
_PROBE: Final = "The 2 a-b.\n"
"""A text that is tokenized when a tokenizer is loaded, so that most defects show before the first prompt."""
_HINT: Final = "use the tokenizer that belongs to this model"
_REPLACEMENT: Final = "\ufffd"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CACHED: Final = 1 << 14
"""Number of tokens whose bytes are kept: more than the alternatives of a long answer."""


class TextTokenizer:
    """Converts between text and token ids."""

    def __init__(self, bundle: Bundle, vocab_size: int) -> None:
        """Read `tokenizer.json` and the configuration files beside it.

        Args:
            bundle: the model's files.
            vocab_size: number of token ids that the model has.

        Raises:
            BundleError: tokenizer.json is missing or damaged, or has token ids that the model does not have.
        """
        path = bundle.file("tokenizer.json")
        if path is None:
            hint = "put the model's tokenizer.json beside the graph, or give it with --tokenizer"
            raise BundleError(f"{bundle.folder} holds no tokenizer.json", hint)
        self._path: Final = path
        self._vocab_size: Final = vocab_size
        self._tokenizer = read_tokenizer(
            path, lambda why: BundleError(f"{path} cannot be read: {why}", "give the tokenizer.json of this model")
        )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Look the last ids up one by one: the whole vocabulary as a dictionary is slow and large.
        count = self._tokenizer.get_vocab_size(with_added_tokens=True)
        beyond = [
            i for i in range(vocab_size, vocab_size + max(count, 1)) if self._tokenizer.id_to_token(i) is not None
        ]
        added = self._tokenizer.get_added_tokens_decoder()
        self._check_ids([*beyond, *added])
        self.config: Final = bundle.json_file("tokenizer_config.json")
        self.special_ids: Final = frozenset(token_id for token_id, token in added.items() if token.special)
        self.marks: Final = MessageMarks(token.content for token in added.values() if token.special)
        self._plain: PlainEncoding | None = None
        """Encodes texts with special tokens in messages; made for the first of them."""
        self.eos: Final = self._find_eos(bundle, vocab_size)
        self.decode(self.encode(_PROBE, add_special_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written out in it become special tokens.

        Raises:
            BundleError: the tokenizer fails, or gives token ids that the model does not have.
            InputError: the text contains lone surrogates, which are not valid Unicode.
        """
        ids = self._encoded(lambda: encode_text(self._tokenizer, text, add_special_tokens=add_special_tokens), text)
        self._check_ids(ids)
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Token ids of two texts as one, with the tokens that the tokenizer adds, and their type ids.

        Errors are those of `encode`.
        """
        pair = self._encoded(lambda: self._tokenizer.encode(first, second), first + second)
        self._check_ids(pair.ids)
        return pair.ids, pair.type_ids

    def _encoded(self, encode: Callable[[], _Encoded], text: str) -> _Encoded:
        """What the library returns for a text; errors as for `encode`."""
        with failures_as(self._failure, text):
            try:
                return encode()
            except (UnicodeEncodeError, TypeError) as error:
                raise InputError("the text is not valid Unicode", "remove the lone surrogate characters") from error

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which the texts of special tokens are plain text too; errors as for `encode`."""
        marked = self.marks.mark({"text": text}, "")
        if marked is None:
            return self.encode(text, add_special_tokens=False)
        values, mark = marked
        return self.encode_marked(values["text"], mark)

    def encode_marked(self, marked: str, mark: str) -> list[int]:
        """Token ids of a text in which special tokens with a mark in them are plain text.

        Where no special token has a mark in it, `encode` gives the same ids for the text without marks.

        Raises:
            BundleError: the tokenizer fails, or gives token ids that the model does not have.
            InputError: the text contains lone surrogates, which are not valid Unicode.
        """
        text = marked.replace(mark, "")
        ids = self.encode(text, add_special_tokens=False)
        own = self.marks.own_tokens(marked, mark)
        if own == self.marks.own_tokens(text) and self._count_special(ids) <= len(own):
            return ids
        with failures_as(self._failure, text):
            plain = self._plain
            if plain is None or any(each in text for each in (plain.border, *plain.stand_ins.values())):
                plain = self._plain = PlainEncoding(self._tokenizer, text)
            written = self.marks.replace_own(marked, mark, plain.stand_ins.__getitem__)
            ids = plain.encode(written.replace(mark, ""))
            if self._count_special(ids) > len(own):
                # The model itself has a special token among its words: let no word go past a mark.
                ids = plain.encode(written.replace(mark, plain.border))
        self._check_ids(ids)
        return ids

    def _count_special(self, ids: Sequence[int]) -> int:
        """Number of special tokens, without the one for unknown text, which any text may have."""
        unknown = self._tokenizer.token_to_id(self.token_text("unk_token") or "<unk>")
        return sum(token in self.special_ids and token != unknown for token in ids)

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def source(self) -> str:
        """The text of tokenizer.json, for libraries that read it themselves.

        Raises:
            BundleError: the file cannot be read any more.
        """
        try:
            return self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise self._failure(str(error)) from error

    def decode(self, ids: list[int]) -> str:
        """Text of `ids` without special tokens; incomplete UTF-8 becomes U+FFFD.

        Raises:
            BundleError: the tokenizer fails.
        """
        try:
            return decode_ids(self._tokenizer, ids)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise self._failure(reason(error)) from error

    def written(self, token_id: int) -> str:
        """A token as the vocabulary writes it; empty for an id without a token."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token or ""

    def token_id(self, text: str) -> int | None:
        """Id of the token that the vocabulary writes as `text`; None if there is none."""
        token: int | None = self._tokenizer.token_to_id(text)
        return token

    def special_id(self, text: str) -> int | None:
        """Id of the special token that is written as `text`; None if there is none."""
        token = self.token_id(text)
        return token if token in self.special_ids else None

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of single tokens."""
        return TokenBytes(self)

    def line_ends(self) -> frozenset[int]:
        """Ids of the tokens that end a line."""
        return frozenset(each for each in range(self._vocab_size) if self.token_bytes.of(each).endswith(b"\n"))

    def token_text(self, name: str) -> str | None:
        """Text of the token that tokenizer_config.json names `name`, such as `bos_token`; None if it names none.

        Raises:
            BundleError: the entry is not text.
        """
        value: Any = self.config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise BundleError(f"tokenizer_config.json: {name} is {value!r:.60}", "it must be text")
        return value

    def _failure(self, why: str) -> BundleError:
        return BundleError(f"{self._path} fails: {why}", _HINT)

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raise if the tokenizer has given an id beyond the model's vocabulary, as its own settings may."""
        if ids and (last := max(ids)) >= self._vocab_size:
            raise BundleError(
                f"{self._path} has token ids up to {last}, but the model's vocabulary has {self._vocab_size}", _HINT
            )

    def _find_eos(self, bundle: Bundle, vocab_size: int) -> frozenset[int]:
        """End-of-sequence ids: what the first configuration file with some lists, and the tokenizer's eos_token."""
        generation = bundle.json_file("generation_config.json")
        configs = {"generation_config.json": generation, "config.json": bundle.config, GENAI_CONFIG: bundle.genai}
        found = {name: config.get("eos_token_id") for name, config in configs.items()}
        name = next((name for name, value in found.items() if value is not None), "config.json")
        value = found[name]
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(is_whole(token, 0) and token < vocab_size for token in listed):
            raise BundleError(
                f"{bundle.folder / name}: eos_token_id is {shown(value)}",
                f"it must be an id, or a list of ids, below {vocab_size}",
            )
        text = self.token_text("eos_token")
        with failures_as(self._failure):
            named = self._tokenizer.token_to_id(text) if text else None
        return frozenset(listed if named is None else (*listed, named))


class TokenBytes:
    """Looks up the bytes of tokens.

    The text of a token that decodes to whole characters is its text after another token, so that its leading space
    stays. Of a token that is part of a character, the bytes are in its name: byte-level vocabularies write every byte
    as a character, byte-fallback vocabularies write `<0xE2>`.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor: Final = anchor if tokenizer.decode(anchor) else []
        self._anchor_text: Final = tokenizer.decode(self._anchor)
        self.of: Final = lru_cache(maxsize=_CACHED)(self._of)
        """Bytes that a token adds to a text; empty for a special token, which is not part of the text."""

    def shown(self, token_id: int) -> str:
        """A token as text: a special token as it is written, U+FFFD for a part of a character."""
        if token_id in self._tokenizer.special_ids:
            return self._tokenizer.written(token_id)
        return self.of(token_id).decode("utf-8", "replace")

    def _of(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        if token_id in tokenizer.special_ids:
            return b""
        joined = tokenizer.decode([*self._anchor, token_id])
        alone = joined.removeprefix(self._anchor_text)
        text = tokenizer.decode([token_id]) if alone == joined else alone
        if _REPLACEMENT in text:
            written = tokenizer.written(token_id)
            if byte := _BYTE_TOKEN.fullmatch(written):
                return bytes([int(byte[1], 16)])
            if all(char in _BYTE_OF_CHARACTER for char in written):
                return bytes(_BYTE_OF_CHARACTER[char] for char in written)
        return text.encode()


_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS: Final = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF_CHARACTER: Final = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(256 + number): byte for number, byte in enumerate(_OTHERS)},
}
"""The bytes that characters of byte-level vocabularies (GPT-2's) stand for: printable ones stand for themselves."""
