"""`--offline`: the option of the commands that download models; the others heed HF_HUB_OFFLINE as it is set."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def _go_offline(wanted: bool) -> bool:
    # As the hub library is told, and every program that uses it: so nothing below needs to be handed the choice.
    if wanted:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return wanted


Offline = Annotated[
    bool, typer.Option("--offline", help="Do not ask the Hugging Face Hub for anything.", callback=_go_offline)
]
