"""Ids of models on the Hugging Face Hub: `org/name[:variant][@revision]`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ...errors import InputError

_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_ID: Final = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<variant>[^@]*))?(?:@(?P<revision>.*))?")
_LOOSE: Final = re.compile(r"[\w.-]+/[\w.-]+(?:[:@].*)?")
"""Text that is meant as an id and not as a path, whether it is valid or not."""
_WORD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_HINT: Final = "write org/name, org/name:variant or org/name:variant@revision"


@dataclass(frozen=True)
class HubId:
    """Id of a model on the hub."""

    repo: str
    """`org/name`."""
    variant: str | None = None
    """A precision, a folder or a file of the repository; None for the one that suits the device best."""
    revision: str | None = None
    """A branch, tag or commit; None for the main branch."""

    def __str__(self) -> str:
        return self.repo + (f":{self.variant}" if self.variant else "") + (f"@{self.revision}" if self.revision else "")


def looks_like_hub_id(name: str) -> bool:
    """Return whether a name has the form of an id: two words around one slash, without the suffix of a model file."""
    repo = re.split("[:@]", name, maxsplit=1)[0]
    return _LOOSE.fullmatch(name) is not None and repo[0] not in ".~" and not repo.endswith((".onnx", ".gguf"))


def parse_hub_id(name: str) -> HubId:
    """Parse `org/name[:variant][@revision]`.

    Raises:
        InputError: the text is not a valid id.
    """
    match = _ID.fullmatch(name)
    if match is None or "--" in match["repo"] or ".." in match["repo"] or match["repo"].endswith(".git"):
        raise InputError(f"{name!r} is not an id of a model on the Hugging Face Hub", _HINT)
    for part in ("variant", "revision"):
        if match[part] is not None and not _WORD.fullmatch(match[part]):
            raise InputError(f"the {part} in {name!r} is not valid", _HINT)
    return HubId(match["repo"], match["variant"], match["revision"])
