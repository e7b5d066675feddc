"""What an answer begins with: tokens that the caller gives and the model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import InputError
from ...models.json_file import shown
from .detokenizer import StreamDecoder
from .tokenizer import TextTokenizer


@dataclass(frozen=True, eq=False)
class AnswerStart:
    """The tokens that an answer begins with, and the state of the detokenizer behind them.

    The state is that of an answer which was generated up to there, so that the text goes on as it would have.
    """

    token_ids: tuple[int, ...]
    text: str
    """Text of the tokens, without a character at their end that is not complete: the text that is generated begins
    with it."""
    _decoder: StreamDecoder

    @classmethod
    def of(
        cls, start: str | Sequence[int], tokenizer: TextTokenizer, *, vocab_size: int, ignore_eos: bool = False
    ) -> AnswerStart:
        """Make the start of an answer from a text, in which special tokens are plain text, or from token ids.

        Args:
            start: the text or the token ids; there may be none.
            tokenizer: the model's.
            vocab_size: number of token ids that the model has.
            ignore_eos: whether answers go on after end-of-sequence tokens.

        Raises:
            InputError: a token id is not one of the model's, or ends the answer.
        """
        token_ids = tokenizer.encode_plain(start) if isinstance(start, str) else [int(token) for token in start]
        for index, token in enumerate(token_ids):
            if not 0 <= token < vocab_size:
                raise InputError(
                    f"answer_start[{index}] is the token {token}", f"token ids of this model are 0 to {vocab_size - 1}"
                )
            if token in tokenizer.eos and not ignore_eos:
                raise InputError(
                    f"answer_start[{index}] is the end-of-sequence token {shown(tokenizer.written(token))}",
                    "leave it out: nothing follows it",
                )
        decoder = StreamDecoder(tokenizer)
        text = "".join([decoder.push((token,)) for token in token_ids])
        return cls(tuple(token_ids), text, decoder)

    def decoder(self, marks: Mapping[int, str] | None = None) -> StreamDecoder:
        """A detokenizer for what follows, which writes these special tokens."""
        return self._decoder.copy(marks)
