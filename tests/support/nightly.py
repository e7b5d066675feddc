"""Spreading the cases of a long test over the everyday and the nightly run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_nightly(cases: Iterable[Any], every: int) -> list[Any]:
    """All cases of a parametrized test: one in `every`, the first included, runs every day, the others nightly."""
    return [
        pytest.param(case, marks=pytest.mark.nightly) if number % every else case for number, case in enumerate(cases)
    ]
