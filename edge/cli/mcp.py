"""`edge-run mcp [MODEL ...]`: models as tools of an MCP server over standard input and output."""

from __future__ import annotations

import sys
from typing import Any

from ...errors import InputError, missing_extra
from .pool_options import POOL, Models
from .rpc import LOAD
from .shared_options import takes_options


@takes_options(POOL, LOAD, offline=True)
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
    with POOL.record(given).open(models, LOAD.record(given)) as pool:
        mcp_server(pool).run("stdio")
