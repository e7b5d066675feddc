"""How a byte-level tokenizer splits text before it merges, by the name that llama.cpp gives the way.

The patterns are the models' own, as their tokenizer.json state them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2: Final = _CONTRACTIONS + _WORDS + r"\p{N}" + _REST
_LLAMA3: Final = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One way of splitting."""

    patterns: tuple[str, ...]
    """Regular expressions, each applied to the pieces of the one before."""
    composes: bool = False
    """Whether text is first brought to Unicode's composed form (NFC)."""
    whole_words: bool = False
    """Whether a piece that is a token is taken without merging."""
    adds_bos: bool = False
    """Whether a text starts with the beginning-of-text token unless the file says otherwise."""

    def normalizer(self) -> Mapping[str, Any] | None:
        """The `normalizer` of tokenizer.json."""
        return {"type": "NFC"} if self.composes else None

    def pre_tokenizer(self) -> Mapping[str, Any]:
        """The `pre_tokenizer` of tokenizer.json."""
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        return {"type": "Sequence", "pretokenizers": [*splits, BYTE_LEVEL]}


BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}

_BY_LLAMA3: Final = PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True)
_BY_DIGIT: Final = PreTokenizer((r"\p{N}", _GPT2))
_BY_GPT2: Final = PreTokenizer((_GPT2,))

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _BY_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "megrez"), PreTokenizer((_QWEN2,), composes=True)),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), PreTokenizer((_QWEN2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "command-r"), _BY_DIGIT),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _BY_GPT2),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""Ways of splitting by tokenizer.ggml.pre."""
