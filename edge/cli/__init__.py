"""The `edge-run` command: one module a subcommand."""
