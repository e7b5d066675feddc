"""What an answer is made of: chunks while it is written, a reply when it is whole, and the account of its cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .decode import FinishReason


@dataclass(frozen=True)
class Stats:
    """What an answer cost. Times are seconds."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens whose cache rows were there from the turn before."""
    completion_tokens: int = 0
    """Tokens the model produced, the end-of-sequence token included."""
    target_passes: int = 0
    """Passes over the model's weights, the prompt's included."""
    decode_passes: int = 0
    """Passes after the first token."""
    first_token_s: float = 0.0
    """From the request to the first token."""
    total_s: float = 0.0
    """From the request to the end."""

    @property
    def decode_tokens_per_second(self) -> float:
        """Rate after the first token; 0 when there was no second one."""
        seconds = self.total_s - self.first_token_s
        return (self.completion_tokens - 1) / seconds if self.completion_tokens > 1 and seconds > 0 else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens each pass after the first token has given; 1 without speculation."""
        return (self.completion_tokens - 1) / self.decode_passes if self.decode_passes else 1.0


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer; the last one carries `finish_reason` and `stats`, and may have no text."""

    text: str
    finish_reason: FinishReason | None = None
    stats: Stats | None = None


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    text: str
    finish_reason: FinishReason
    stats: Stats

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Reply:
        """Gather a stream that runs to its end."""
        pieces: list[str] = []
        for chunk in chunks:
            pieces.append(chunk.text)
            if chunk.finish_reason is not None and chunk.stats is not None:
                return cls("".join(pieces), chunk.finish_reason, chunk.stats)
        raise ValueError("the stream ended without a last chunk")
