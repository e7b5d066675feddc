"""The app keeps the KV caches of system prompts on disk: a later start continues from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.app_server import Window, new_conversation, running_app, send, window

SYSTEM = "the one who is on to the other " * 8


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@contextmanager
def page_of(model: Path, cache: Path, *options: str) -> Iterator[tuple[Window, list[str]]]:
    """A window of an app that is ended as Ctrl-C ends it, and what the app wrote to standard error."""
    home = cache.parent / "home"
    environment = {"EDGERUN_CACHE": str(cache)}
    with running_app(home, model, "--draft", "none", "--threads", "1", *options, **environment) as app:
        with app.entered() as client, window(app, client.cookies) as page:
            yield page, app.lines
        app.end()


def asked(page: Window, system: str) -> tuple[str, int]:
    """The answer to a question in a new conversation with a system prompt, and how many tokens were not read again."""
    conversation = new_conversation(page.client, system=system, sampling={"max_tokens": 6, "temperature": 0})
    answer = page.wait_for_end(send(page.client, conversation, "hello")["id"])
    assert answer["state"] == "length"
    return answer["content"], answer["stats"]["reused_tokens"]


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("prefixes/*/*.kv"))


def test_system_prompts_are_not_read_again_after_a_restart(tiny_bundle: Path, cache: Path) -> None:
    with page_of(tiny_bundle, cache) as (page, _):
        text, reused = asked(page, SYSTEM)
        assert reused == 0
    (kept,) = files(cache)
    # Without room for a file, it is said once that nothing is kept.
    with page_of(tiny_bundle, cache.with_name("small"), "--prefix-disk", "1KB") as (page, lines):
        assert [asked(page, system)[1] for system in (SYSTEM, f"and {SYSTEM}")] == [0, 0]
    assert not files(cache.with_name("small"))
    assert len([line for line in lines if "a prefix is not kept on disk: it takes" in line]) == 1
    with page_of(tiny_bundle, cache) as (page, lines):
        again, reused = asked(page, SYSTEM)
    assert again == text
    assert reused >= 64
    assert files(cache) == [kept]
    assert not [line for line in lines if "prefix" in line]
