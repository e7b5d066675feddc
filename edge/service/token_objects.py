"""Tokens of answers as JSON objects: what is kept with a message, and shown by the app."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...errors import InputError
from ...runtime.speculation.rounds import OriginKind
from ...runtime.text.token_logprobs import TokenLogprob

_IMPOSSIBLE: Final = -9999.0
"""Stands for the log-probability of an impossible token, as in OpenAI's API: JSON has no infinite number."""

CHOSEN: Final = "chosen"
"""The `kind` of a token that a person has chosen; the others are values of `OriginKind`."""


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
        of a token that is a part of a character is U+FFFD. Special tokens, such as those that end an answer, also have
        `special`, which is True, and tokens from blocks `block_pass`.
    """
    origin = token.origin
    return {
        **_plain_object(token),
        "top": [_plain_object(other) for other in token.top],
        "kind": (OriginKind.DECODED if origin is None else origin.kind).value,
        "drafter": None if origin is None else origin.drafter,
        "rejected": None if origin is None else origin.rejected,
        **({} if origin is None or origin.block_pass is None else {"block_pass": origin.block_pass}),
    }


def chosen_object(token: Mapping[str, Any], alternative: int) -> dict[str, Any]:
    """The object of a token that a person has chosen in the place of another one.

    Args:
        token: the object of the token that it replaces.
        alternative: id of one of its alternatives.

    Returns:
        An object like the ones of `token_object`, whose `kind` is `chosen` and whose `rejected` is the replaced text.

    Raises:
        InputError: there is no such alternative.
    """
    chosen = next((dict(other) for other in token["top"] if other["id"] == alternative), None)
    if chosen is None:
        raise InputError(
            f"token {alternative} is not among the alternatives here", "choose one of those that are listed"
        )
    return {**chosen, "top": token["top"], "kind": CHOSEN, "drafter": None, "rejected": token["text"]}


def _plain_object(token: TokenLogprob) -> dict[str, Any]:
    special = {} if token.bytes else {"special": True}
    return {"id": token.token_id, "text": token.text, "logprob": json_logprob(token), **special}
