"""`edge-run rpc [MODEL ...]`: JSON-RPC over standard input and output, for programs that embed edge-run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import Any, Final

from ...errors import InputError
from ...models.user_text import parse_bytes
from ...runtime.arguments.argument_types import option
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.devices.processor import Power
from ..terminal.output import write_out
from .pool_options import POOL, Models
from .shared_options import OptionsOf, takes_options

_SHORTEST_LINE: Final = 1024
LOAD: Final = OptionsOf(LoadOptions(), without=("tokenizer", "prefix_disk", "history", "learned", "max_waiting"))


@dataclass(frozen=True)
class RpcOptions:
    """Options of `edge-run rpc`."""

    max_line: str = option("16MiB", "Largest line of the client.", metavar="SIZE")
    schema: bool = option(False, "Print the JSON Schema of the protocol, and exit.")


_RPC: Final = OptionsOf(RpcOptions())


@takes_options(POOL, _RPC, LOAD, offline=True)
def rpc(
    models: Models = None,
    **given: Any,
) -> None:
    """Answer JSON-RPC 2.0 requests, one a line, from standard input on standard output, until the input ends.

    For programs that start edge-run as a child process: Electron, C#, Rust and others. The guide is docs/rpc.md.

    Example: edge-run rpc my-model
    """
    options, load = _RPC.record(given), LOAD.record(given)
    from ..rpc.protocol_schema import protocol_schema

    if options.schema:
        write_out(f"{json.dumps(protocol_schema(), indent=1)}\n")
        return
    from ..rpc.connection import MAX_REQUESTS
    from ..rpc.stdio_service import serve

    if sys.stdin is None:
        raise InputError("standard input is closed", "start edge-run rpc from a program that writes requests to it")
    max_line_bytes = parse_bytes(options.max_line, "--max-line")
    if max_line_bytes < _SHORTEST_LINE:
        raise InputError(f"--max-line is {options.max_line}", f"it must be at least {_SHORTEST_LINE} bytes")
    each = replace(load, max_waiting=MAX_REQUESTS)
    with POOL.record(given).open(models, each) as pool:
        serve(pool, power=Power(load.power), max_line_bytes=max_line_bytes, debug=given["debug"])
