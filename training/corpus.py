"""Pairs of request and command from the two corpora, and the held-out pairs."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TLDR_FILE = Path("corpora/tldr_chat.jsonl")
NL2BASH_REQUESTS = Path("corpora/nl2bash/all.nl")
NL2BASH_COMMANDS = Path("corpora/nl2bash/all.cm")
HELDOUT_FILE = Path("weights/shell-helper/heldout.jsonl")


@dataclass(frozen=True)
class Pair:
    """One request and the command that answers it."""

    source: str
    request: str
    command: str
    tool: str
    """Name of the manual page (tldr-pages), or the first word of the command."""
    about: str = ""
    """One-line description of the page; empty if the corpus has none."""
    platform: str = "common"

    @property
    def key(self) -> tuple[str, str]:
        """Key for comparing pairs that ignores letter case, spacing and closing punctuation."""
        return pair_key(self.request, self.command)


def pair_key(request: str, command: str) -> tuple[str, str]:
    """Normalize (request, command), so that a held-out pair is recognized in other spelling."""
    return re.sub(r"\s+", " ", request).strip(" .!?").lower(), re.sub(r"\s+", " ", command).strip()


def data_folder(option: Path | None) -> Path:
    """The data folder: the command-line option, else the environment variable EDGERUN_DATA."""
    if option is None and not os.environ.get("EDGERUN_DATA"):
        raise FileNotFoundError("no data folder is given: pass --data FOLDER or set EDGERUN_DATA")
    folder = option if option is not None else Path(os.environ["EDGERUN_DATA"])
    if not folder.is_dir():
        raise FileNotFoundError(f"the data folder {folder} does not exist")
    return folder


def load_tldr(data: Path) -> list[Pair]:
    """Read the tldr-pages pairs (CC BY 4.0)."""
    pairs = []
    with (data / TLDR_FILE).open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            request, command = row["messages"][0]["content"], row["messages"][1]["content"]
            pairs.append(Pair("tldr-pages", request, command, row["command"], row["about"], row["platform"]))
    return pairs


def load_nl2bash(data: Path) -> list[Pair]:
    """Read the NL2Bash pairs (MIT)."""
    requests = (data / NL2BASH_REQUESTS).read_text(encoding="utf-8").splitlines()
    commands = (data / NL2BASH_COMMANDS).read_text(encoding="utf-8").splitlines()
    if len(requests) != len(commands):
        raise ValueError(f"NL2Bash files differ in length: {len(requests)} requests, {len(commands)} commands")
    return [
        Pair("nl2bash", request.strip(), command.strip(), first_word(command))
        for request, command in zip(requests, commands, strict=True)
        if request.strip() and command.strip()
    ]


def load_heldout(data: Path) -> list[Pair]:
    """Read the pairs that are used for evaluation only."""
    pairs = []
    with (data / HELDOUT_FILE).open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            pairs.append(Pair(row["source"], row["request"], row["command"], first_word(row["command"])))
    return pairs


def first_word(command: str) -> str:
    """The first word of a command, which is the tool that it runs."""
    words = command.split(maxsplit=1)
    return words[0] if words else ""


def without(pairs: Iterable[Pair], heldout: Iterable[Pair]) -> list[Pair]:
    """The pairs that are not held out."""
    excluded = {pair.key for pair in heldout}
    return [pair for pair in pairs if pair.key not in excluded]


def split_validation(pairs: Iterable[Pair], per_mille: int) -> tuple[list[Pair], list[Pair]]:
    """Split into (train, validation) by a hash of the pair.

    The split does not depend on the machine or the order, and all copies of a pair are in the same part.
    """
    train: list[Pair] = []
    validation: list[Pair] = []
    for pair in pairs:
        digest = hashlib.sha256("\0".join(pair.key).encode()).digest()
        part = validation if int.from_bytes(digest[:4], "big") % 1000 < per_mille else train
        part.append(pair)
    return train, validation
