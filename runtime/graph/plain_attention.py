"""GroupQueryAttention for passes of consecutive tokens, without bias and positions.

Such passes need neither: the operator rotates by slot and hides later slots itself. Providers have faster kernels for
it then, or skip work that a bias would make necessary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor
from ...models.onnx_file.model_messages import Message, set_attribute

OPERATOR: Final = "GroupQueryAttention"
POSITIONS, BIAS = 9, 10
"""Places of the operator's inputs."""
WINDOW: Final = "local_window_size"


def serve_plain_passes(editor: GraphEditor, *, keep_computed: bool = False) -> None:
    """Take the bias and the positions from each attention operator, and give it the window that its bias had.

    Args:
        editor: the graph.
        keep_computed: whether an operator keeps both where the graph computes its bias itself, from a mask; else such
            a graph is refused.

    Raises:
        CannotRewriteError: a bias is neither the caller's nor the caller's with a window.
    """

    def replaced(each: Message) -> Iterable[Message]:
        if each.op_type != OPERATOR:
            return [each]
        if bias := input_at(each, BIAS):
            found = window_of(editor, bias)
            if found is not None:
                set_attribute(each, WINDOW, found[1])
            elif bias not in editor.input_names:
                if keep_computed:
                    return [each]
                raise CannotRewriteError(f"the bias {bias} is not the caller's")
            each.input[BIAS] = ""
        if input_at(each, POSITIONS):
            each.input[POSITIONS] = ""
        while not each.input[-1]:
            del each.input[-1]
        return [each]

    editor.rewrite(replaced)


def window_of(editor: GraphEditor, bias: str) -> tuple[str, int] | None:
    """The input and the window of a bias that is the caller's with a window; None for all others."""
    where = editor.producer(bias)
    far = None if where is None or where.op_type != "Where" else editor.producer(where.input[0])
    if where is None or far is None or far.op_type != "GreaterOrEqual" or where.input[2] not in editor.input_names:
        return None
    width = editor.array(far.input[1])
    return None if width is None or width.size != 1 else (str(where.input[2]), int(width.reshape(-1)[0]))


def input_at(of: Message, place: int) -> str:
    """The name of an input; empty if it is absent."""
    return str(of.input[place]) if len(of.input) > place else ""
