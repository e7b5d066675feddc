"""Spreading the cases of a long test over the everyday and the nightly run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

NEW_EXAMPLES = bool(os.environ.get("EDGERUN_NEW_EXAMPLES"))


def some_nightly(cases: Iterable[Any], every: int) -> list[Any]:
    """All cases of a parametrized test: one in `every`, the first included, runs every day, the others nightly."""
    return [
        pytest.param(case, marks=pytest.mark.nightly) if number % every else case for number, case in enumerate(cases)
    ]


def examples(count: int) -> int:
    """Number of examples of a property test: all of those it names nightly, and every day a third, at least 20."""
    return count if NEW_EXAMPLES else max(count // 3, min(count, 20))
