"""Command-line options that several commands share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ...models.byte_sizes import parse_bytes
from ...models.progress import Progress, silent
from ...runtime.devices.power import Power
from ...runtime.engine import Engine
from ...runtime.engine_loading import load
from ...runtime.kv.cache_scales import KVFormat
from ...runtime.kv.prefix_files import DEFAULT_DISK_BYTES
from ...runtime.overflow import Overflow
from ...runtime.prefill import PrefillMode
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
    str,
    typer.Option(
        metavar="NAME",
        help="Where to run: auto (what edge-run tune measured to be fastest, else the CPU), cpu, gpu, npu, "
        "or a name that edge-run devices shows, such as webgpu:0.",
    ),
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
KV = Annotated[
    KVFormat,
    typer.Option(
        "--kv",
        help="Element type of the KV cache. int8, on the CPU, takes a quarter of the memory at a small loss of "
        "quality, which edge-run verify --kv int8 measures. A token becomes faster, drafts and long prompts slower.",
    ),
]
Prefill = Annotated[
    PrefillMode,
    typer.Option(
        "--prefill",
        help="What reads prompts on the CPU: plain for the model itself, int8 for a copy with int8 weights, which is "
        "faster with long prompts, takes disk and memory, and changes the KV cache a little. auto uses the copy once "
        "it was made, found faster and as good: edge-run tune sees to it, and so do chats while they are idle.",
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
PrefixDisk = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Disk space for the KV caches of prefixes (long documents, system messages of chats) of all models "
        "together; the least recently used are removed first. 0 for none.",
        show_default=f"{DEFAULT_DISK_BYTES >> 30}GiB",
    ),
]
ToolFormatName = Annotated[
    str,
    typer.Option(
        "--tool-format",
        metavar="NAME",
        help="How the model writes calls of functions: auto for what its chat template says, the name of a format "
        "(docs/tools.md lists them), or none to leave calls in the text. Example: --tool-format hermes",
    ),
]
OverflowPolicy = Annotated[
    Overflow | None,
    typer.Option(
        "--overflow",
        help="What happens where a conversation is longer than the context: trim leaves out the oldest turns, also "
        "while a long answer is written; window keeps the first tokens, the system message and the newest tokens; "
        "error gives up a prompt that is too long.",
        show_default="error; chats leave out the oldest turns of a prompt",
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
DraftDevice = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Where the draft model runs: auto (the CPU), cpu, gpu, npu, or the name of an execution provider. On "
        "another device than the model's it drafts while the model verifies. Example: --device gpu --draft-device cpu",
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


def prefix_cache_bytes(size: str | None) -> int | None:
    """The value of `--prefix-cache` in bytes; None where it is not given.

    Raises:
        InputError: it is not a size.
    """
    return None if size is None else parse_bytes(size, "--prefix-cache")


def prefix_disk_bytes(size: str | None) -> int:
    """The value of `--prefix-disk` in bytes.

    Raises:
        InputError: it is not a size.
    """
    return DEFAULT_DISK_BYTES if size is None else parse_bytes(size, "--prefix-disk")


@dataclass(frozen=True)
class ModelOptions:
    """Which model a command opens, and how; see `runtime.engine_loading.load`."""

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
    prefix_disk: int = DEFAULT_DISK_BYTES
    overflow: Overflow | None = None
    power: Power = Power.PERFORMANCE
    """Commands that measure run a model as fast as they can, also on battery."""
    parallel: int = DEFAULT_PARALLEL
    max_waiting: int = DEFAULT_MAX_WAITING
    kv: KVFormat = KVFormat.FLOAT
    draft_device: str = "auto"
    prefill: PrefillMode = PrefillMode.AUTO
    tool_format: str = "auto"

    def for_another_process(self) -> dict[str, Any]:
        """What decides which tokens a model computes and how, as JSON values: arguments of `edgerun.load`."""
        return {
            "device": self.device,
            "threads": self.threads,
            "context": self.context,
            "draft": self.draft,
            "cache": self.cache,
            "kv": self.kv.value,
            # Checks of exactness compare texts whose prompts were read by the model's own graph.
            "prefill": PrefillMode.PLAIN.value,
        }

    def open(self, progress: Progress = silent) -> Engine:
        """Load the model.

        Args:
            progress: receives the progress of what an answer waits for.

        Raises:
            EdgeError: the model cannot be opened on this device; see `runtime.engine_loading.load`.
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
            prefix_disk=self.prefix_disk,
            overflow=self.overflow,
            power=self.power,
            parallel=self.parallel,
            max_waiting=self.max_waiting,
            kv=self.kv,
            draft_device=self.draft_device,
            prefill=self.prefill,
            tool_format=self.tool_format,
        )
