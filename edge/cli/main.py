"""The entry point of `edge-run`: says how Ctrl-C is handled before anything else is imported."""

from __future__ import annotations

import sys

from .ctrl_c import end_on_ctrl_c, ignore_ctrl_c

# Ctrl-C before `end_on_ctrl_c` has run prints a traceback, so this module imports nothing else at its top.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after `edge-run`. By default the arguments of this process, which then is edge-run's own:
            Ctrl-C ends it.

    Returns:
        The exit code: 0 for success, 1 for a failure, 2 for bad usage or bad input, 130 for an interrupt before the
        command has ended.
    """
    if arguments is None:
        end_on_ctrl_c()
    from .command_line import run_command

    code = run_command(list(sys.argv[1:] if arguments is None else arguments))
    if arguments is None:
        ignore_ctrl_c()
    return code
