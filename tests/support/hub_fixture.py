"""The environment of tests that use the test hub server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub.utils
import pytest
from huggingface_hub import constants

from support.hub_server import HubServer

_OF_THE_USER = ("HF_", "HUGGING", "TRANSFORMERS_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""Beginnings of the names of variables, in either case."""


@contextmanager
def own_hub(folder: Path) -> Iterator[HubServer]:
    """Run a test hub server instead of the real hub, with `folder` as HF_HOME and without a log-in."""
    with HubServer() as hub, pytest.MonkeyPatch.context() as patch:
        for name in [each for each in os.environ if each.upper().startswith(_OF_THE_USER)]:
            patch.delenv(name)
        patch.setenv("HF_HUB_OFFLINE", "0")  # set, so that the value that --offline sets is restored
        patch.setenv("HF_HOME", str(folder))
        patch.setenv("HF_ENDPOINT", hub.url)
        # The library reads this from the environment when it is imported.
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
        yield hub
        close_connections()


def partial_files(folder: Path) -> list[Path]:
    """The files of downloads that are not complete, below HF_HOME; folders may go away meanwhile."""
    # `walk` goes on where a folder that it has listed is gone; `rglob` does not.
    walked = ((Path(below), names) for below, _, names in os.walk(folder))
    return [below / name for below, names in walked if below.name == "partial" for name in names]


def close_connections() -> None:
    """Close the connections that the hub library keeps open until Python ends."""
    for name in ("close_session", "reset_sessions"):  # the name since release 1.0, and the older one
        if hasattr(huggingface_hub.utils, name):
            getattr(huggingface_hub.utils, name)()
            break
