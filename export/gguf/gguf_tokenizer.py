"""The tokenizer in a GGUF file as the tokenizer.json and tokenizer_config.json of its checkpoint.

Two kinds exist among the llama and qwen families: byte-level BPE (`gpt2`), with its merges in the file, and
SentencePiece BPE (`llama`), whose merges follow from the scores of its pieces, as `transformers` derives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

from tokenizers import Tokenizer

from ...models.json_file import shown
from .gguf_metadata import GgufMetadata
from .pretokenizers import BYTE_LEVEL, PRE_TOKENIZERS, PreTokenizer

_SPACE: Final = "\u2581"
"""What SentencePiece writes for a space."""
_ENDINGS: Final = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")
"""Special tokens that end a turn or a text wherever they exist; many files name only one of a model's."""


class TokenKind(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GgufTokenizer:
    """The tokenizer of one file."""

    def __init__(self, metadata: GgufMetadata, vocab_size: int) -> None:
        """Read the vocabulary of a model whose embedding has `vocab_size` rows.

        Raises:
            CheckpointError: keys are missing or contradict each other, or the tokenizer is of an unknown kind.
        """
        self._metadata = metadata
        self._model = self._need_text("tokenizer.ggml.model")
        if self._model not in ("gpt2", "llama"):
            raise metadata.wrong(
                f"the tokenizer {self._model[:40]!r} is not supported", "supported are gpt2 (byte-level) and llama"
            )
        tokens = metadata.texts("tokenizer.ggml.tokens")
        if not tokens:
            raise metadata.missing("tokenizer.ggml.tokens")
        self._tokens: Final = tokens
        if len(tokens) > vocab_size:
            raise metadata.wrong(
                f"tokenizer.ggml.tokens has {len(tokens)} tokens, token_embd.weight {vocab_size} rows",
                "tokenizer and weights are not of the same model",
            )
        self._kinds = metadata.counts("tokenizer.ggml.token_type") or [TokenKind.NORMAL] * len(tokens)
        self._require_as_long("tokenizer.ggml.token_type", self._kinds)
        self._ids = self._unique_ids()
        self._splitting = self._find_splitting() if self._model == "gpt2" else None

    def tokenizer_json(self) -> str:
        """The text of tokenizer.json.

        Raises:
            CheckpointError: the merges or scores do not make a tokenizer of the tokens.
        """
        pipeline = self._byte_level(self._splitting) if self._splitting else self._sentence_piece()
        text = json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": self._added_tokens(),
                **pipeline,
            },
            ensure_ascii=False,
        )
        try:  # the library raises bare Exception for every defect
            Tokenizer.from_str(text)
        except Exception as error:
            raise self._metadata.wrong(f"its tokenizer is damaged: {error}", "download the file again") from error
        return text

    def tokenizer_config(self) -> dict[str, Any]:
        """The contents of tokenizer_config.json, chat template aside."""
        named = {"bos_token": self._bos(), "eos_token": self._eos()}
        named |= {"unk_token": self._token_id("unknown"), "pad_token": self._token_id("padding")}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: self._tokens[token] for name, token in named.items() if token is not None},
            "add_bos_token": self._adds_bos(),
            "add_eos_token": self._adds_eos(),
            "clean_up_tokenization_spaces": False,
        }

    def token_ids(self) -> dict[str, Any]:
        """`bos_token_id`, `eos_token_id` and `pad_token_id` as generation_config.json has them."""
        endings = [self._eos(), self._token_id("eot"), self._token_id("eom")]
        endings += [token for token in map(self._ids.get, _ENDINGS) if token is not None and self._is_special(token)]
        ends = list(dict.fromkeys(token for token in endings if token is not None))
        ids = {
            "bos_token_id": self._bos(),
            "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
            "pad_token_id": self._token_id("padding"),
        }
        return {name: value for name, value in ids.items() if value is not None}

    def _byte_level(self, splitting: PreTokenizer) -> dict[str, Any]:
        merges = self._metadata.texts("tokenizer.ggml.merges")
        if merges is None:
            raise self._metadata.missing("tokenizer.ggml.merges")
        pairs = []
        for merge in merges:
            cut = merge.find(" ", 1)  # not at the start, where a space would be a token of its own
            if cut < 1:
                raise self._metadata.wrong(f"tokenizer.ggml.merges holds {shown(merge)}", "each must name two tokens")
            pairs.append([merge[:cut], merge[cut + 1 :]])
        return {
            "normalizer": splitting.normalizer(),
            "pre_tokenizer": splitting.pre_tokenizer(),
            "post_processor": self._post_processor(BYTE_LEVEL),
            "decoder": BYTE_LEVEL,
            "model": {"type": "BPE", "ignore_merges": splitting.whole_words, "vocab": self._ids, "merges": pairs},
        }

    def _sentence_piece(self) -> dict[str, Any]:
        prefix = self._metadata.flag("tokenizer.ggml.add_space_prefix") is not False
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        restore = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
        after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        unknown = self._token_id("unknown", 0)
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*before, replace]},
            "pre_tokenizer": None,
            "post_processor": self._post_processor(None),
            "decoder": {"type": "Sequence", "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]},
            "model": {
                "type": "BPE",
                "unk_token": None if unknown is None else self._tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": self._ids,
                "merges": self._merges_by_score(),
            },
        }

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Every way to put a piece together from two, better pieces first."""
        scores = self._metadata.numbers("tokenizer.ggml.scores")
        if scores is None:
            raise self._metadata.missing("tokenizer.ggml.scores")
        self._require_as_long("tokenizer.ggml.scores", scores)
        pieces = {text: token for text, token in self._ids.items() if self._kinds[token] == TokenKind.NORMAL}
        merges = []
        for text, token in pieces.items():
            halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
            known = [(left, right) for left, right in halves if left in pieces and right in pieces]
            known.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
            merges += [(scores[token], left, right) for left, right in known]
        merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
        return [(left, right) for _, left, right in merges]

    def _post_processor(self, plain: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """What puts beginning and end of text around a text; `plain` where nothing does."""
        bos = self._bos() if self._adds_bos() else None
        eos = self._eos() if self._adds_eos() else None
        if bos is None and eos is None:
            return plain
        special = {self._tokens[token]: token for token in (bos, eos) if token is not None}

        def around(sequences: Sequence[str]) -> list[Mapping[str, Any]]:
            parts: list[Mapping[str, Any]] = []
            for place, sequence in enumerate(sequences):
                parts += [_special_part(self._tokens[bos], place)] if bos is not None else []
                parts.append({"Sequence": {"id": sequence, "type_id": place}})
                parts += [_special_part(self._tokens[eos], place)] if eos is not None else []
            return parts

        return {
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": around("AB"),
            "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]} for text, token in special.items()},
        }

    def _added_tokens(self) -> list[Mapping[str, Any]]:
        """Tokens that are found in a text before it is split."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": token, "content": text, **plain, "special": self._is_special(token)}
            for text, token in self._ids.items()
            if self._is_special(token) or self._kinds[token] == TokenKind.USER_DEFINED
        ]

    def _is_special(self, token: int) -> bool:
        return self._kinds[token] == TokenKind.CONTROL or (
            self._kinds[token] == TokenKind.UNKNOWN and self._model == "llama"
        )

    def _adds_bos(self) -> bool:
        asked = self._metadata.flag("tokenizer.ggml.add_bos_token")
        if asked is None:
            return self._splitting is None or self._splitting.adds_bos
        return asked

    def _adds_eos(self) -> bool:
        return self._metadata.flag("tokenizer.ggml.add_eos_token") is True

    def _bos(self) -> int | None:
        return self._token_id("bos", 1)

    def _eos(self) -> int | None:
        return self._token_id("eos", 2)

    def _token_id(self, name: str, default: int | None = None) -> int | None:
        """Id of a token that the file names; SentencePiece models have defaults."""
        key = f"tokenizer.ggml.{name}_token_id"
        token = self._metadata.count(key)
        if token is None and self._model == "llama" and default is not None and default < len(self._tokens):
            return default
        if token is not None and token >= len(self._tokens):
            raise self._metadata.wrong(f"{key} is {token}", f"the vocabulary has {len(self._tokens)} tokens")
        return token

    def _unique_ids(self) -> dict[str, int]:
        """Id by token, tokens that fill up the vocabulary left out."""
        ids: dict[str, int] = {}
        for token, text in enumerate(self._tokens):
            if self._kinds[token] == TokenKind.UNUSED or not text:
                continue
            if text in ids:
                raise self._metadata.wrong(
                    f"tokenizer.ggml.tokens holds {shown(text)} twice, as {ids[text]} and {token}",
                    "export the model's Hugging Face checkpoint instead",
                )
            ids[text] = token
        return ids

    def _find_splitting(self) -> PreTokenizer:
        name = self._need_text("tokenizer.ggml.pre")
        if name not in PRE_TOKENIZERS:
            raise self._metadata.wrong(
                f"tokenizer.ggml.pre {name[:40]!r} is not supported",
                f"supported are {', '.join(sorted(PRE_TOKENIZERS))}",
            )
        return PRE_TOKENIZERS[name]

    def _need_text(self, key: str) -> str:
        text = self._metadata.text(key)
        if text is None:
            raise self._metadata.missing(key)
        return text

    def _require_as_long(self, key: str, values: Sequence[object]) -> None:
        if len(values) != len(self._tokens):
            raise self._metadata.wrong(
                f"{key} has {len(values)} entries for {len(self._tokens)} tokens", "download the file again"
            )


def _special_part(text: str, place: int) -> Mapping[str, Any]:
    return {"SpecialToken": {"id": text, "type_id": place}}
