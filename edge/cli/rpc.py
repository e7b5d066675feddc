"""`edge-run rpc [MODEL ...]`: JSON-RPC over standard input and output, for programs that embed edge-run."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Final

import typer

from ...errors import InputError
from ...models.byte_sizes import parse_bytes
from ...runtime.devices.power import Power
from ...runtime.kv.cache_scales import KVFormat
from ...runtime.prefill import PrefillMode
from ...runtime.scheduling.request_queue import DEFAULT_PARALLEL
from ..terminal.output import write_out
from .pool_options import IdleUnload, Memory, OfferedModels, Parallel, PoolOptions
from .shared_options import (
    KV,
    Cache,
    Context,
    Debug,
    Device,
    Draft,
    DraftDevice,
    ModelOptions,
    Offline,
    OverflowPolicy,
    PowerMode,
    Prefill,
    PrefixCache,
    Threads,
    ToolFormatName,
    prefix_cache_bytes,
)

_STDIN: Final = 0
_SHORTEST_LINE: Final = 1024


def rpc(
    models: OfferedModels = None,
    parallel: Parallel = DEFAULT_PARALLEL,
    idle_unload: IdleUnload = None,
    memory: Memory = None,
    prefix_cache: PrefixCache = None,
    overflow: OverflowPolicy = None,
    max_line: Annotated[str, typer.Option(metavar="SIZE", help="Largest line of the client.")] = "16MiB",
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the protocol, and exit.")] = False,
    device: Device = "auto",
    threads: Threads = None,
    power: PowerMode = Power.AUTO,
    context: Context = None,
    kv: KV = KVFormat.FLOAT,
    prefill: Prefill = PrefillMode.AUTO,
    tool_format: ToolFormatName = "auto",
    draft: Draft = "auto",
    draft_device: DraftDevice = "auto",
    cache: Cache = True,
    offline: Offline = False,  # noqa: ARG001  its callback acts
    debug: Debug = False,
) -> None:
    """Answer JSON-RPC 2.0 requests, one a line, from standard input on standard output, until the input ends.

    For programs that start edge-run as a child process: Electron, C#, Rust and others. The guide is docs/rpc.md.

    Example: edge-run rpc my-model
    """
    from ..rpc.protocol_schema import protocol_schema

    if schema:
        write_out(f"{json.dumps(protocol_schema(), indent=1)}\n")
        return
    from ...runtime.devices.providers import choose_device
    from ..rpc.line_transport import binary, take_over_stdout
    from ..rpc.stdio_service import MAX_REQUESTS, RpcSettings, serve

    if sys.stdin is None:
        raise InputError("standard input is closed", "start edge-run rpc from a program that writes requests to it")
    max_line_bytes = parse_bytes(max_line, "--max-line")
    if max_line_bytes < _SHORTEST_LINE:
        raise InputError(f"--max-line is {max_line}", f"it must be at least {_SHORTEST_LINE} bytes")
    each = ModelOptions(
        None,
        device,
        threads,
        context,
        draft=draft,
        draft_device=draft_device,
        cache=cache,
        prefix_cache=prefix_cache_bytes(prefix_cache),
        overflow=overflow,
        power=power,
        kv=kv,
        prefill=prefill,
        tool_format=tool_format,
        parallel=parallel,
        max_waiting=MAX_REQUESTS,
    )
    with PoolOptions(models or [], each, idle_unload, memory).open() as pool:
        binary(_STDIN)
        serve(pool, RpcSettings(choose_device(device).kind, power, max_line_bytes, debug), _STDIN, take_over_stdout())
