"""The functions that a request passes on its way to the forward pass are those of docs/how-it-works.md."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
from starlette.applications import Starlette

from support.serving import CHAT, asked, chat_body

ROOT = Path(__file__).resolve().parents[3]
LISTED = re.compile(r"^([a-z_.]+:[A-Za-z_.]+)", re.MULTILINE)
MOST_FRAMES, MOST_FILES, MOST_ENCODING = 12, 10, 5


def documented(heading: str) -> list[list[str]]:
    """The lists of calls below a heading of docs/how-it-works.md."""
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    return [LISTED.findall(block) for block in text.partition("\n## ")[0].split("```")[1::2]]


def stack_of(frame: FrameType | None) -> list[str]:
    """The functions of edge-run on a stack, the outermost first."""
    found = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("edgerun.") and not frame.f_code.co_name.startswith("<"):
            found.append(f"{module[8:]}:{frame.f_code.co_qualname}".replace(".<locals>", ""))
        frame = frame.f_back
    return found[::-1]


@pytest.fixture
def stacks(tiny_app: Starlette) -> dict[str, list[str]]:
    """The stack at the first call of each function while a request is answered."""
    found: dict[str, list[str]] = {}

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("edgerun."):
            name = frame.f_code.co_qualname
            if name not in found:
                found[name] = stack_of(frame)

    body = chat_body("one two three", max_tokens=2)
    assert asked(tiny_app, "POST", CHAT, json=body).status_code == 200  # the model is loaded
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        assert asked(tiny_app, "POST", CHAT, json=body).status_code == 200
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def test_a_request_reaches_the_pass_by_the_documented_way(stacks: dict[str, list[str]]) -> None:
    (listed, encoding) = documented("## The path of a request over HTTP")
    *at_the_loop, started = stacks["RequestService.start"]
    path = [*at_the_loop, *stacks["BoundGraph.forward"]]
    assert started == "edge.server.endpoints:RequestService.start"
    assert path == listed
    assert len(path) <= MOST_FRAMES
    assert len({name.partition(":")[0] for name in path}) <= MOST_FILES
    at = stacks["TextTokenizer.encode"]
    assert at[at.index(encoding[0]) :] == encoding
    assert len(encoding) <= MOST_ENCODING
