"""The model of a chat: its name, its introduction, and another in its place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from ....errors import BundleError, EdgeError
from ....models.find import BUNDLED_MODEL, bundled_folder, find_model, may_be_model, named_models
from ....models.hub.downloaded_model import read_downloaded
from ....models.progress import Progress, ProgressDisplay
from ....models.user_text import on_one_line
from ....runtime.engine import Engine
from ...service.offered_models import OfferedModels, capabilities_at
from ..output import waiting_shown

OpenModel: TypeAlias = Callable[[str | None, Progress], Engine]
"""Loads the model of a name, None for the bundled one; its answers report their progress."""

_CHAT_MODEL: Final = "onnx-community/Qwen2.5-0.5B-Instruct"
INTRODUCTION: Final = f"""\
This small model comes with edge-run. It turns a request into a shell command, without regard to earlier
ones, and it does not chat.
Ask for a command: find files larger than 100 MB
To get a model that chats: edge-run pull {_CHAT_MODEL}
and then: edge-run {_CHAT_MODEL}"""
NO_CHAT: Final = (
    "this model writes shell commands only, whatever it is asked; try: list open ports. /help says how to get another"
)


def model_name_of(engine: Engine) -> str:
    """The name by which a conversation remembers its model: its id in the app, or a path."""
    folder = engine.bundle.folder.resolve()
    downloaded = read_downloaded(folder)
    if downloaded is not None:
        return downloaded.id
    return next((name for name, path in named_models().items() if path.resolve() == folder), str(folder))


def short_name(name: str) -> str:
    """A model's name without the folders or the organization before it."""
    return Path(name).name or name


def is_bundled(engine: Engine) -> bool:
    """Whether this is the model that comes with edge-run."""
    return engine.bundle.folder.resolve() == bundled_folder().resolve()


def local_models() -> list[str]:
    """Names of the models on this machine that write texts, or do not say what they are for."""
    found = ((entry.id, capabilities_at(Path(entry.source))) for entry in OfferedModels([]).entries())
    return [name for name, capabilities in found if not capabilities or "completion" in capabilities]


def source_of(name: str) -> str:
    """What `edgerun.load` opens for a name: the name of a model on this machine, a path or an id on the hub.

    Raises:
        EdgeError: there is no such model.
    """
    for entry in OfferedModels([]).entries():
        if name in (entry.id, *entry.aliases) and not os.path.lexists(name):
            return entry.source
    if not may_be_model(name):
        raise BundleError(f"there is no model {name!r:.200}", f"on this machine are: {', '.join(local_models())}")
    return name


def is_here(name: str) -> bool:
    """Whether the model that a conversation remembers is on this machine."""
    return name in local_models() or (Path(name).is_absolute() and Path(name).exists())


class ChatModel:
    """The model that answers, which can be replaced by another.

    Args:
        open_model: loads a model.
        name: the first model; None for the bundled one.
        progress: shows what an answer waits for.

    Raises:
        EdgeError: it cannot be loaded.
    """

    def __init__(self, open_model: OpenModel, name: str | None, progress: ProgressDisplay) -> None:
        self.progress: Final = progress
        self._open_model = open_model
        self._source = name
        self.engine = self._open(name)

    def switch(self, name: str) -> None:
        """Load another model in place of this one, which is loaded again if that fails.

        Raises:
            EdgeError: it cannot be loaded.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        source = source_of(name)
        find_model(source)
        self.engine.close()
        try:
            self.engine = self._open(source)
            self._source = source
        except (EdgeError, KeyboardInterrupt):
            self.engine = self._open(self._source)
            raise

    @property
    def name(self) -> str:
        """Its name for people."""
        return short_name(model_name_of(self.engine))

    def close(self) -> None:
        """Free its memory."""
        self.engine.close()

    def _open(self, name: str | None) -> Engine:
        find_model(name)  # a download shows its own progress
        with waiting_shown(f"loading {on_one_line(short_name(name or BUNDLED_MODEL))}"):
            return self._open_model(name, self.progress)
