"""An MCP server for tests, run as a program: it has the weather of every city, and a tool that fails."""

from __future__ import annotations

import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("weather")


@server.tool()
def get_weather(city: str) -> str:
    """The weather in a city."""
    if len(sys.argv) > 1:  # a file that has a line for every call
        with Path(sys.argv[1]).open("a", encoding="utf-8") as file:
            file.write(f"{city}\n")
    return f"{city}: sunny"


@server.tool()
def storm() -> str:
    """Always fails."""
    raise ValueError("no storm today")


if __name__ == "__main__":
    server.run("stdio")
