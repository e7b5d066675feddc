"""Compiles response formats; llguidance, which is an extra, is imported for the first one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from ...errors import missing_extra
from ..text.tokenizer import TextTokenizer
from .response_format import ResponseFormat

if TYPE_CHECKING:
    from .grammar import Grammar, Grammars


class FormatCompiler:
    """Compiles the response formats of an engine; what that takes is imported and made for the first one.

    Args:
        tokenizer: the model's.
        vocab_size: number of logits.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self._tokenizer: Final = tokenizer
        self._vocab_size: Final = vocab_size
        self._grammars: Grammars | None = None
        self._lock: Final = threading.Lock()

    def compile(self, response_format: ResponseFormat | None) -> Grammar | None:
        """The grammar of a format; None for free text.

        Raises:
            BundleError: grammars cannot be used with the model's tokenizer.
            InputError: the format is refused, or the package that compiles it is not installed.
        """
        if response_format is None:
            return None
        with self._lock:
            if self._grammars is None:
                with missing_extra("a response format", "structured"):
                    from .grammar import Grammars  # noqa: PLC0415 -- an extra, and slow to import
                self._grammars = Grammars(self._tokenizer, self._vocab_size)
            grammars = self._grammars
        return grammars.compile(response_format)

    def close(self) -> None:
        """End the thread that computes masks; calling it again does nothing."""
        if self._grammars is not None:
            self._grammars.close()
