"""Command-line options that several commands share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ...models.progress import Progress, silent
from ...runtime.devices.power import Power
from ...runtime.engine import Engine, load
from ...runtime.scheduling.request_queue import DEFAULT_MAX_WAITING, DEFAULT_PARALLEL


def _go_offline(wanted: bool) -> bool:
    # The hub library, and every program that uses it, reads this variable, so no function has to pass the choice on.
    if wanted:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return wanted


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="An .onnx file, a model folder, or org/name on the Hugging Face Hub.",
        show_default="the bundled model",
    ),
]
Device = Annotated[
    str, typer.Option(metavar="NAME", help="Where to run: auto, cpu, gpu, npu, or the name of an execution provider.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Number of compute threads.",
        show_default="what edge-run tune found, else one per performance core; half as many with --power saver",
    ),
]
PowerMode = Annotated[
    Power,
    typer.Option(
        "--power",
        help="saver computes with fewer threads, which sleep between passes: slower, for less processor time. "
        "auto saves on battery.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=2, help="Maximum tokens of a conversation.", show_default="as many as the model allows"
    ),
]
Cache = Annotated[
    bool,
    typer.Option("--cache/--no-cache", help="Keep weights packed for this machine, and measurements of it, on disk."),
]
PrefixCache = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the KV caches of earlier answers, from which prompts with the same beginning continue: "
        "2GB, or 0 for none.",
        show_default="a quarter of the free memory",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="A tokenizer.json, or a folder that contains one.", show_default="the one beside the model"
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="Draft model: an .onnx file or a folder, auto for the draft that MODEL was exported with, or none.",
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prompts: JSON lines of Spec-Bench, HumanEval or GSM8K, or plain text.",
        show_default="the prompts that come with edge-run",
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Do not contact the Hugging Face Hub.", callback=_go_offline)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class ModelOptions:
    """Which model a command opens, and how; see `runtime.engine.load`."""

    model: str | None
    device: str = "auto"
    threads: int | None = None
    context: int | None = None
    tokenizer: Path | None = None
    draft: str | None = "auto"
    cache: bool = True
    history: bool = False
    learned: bool = True
    prefix_cache: int | None = None
    power: Power = Power.PERFORMANCE
    """Commands that measure run a model as fast as they can, also on battery."""
    parallel: int = DEFAULT_PARALLEL
    max_waiting: int = DEFAULT_MAX_WAITING

    def open(self, progress: Progress = silent) -> Engine:
        """Load the model.

        Args:
            progress: receives the progress of what an answer waits for.

        Raises:
            EdgeError: the model cannot be opened on this device; see `runtime.engine.load`.
        """
        return load(
            self.model,
            device=self.device,
            threads=self.threads,
            context=self.context,
            tokenizer=self.tokenizer,
            draft=self.draft,
            cache=self.cache,
            history=self.history,
            learned=self.learned,
            progress=progress,
            prefix_cache=self.prefix_cache,
            power=self.power,
            parallel=self.parallel,
            max_waiting=self.max_waiting,
        )
