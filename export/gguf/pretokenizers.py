"""Pre-tokenizers of byte-level BPE, by their names in llama.cpp.

The regular expressions are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split before BPE merges are applied."""

    patterns: tuple[str, ...]
    """Regular expressions, each applied to the parts that the previous one produced."""
    nfc: bool = False
    """Whether text is first normalized to NFC."""
    ignore_merges: bool = False
    """Whether a part that is itself a token is encoded without merging."""
    adds_bos: bool = False
    """Whether a beginning-of-text token is added unless the file says otherwise."""

    def normalizer(self) -> Mapping[str, Any] | None:
        """Return the `normalizer` of tokenizer.json."""
        return {"type": "NFC"} if self.nfc else None

    def pre_tokenizer(self) -> Mapping[str, Any]:
        """Return the `pre_tokenizer` of tokenizer.json."""
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        return {"type": "Sequence", "pretokenizers": [*splits, BYTE_LEVEL]}


BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}

_LLAMA3_SPLIT: Final = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_DIGIT_SPLIT: Final = PreTokenizer((r"\p{N}", _GPT2))
_GPT2_SPLIT: Final = PreTokenizer((_GPT2,))

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3_SPLIT),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "megrez"), PreTokenizer((_QWEN2,), nfc=True)),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), PreTokenizer((_QWEN2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "command-r"), _DIGIT_SPLIT),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _GPT2_SPLIT),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""Pre-tokenizers by the value of tokenizer.ggml.pre."""
