"""Tools of conversations: MCP servers that the user has listed, and the calls that answers make."""
