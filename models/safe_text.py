"""Replaces the characters with which text could control a terminal."""

from __future__ import annotations

from typing import Final

_REPLACEMENT: Final = "\ufffd"
_CONTROLS: Final = dict.fromkeys(
    [
        *(code for code in range(0x20) if chr(code) not in "\n\t"),
        *range(0x7F, 0xA0),  # DEL and C1; many terminals take U+009B for the beginning of an escape sequence
        *range(0x202A, 0x202F),  # bidirectional embeddings and overrides, which reorder what stands around them
        *range(0x2066, 0x206A),  # bidirectional isolates
    ],
    _REPLACEMENT,
)
_LINE_ENDS: Final = dict.fromkeys(map(ord, "\n\t"), _REPLACEMENT)


def for_terminal(text: str) -> str:
    """Replace control characters by U+FFFD, so that text of unknown origin cannot control the terminal.

    Line ends and tabs stay. Every escape sequence begins with a character that is replaced; the rest of it is shown.
    """
    return text.translate(_CONTROLS)


def on_one_line(text: str) -> str:
    """`for_terminal` for text that must stay on its line: line ends and tabs are replaced too."""
    return for_terminal(text).translate(_LINE_ENDS)
