"""The app keeps the KV caches of system prompts on disk: a later start continues from them, within a limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.app_server import running_app
from support.app_windows import Window, new_conversation, send, window

SYSTEMS = ("the one who is on to the other " * 8, "and at the end of it is the one " * 8)


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
    first, second = SYSTEMS
    with page_of(tiny_bundle, cache) as (page, _):
        expected = asked(page, first)
        assert expected[1] == 0
    (kept,) = files(cache)
    # Room for one file and a half: what is used longest ago goes.
    limit = ["--prefix-disk", f"{kept.stat().st_size * 3 // 2}B"]
    with page_of(tiny_bundle, cache, *limit) as (page, lines):
        text, reused = asked(page, first)
        assert text == expected[0]
        assert reused >= 64
        other = asked(page, second)
        assert other[1] == 0
    assert not kept.exists()
    (newer,) = files(cache)
    good = newer.read_bytes()
    newer.write_bytes(good[:500] + os.urandom(len(good) - 500))
    with page_of(tiny_bundle, cache, *limit) as (page, lines):
        assert asked(page, second) == other, "what is damaged is read again"
    assert newer.read_bytes() == good
    assert not [line for line in lines if "prefix" in line]


def test_without_room_the_app_answers_and_says_so_once(tiny_bundle: Path, cache: Path) -> None:
    with page_of(tiny_bundle, cache, "--prefix-disk", "1KB") as (page, lines):
        assert [asked(page, system)[1] for system in SYSTEMS] == [0, 0]
    assert not files(cache)
    assert len([line for line in lines if "a prefix is not kept on disk: it takes" in line]) == 1
