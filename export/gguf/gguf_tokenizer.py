"""The tokenizer of a GGUF file, as tokenizer.json and tokenizer_config.json.

The llama and qwen families use two kinds: byte-level BPE (`gpt2`), whose merges are in the file, and SentencePiece BPE
(`llama`), whose merges are derived from the scores of its tokens as `transformers` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

from ...models.gguf_header import GgufHeader
from ...models.json_file import shown
from ...runtime.text.tokenizer_library import failures_as

_SPACE: Final = "\u2581"
"""The character that SentencePiece writes for a space."""
_END_TOKENS: Final = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
)
"""Special tokens that always end a turn or a text; many files name only one of those a model has."""


_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHER: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2: Final = _CONTRACTIONS + _WORDS + r"\p{N}" + _OTHER
_LLAMA3: Final = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _OTHER
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """How text is split before BPE merges are applied."""

    patterns: tuple[str, ...]
    """Regular expressions, each applied to the parts that the previous one produced."""
    nfc: bool = False
    """Whether text is first normalized to NFC."""
    ignore_merges: bool = False
    """Whether a part that is itself a token is encoded without merging."""
    adds_bos: bool = False
    """Whether a beginning-of-text token is added unless the file says otherwise."""


BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "megrez"), PreTokenizer((_QWEN2,), nfc=True)),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), PreTokenizer((_QWEN2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "command-r"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), PreTokenizer((_GPT2,))),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""Pre-tokenizers by the value of tokenizer.ggml.pre."""


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)
"""Token types in tokenizer.ggml.token_type."""


