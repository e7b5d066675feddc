"""`edge-run rpc [MODEL ...]`: JSON-RPC over standard input and output, for programs that embed edge-run."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Final

import typer

from ...errors import InputError
from ...models.byte_sizes import parse_bytes
from ...models.progress import Progress
from ...runtime.devices.power import Power
from ...runtime.scheduling.request_queue import DEFAULT_PARALLEL
from ..terminal.output import write_out
from .shared_options import Cache, Context, Debug, Device, Draft, ModelOptions, Offline, PowerMode, PrefixCache, Threads

_STDIN: Final = 0
_SHORTEST_LINE: Final = 1024


def rpc(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Models to offer; the first one answers requests that name none.",
            show_default="the bundled model and those that edge-run models lists",
        ),
    ] = None,
    parallel: Annotated[
        int, typer.Option(metavar="N", min=1, help="Answers of a model that are generated at a time.")
    ] = DEFAULT_PARALLEL,
    idle_unload: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="Unload a model that is unused for this long.", show_default="never"
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory for the weights of loaded models, such as 8GB.", show_default="no limit"
        ),
    ] = None,
    prefix_cache: PrefixCache = None,
    max_line: Annotated[str, typer.Option(metavar="SIZE", help="Largest line of the client.")] = "16MiB",
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the protocol, and exit.")] = False,
    device: Device = "auto",
    threads: Threads = None,
    power: PowerMode = Power.AUTO,
    context: Context = None,
    draft: Draft = "auto",
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
    from ...runtime.engine import Engine
    from ..rpc.line_transport import binary, take_over_stdout
    from ..rpc.stdio_service import MAX_REQUESTS, RpcSettings, serve
    from ..service.model_pool import ModelPool

    if sys.stdin is None:
        raise InputError("standard input is closed", "start edge-run rpc from a program that writes requests to it")
    max_line_bytes = parse_bytes(max_line, "--max-line")
    if max_line_bytes < _SHORTEST_LINE:
        raise InputError(f"--max-line is {max_line}", f"it must be at least {_SHORTEST_LINE} bytes")
    kind = choose_device(device).kind
    kept = None if prefix_cache is None else parse_bytes(prefix_cache, "--prefix-cache")
    max_bytes = None if memory is None else parse_bytes(memory, "--memory")

    def open_model(path: str, progress: Progress) -> Engine:
        options = ModelOptions(
            path,
            device,
            threads,
            context,
            draft=draft,
            cache=cache,
            prefix_cache=kept,
            power=power,
            parallel=parallel,
            max_waiting=MAX_REQUESTS,
        )
        return options.open(progress)

    with ModelPool(models or [], open_model, idle_s=idle_unload, max_bytes=max_bytes, kind=kind) as pool:
        binary(_STDIN)
        serve(pool, RpcSettings(kind, power, max_line_bytes, debug), _STDIN, take_over_stdout())
