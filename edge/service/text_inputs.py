"""Fields with one or several texts, each as a text or as token ids."""

from __future__ import annotations

from typing import Any, TypeAlias

from .message_fields import check_count
from .request_error import ErrorCode, RequestError
from .strict_json import RequestLimits

TokenIds: TypeAlias = tuple[int, ...]
TextOrIds: TypeAlias = str | TokenIds
"""A text, or its token ids."""
TextsOrIds: TypeAlias = str | list[str | int | list[int]]
"""A text, token ids, or several of one kind, as bodies have them."""


def texts_or_ids(param: str, given: TextsOrIds, limits: RequestLimits) -> tuple[TextOrIds, ...]:
    """The texts or token ids of a field that has one or several of them.

    Raises:
        RequestError: there are none or too many, one is empty, or they are of several kinds.
    """
    several: list[Any] = [given] if isinstance(given, str) or _are_ids(given) else list(given)
    check_count(param, len(several), limits.inputs)
    if not several:
        raise _invalid(param, f"{param} is empty", "give a text or token ids")
    if len({type(each) for each in several}) > 1:
        raise _invalid(param, f"{param} has items of several types", "give texts, or token ids, or lists of token ids")
    for index, each in enumerate(several):
        place = param if each is given else f"{param}[{index}]"
        if not each:
            raise _invalid(place, f"{place} is empty", "give a text or token ids")
        if not isinstance(each, str) and any(token < 0 for token in each):
            raise _invalid(place, f"{place} has the token id {min(each)}", "token ids are 0 or more")
    return tuple(each if isinstance(each, str) else tuple(each) for each in several)


def _are_ids(given: list[Any]) -> bool:
    return bool(given) and all(isinstance(each, int) for each in given)


def _invalid(param: str, what: str, hint: str) -> RequestError:
    return RequestError(what, hint, code=ErrorCode.INVALID_VALUE, param=param)