class GgufTokenizer:
    """The tokenizer of one file."""

    def __init__(self, metadata: GgufHeader, vocab_size: int) -> None:
        """Read the tokenizer of a model whose embedding has `vocab_size` rows.

        Raises:
            CheckpointError: keys are missing or contradict each other, or the kind of tokenizer is unknown.
        """
        self._metadata = metadata
        self._model = metadata.required(metadata.text, "tokenizer.ggml.model")
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
        self._types = metadata.counts("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
        self._require_as_long("tokenizer.ggml.token_type", self._types)
        self._ids = self._unique_ids()
        self._pre_tokenizer: PreTokenizer | None = None
        if self._model == "gpt2":
            name = metadata.required(metadata.text, "tokenizer.ggml.pre")
            if name not in PRE_TOKENIZERS:
                raise metadata.wrong(
                    f"tokenizer.ggml.pre {name[:40]!r} is not supported",
                    f"supported are {', '.join(sorted(PRE_TOKENIZERS))}",
                )
            self._pre_tokenizer = PRE_TOKENIZERS[name]
        self._bos, self._eos = self._token_id("bos", 1), self._token_id("eos", 2)
        adds_bos = metadata.flag("tokenizer.ggml.add_bos_token")
        usual = self._pre_tokenizer is None or self._pre_tokenizer.adds_bos
        self._adds_bos = usual if adds_bos is None else adds_bos
        self._adds_eos = metadata.flag("tokenizer.ggml.add_eos_token") is True

    def tokenizer_json(self) -> str:
        """Return the text of tokenizer.json.

        Raises:
            CheckpointError: the merges or scores do not fit the tokens.
        """
        pipeline = self._byte_level(self._pre_tokenizer) if self._pre_tokenizer else self._sentence_piece()
        options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = [  # matched in a text before it is split
            {"id": token, "content": text, **options, "special": self._is_special(token)}
            for text, token in self._ids.items()
            if self._is_special(token) or self._types[token] == _USER_DEFINED
        ]
        settings = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
        text = json.dumps(settings | pipeline, ensure_ascii=False)
        with failures_as(
            lambda why: self._metadata.wrong(f"the tokenizer is damaged: {why}", "download the file again")
        ):
            Tokenizer.from_str(text)
        return text

    def tokenizer_config(self) -> dict[str, Any]:
        """Return the settings of tokenizer_config.json, without the chat template."""
        named = {"bos_token": self._bos, "eos_token": self._eos, "unk_token": self._token_id("unknown")}
        named["pad_token"] = self._token_id("padding")
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: self._tokens[token] for name, token in named.items() if token is not None},
            "add_bos_token": self._adds_bos,
            "add_eos_token": self._adds_eos,
            "clean_up_tokenization_spaces": False,
        }

    def token_ids(self) -> dict[str, Any]:
        """Return `bos_token_id`, `eos_token_id` and `pad_token_id` as in generation_config.json."""
        end_ids = [self._eos, self._token_id("eot"), self._token_id("eom")]
        end_ids += [token for token in map(self._ids.get, _END_TOKENS) if token is not None and self._is_special(token)]
        unique = list(dict.fromkeys(token for token in end_ids if token is not None))
        ids = {
            "bos_token_id": self._bos,
            "eos_token_id": unique if len(unique) > 1 else next(iter(unique), None),
            "pad_token_id": self._token_id("padding"),
        }
        return {name: value for name, value in ids.items() if value is not None}

    def _byte_level(self, pre_tokenizer: PreTokenizer) -> dict[str, Any]:
        pairs = []
        for merge in self._metadata.required(self._metadata.texts, "tokenizer.ggml.merges"):
            cut = merge.find(" ", 1)  # a space at the start would be a token of its own
            if cut < 1:
                raise self._metadata.wrong(
                    f"tokenizer.ggml.merges holds {shown(merge)}", "each merge must name two tokens"
                )
            pairs.append([merge[:cut], merge[cut + 1 :]])
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in pre_tokenizer.patterns
        ]
        return {
            "normalizer": {"type": "NFC"} if pre_tokenizer.nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, BYTE_LEVEL]},
            "post_processor": self._post_processor(BYTE_LEVEL),
            "decoder": BYTE_LEVEL,
            "model": {"type": "BPE", "ignore_merges": pre_tokenizer.ignore_merges, "vocab": self._ids, "merges": pairs},
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
        """Return every way to merge two tokens into one, the tokens with higher scores first."""
        scores = self._metadata.required(self._metadata.numbers, "tokenizer.ggml.scores")
        self._require_as_long("tokenizer.ggml.scores", scores)
        candidates = {text: token for text, token in self._ids.items() if self._types[token] == _NORMAL}
        merges = []
        for text, token in candidates.items():
            halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
            known = [(left, right) for left, right in halves if left in candidates and right in candidates]
            known.sort(key=lambda pair: (candidates[pair[0]], candidates[pair[1]]))
            merges += [(scores[token], left, right) for left, right in known]
        merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
        return [(left, right) for _, left, right in merges]

    def _post_processor(self, default: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the post-processor that adds beginning- and end-of-text tokens; `default` where none is added."""
        bos = self._bos if self._adds_bos else None
        eos = self._eos if self._adds_eos else None
        if bos is None and eos is None:
            return default
        special = {self._tokens[token]: token for token in (bos, eos) if token is not None}

        def around(sequences: Sequence[str]) -> list[Mapping[str, Any]]:
            parts: list[Mapping[str, Any]] = []
            for type_id, sequence in enumerate(sequences):
                before, after = (
                    [] if token is None else [{"SpecialToken": {"id": self._tokens[token], "type_id": type_id}}]
                    for token in (bos, eos)
                )
                parts += [*before, {"Sequence": {"id": sequence, "type_id": type_id}}, *after]
            return parts

        return {
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": around("AB"),
            "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]} for text, token in special.items()},
        }

    def _is_special(self, token: int) -> bool:
        return self._types[token] == _CONTROL or (self._types[token] == _UNKNOWN and self._model == "llama")

    def _token_id(self, name: str, default: int | None = None) -> int | None:
        """Return the id of a special token; `default` applies to SentencePiece tokenizers."""
        key = f"tokenizer.ggml.{name}_token_id"
        token = self._metadata.count(key)
        if token is None and self._model == "llama" and default is not None and default < len(self._tokens):
            return default
        if token is not None and token >= len(self._tokens):
            raise self._metadata.wrong(f"{key} is {token}", f"the vocabulary has {len(self._tokens)} tokens")
        return token

    def find(self, text: str) -> int | None:
        """The id of a token by its text; None where the vocabulary lacks it."""
        return self._tokens.index(text) if text in self._tokens else None

    def _unique_ids(self) -> dict[str, int]:
        """Return the id of each token, without those that only pad the vocabulary."""
        ids: dict[str, int] = {}
        for token, text in enumerate(self._tokens):
            if self._types[token] == _UNUSED or not text:
                continue
            if text in ids:
                raise self._metadata.wrong(
                    f"tokenizer.ggml.tokens holds {shown(text)} twice, as {ids[text]} and {token}",
                    "export the model's Hugging Face checkpoint instead",
                )
            ids[text] = token
        return ids

    def _require_as_long(self, key: str, values: Sequence[object]) -> None:
        if len(values) != len(self._tokens):
            raise self._metadata.wrong(
                f"{key} has {len(values)} entries for {len(self._tokens)} tokens", "download the file again"
            )
