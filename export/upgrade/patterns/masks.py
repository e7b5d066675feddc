"""What a bias that a graph makes from its mask says: everything before, or the last W rows."""

from __future__ import annotations

from typing import Final

import numpy as np

from ....errors import BundleError, ExportError
from ..edit.editable import EditableGraph
from .subgraph_probe import Moment, Probe

_ROWS: Final = 3
_HIDDEN_BELOW: Final = -1e4


def window_of_bias(graph: EditableGraph, bias: str, context: int) -> int:
    """Rows that a row sees by a bias, itself included; 0 for all.

    Args:
        graph: the decoder.
        bias: the value, [1, heads or 1, rows, total].
        context: cached rows of the experiment; a window that is wider does not show.

    Raises:
        BundleError: the bias says something else, such as a slope.
    """
    moment = Moment(_ROWS, context)
    try:
        value = np.asarray(Probe(graph).run([bias], moment)[bias], np.float64)
    except ExportError as error:
        raise _unknown() from error
    cells = value.reshape(-1, value.shape[-2], value.shape[-1])
    if cells.shape[1:] != (_ROWS, moment.total) or np.any(cells != cells[:1]):
        raise _unknown()
    seen = cells[0] > _HIDDEN_BELOW
    if np.any(cells[0][seen] != 0):
        raise _unknown()
    slots, rows = np.arange(moment.total), np.arange(context, moment.total)[:, None]
    before = seen & (slots <= rows)  # what comes after a row may be seen: the operator hides it
    window = int(before[0].sum())
    if np.array_equal(before, slots <= rows):
        return 0
    if not np.array_equal(before, (slots <= rows) & (slots > rows - window)):
        raise _unknown()
    return window


def _unknown() -> BundleError:
    return BundleError(
        "the model adds something to its attention scores that is neither a mask nor a window", "run it as it is"
    )
