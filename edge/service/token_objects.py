"""Tokens of answers as JSON objects: what is kept with a message, and shown by the app."""

from __future__ import annotations

from typing import Any, Final

from ...runtime.speculation.token_origin import OriginKind
from ...runtime.token_logprobs import TokenLogprob

_IMPOSSIBLE: Final = -9999.0
"""Stands for the log-probability of an impossible token, as in OpenAI's API: JSON has no infinite number."""


def json_logprob(token: TokenLogprob) -> float:
    """The log-probability of a token as a finite number."""
    return max(token.logprob, _IMPOSSIBLE)


def token_object(token: TokenLogprob) -> dict[str, Any]:
    """A token of an answer with its probability, its alternatives and how it came to be.

    Args:
        token: one of `Chunk.logprobs` or `Reply.logprobs`.

    Returns:
        `id`, `text`, `logprob` (natural logarithm), `top` (the most probable tokens at this position, each with an
        `id`, a `text` and a `logprob`), `kind` (an `OriginKind`), `drafter` and `rejected` (texts, or None). The text
        of a token that is a part of a character is U+FFFD.
    """
    origin = token.origin
    return {
        **_plain_object(token),
        "top": [_plain_object(other) for other in token.top],
        "kind": (OriginKind.DECODED if origin is None else origin.kind).value,
        "drafter": None if origin is None else origin.drafter,
        "rejected": None if origin is None else origin.rejected,
    }


def _plain_object(token: TokenLogprob) -> dict[str, Any]:
    return {"id": token.token_id, "text": token.text, "logprob": json_logprob(token)}
