"""Options of loading a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...errors import InputError
from ..devices.processor import Power
from ..kv.cache_scales import KVFormat
from ..kv.prefix_files import DEFAULT_DISK_BYTES
from ..overflow import Overflow
from ..prefill import PrefillMode
from ..scheduling.request_queue import DEFAULT_MAX_WAITING, DEFAULT_PARALLEL
from .argument_types import OptionRecord, documented, option

_BYTES = "a number of bytes, 0 or more"


@documented
@dataclass(frozen=True)
class LoadOptions(OptionRecord):
    """How a model is opened and run; see `load`."""

    device: str = option(
        "auto",
        "Where to run: auto (what edge-run tune measured to be fastest for the model, else the CPU), cpu, gpu, npu, or "
        "a name that edge-run devices shows, such as webgpu:0.",
        metavar="NAME",
    )
    threads: int | None = option(
        None,
        "Number of compute threads, at most one per processor that this program may use.",
        least=1,
        metavar="N",
        unset="what edge-run tune found, else one per performance core; half as many with --power saver",
    )
    power: str = option(
        Power.AUTO,
        "saver computes with fewer threads, which sleep between passes: slower, for less processor time. auto saves on "
        "battery. The text does not depend on it.",
        choices=Power,
    )
    context: int | None = option(
        None, "Maximum tokens of a conversation.", least=2, metavar="N", unset="as many as the model allows"
    )
    kv: str = option(
        KVFormat.FLOAT,
        "Element type of the KV cache. int8, on the CPU, takes a quarter of the memory at a small loss of quality, "
        "which edge-run verify --kv int8 measures. A token may become faster, drafts and long prompts slower. int4 "
        "takes an eighth, at a large loss of quality.",
        choices=KVFormat,
    )
    prefill: str = option(
        PrefillMode.AUTO,
        "What reads prompts on the CPU: plain for the model itself, int8 for a copy with int8 weights, which is faster "
        "with long prompts, takes disk and memory, and changes the KV cache a little. auto uses the copy once it was "
        "made, found faster and as good: edge-run tune sees to it, and so do chats while they are idle.",
        choices=PrefillMode,
    )
    tool_format: str = option(
        "auto",
        "How the model writes calls of functions: auto for what its chat template says, the name of a format "
        "(docs/tools.md lists them), or none to leave calls in the text. Example: --tool-format hermes",
        metavar="NAME",
    )
    cache: bool = option(
        True,
        "Keep weights packed for this machine, measurements of it, and what drafters learn, on disk.",
    )
    prefix_cache: int | None = option(
        None,
        "Memory for the KV caches of earlier answers, those of a draft model included, from which prompts with the "
        "same beginning continue: 2GB, or 0 for none.",
        least=0,
        range=_BYTES,
        metavar="SIZE",
        unset="a quarter of the free memory",
    )
    overflow: str | None = option(
        None,
        "What happens where a conversation is longer than the context: trim leaves out the oldest turns, also while a "
        "long answer is written; window keeps the first tokens, the system message and the newest tokens; error gives "
        "up a prompt that is too long.",
        choices=Overflow,
        range=", ".join(Overflow),
        unset="error; chats leave out the oldest turns of a prompt",
    )
    lossy_parking: bool = option(
        False,
        "Keep KV caches that no answer uses in 8 bits, a quarter of the memory, and restore them before use: those of "
        "earlier answers that exceed --prefix-cache, of prefixes on disk, and of saved conversations. What follows may "
        "differ a little from the text after the exact cache.",
    )
    lossy_image_tokens: float = option(
        1.0,
        "Share of the tokens of an image that stay: those that look alike are merged, so that fewer tokens are read "
        "and cached. Answers may become wrong, in particular with less than 0.5. Example: --lossy-image-tokens 0.75",
        within="(0, 1]",
        metavar="SHARE",
    )
    prefix_disk: int = option(
        DEFAULT_DISK_BYTES,
        "Disk space for the KV caches of prefixes (long documents, system messages of chats) of all models together; "
        "the least recently used are removed first. 0 for none.",
        least=0,
        range=_BYTES,
        metavar="SIZE",
        unset=f"{DEFAULT_DISK_BYTES >> 30}GiB",
    )
    tokenizer: str | os.PathLike[str] | None = option(
        None,
        "A tokenizer.json, or a folder that contains one.",
        metavar="PATH",
        unset="the one beside the model",
    )
    draft: str | os.PathLike[str] | None = option(
        "auto",
        "Draft model: an .onnx file or a folder, auto for the draft that the model was exported with, or none.",
        metavar="MODEL",
    )
    draft_device: str = option(
        "auto",
        "Where the draft model runs: auto (the CPU, or the model's device for a draft made of its layers), cpu, gpu, "
        "npu, or the name of an execution provider. On another device than the model's it drafts while the model "
        "verifies. Example: --device gpu --draft-device cpu",
        metavar="NAME",
    )
    anchor: str | os.PathLike[str] | None = option(
        None,
        "Model with the same tokens that answers with the strategy anchored stay near. Example: --anchor ./safe "
        "--strategy anchored:budget=0.5",
        metavar="MODEL",
        unset="none",
    )
    lora: Sequence[str] = option(
        (),
        "LoRA adapter of the PEFT library, a folder, and the name by which answers ask for it; several may be given. "
        "On the CPU, for models that edge-run exported. Example: --lora sql=./sql-adapter --adapter sql",
        metavar="NAME=PATH",
    )
    control_vectors: Sequence[str] = option(
        (),
        "Control vector, a GGUF file of llama.cpp or edge-run control-vector, and the name by which answers ask for "
        "it; several may be given. Example: --control-vector calm=calm.gguf --control calm",
        flags=("--control-vector",),
        metavar="NAME=PATH",
    )
    history: bool = option(False, "Keep conversations on disk, and draft from earlier ones.")
    learned: bool = option(True, "Keep in the cache what drafters learn from answers; off for repeatable measurements.")
    parallel: int = option(
        DEFAULT_PARALLEL,
        "Answers of a model that are generated at a time, in passes that they share where the device allows it.",
        least=1,
        metavar="N",
    )
    max_waiting: int = option(
        DEFAULT_MAX_WAITING, "Further requests to a model that may wait; more are refused.", least=0, metavar="N"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lossy_parking and self.kv != KVFormat.FLOAT:
            raise InputError(
                f"lossy_parking and kv {self.kv} are both given", "a quantized cache is kept as it is: leave one out"
            )


MEASURING_OPTIONS: Final = LoadOptions(prefill=PrefillMode.PLAIN, prefix_cache=0, prefix_disk=0, learned=False)
"""Options with which a measurement loads a model: no answer depends on those before it."""
