"""`edge-run rpc`: JSON-RPC over standard input and output, for desktop programs in any language."""
