"""`edge-run rpc` and `edge-run mcp`: models for other programs, over standard input and output."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import Any, Final

from ...errors import InputError, missing_extra
from ...models.user_text import parse_bytes
from ...runtime.arguments.argument_types import option
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.devices.processor import Power
from ..terminal.output import write_out
from .serve import POOL, Models
from .shared_options import OptionsOf, takes_options

_SHORTEST_LINE: Final = 1024
_LOAD: Final = OptionsOf(LoadOptions(), without=("tokenizer", "prefix_disk", "history", "learned", "max_waiting"))


@dataclass(frozen=True)
class RpcOptions:
    """Options of `edge-run rpc`."""

    max_line: str = option("16MiB", "Largest line of the client.", metavar="SIZE")
    schema: bool = option(False, "Print the JSON Schema of the protocol, and exit.")


_RPC: Final = OptionsOf(RpcOptions())


@takes_options(POOL, _RPC, _LOAD, offline=True)
def rpc(
    models: Models = None,
    **given: Any,
) -> None:
    """Answer JSON-RPC 2.0 requests, one a line, from standard input on standard output, until the input ends.

    For programs that start edge-run as a child process: Electron, C#, Rust and others. The guide is docs/rpc.md.

    Example: edge-run rpc my-model
    """
    options, load = _RPC.record(given), _LOAD.record(given)
    from ..rpc.stdio_service import protocol_schema

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


@takes_options(POOL, _LOAD, offline=True)
def mcp(models: Models = None, **given: Any) -> None:
    """Offer models as tools to a program that uses MCP, over standard input and output, until the input ends.

    The program starts the command itself, as its settings say: {"mcpServers": {"edge-run": {"command": "edge-run",
    "args": ["mcp", "my-model"]}}}. The guide is docs/tools.md.

    Example: edge-run mcp my-model
    """
    if sys.stdin is None:
        raise InputError("standard input is closed", "start edge-run mcp from a program that uses MCP")
    with missing_extra("the MCP server", "mcp"):
        from ..tools.mcp_server import mcp_server
    with POOL.record(given).open(models, _LOAD.record(given)) as pool:
        mcp_server(pool).run("stdio")
