"""A store of conversations in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgerun.edge.conversations.store import ConversationStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ConversationStore]:
    """A new store; a notice that something is wrong with its file fails the test."""
    with ConversationStore(tmp_path / "home" / "conversations.sqlite3", pytest.fail) as opened:
        yield opened
