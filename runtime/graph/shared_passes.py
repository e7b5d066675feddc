"""Passes that several texts share: each hands in its own, and those that are there run as one.

Each text prepares its passes as it does alone, over a cache of its own. A pass that nobody joins runs in the graph that
it was prepared for; those that were handed in together run in the packed form of that graph (`packed_graph.py`), over
the same buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import onnxruntime as ort

from ..kv.buffers import Array
from .bound_graph import ALONE, OtherTexts
from .graph_io import GraphIO, GraphValue, InputRole
from .pass_inputs import wrapped

ROWS: Final = "batch.rows"
"""Input of a text: the indices of its tokens among those of the pass, int64 `[M]`."""
ORDER: Final = "batch.order"
"""Input: the indices of the tokens of the pass among those of all texts, one text after the other, int64 `[N]`. A text
that has no tokens in a pass runs one that this leaves out."""
SHARED_SCALE_OPERATORS: Final = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul")
"""Operators that quantize the activations of all tokens of a pass with one scale."""
_numbers: Final = count()
Gather: TypeAlias = Callable[[Callable[[], bool]], None]
"""Lets other threads hand in their passes, until its argument returns True, because the pass was run, or all have."""


def of_text(name: str, text: int) -> str:
    """The name of an input or output of one text in the packed graph."""
    return f"{name}@{text}"


class PassTotals(NamedTuple):
    """What the passes of answers had since the model was loaded."""

    passes: int = 0
    texts: int = 0
    tokens: int = 0


NO_PASSES: Final = PassTotals()


class TextBinding(ort.IOBinding):  # type: ignore[misc]  # onnxruntime has no types
    """The binding of one text: what is bound to it is also kept, for passes of the packed graph.

    Args:
        graph: the graph of its passes.
    """

    def __init__(self, graph: SharedGraph) -> None:
        super().__init__(graph.session)
        self.graph: Final = graph
        self.number: Final = next(_numbers)
        """Its place among the texts of a pass, whose rows are in the order in which bindings were made."""
        self.inputs: Final[dict[str, ort.OrtValue]] = {}
        self.outputs: Final[dict[str, ort.OrtValue]] = {}
        self.tokens = 0
        """Number of tokens of the pass."""
        self.others = ALONE
        """What else ran in the last pass."""
        self.pass_s = 0.0
        """Seconds of the last pass."""
        self.handed_in_at: float | None = None
        """When its pass was handed in, by `time.perf_counter`; None between two passes."""
        self.error: BaseException | None = None
        """Why the last pass failed, which the thread of another text ran."""

    def bind_ortvalue_input(self, name: str, ortvalue: ort.OrtValue) -> None:
        """Bind an input."""
        self.inputs[name] = ortvalue
        super().bind_ortvalue_input(name, ortvalue)

    def bind_ortvalue_output(self, name: str, ortvalue: ort.OrtValue) -> None:
        """Bind an output."""
        self.outputs[name] = ortvalue
        super().bind_ortvalue_output(name, ortvalue)


class PackedPasses:
    """Runs the passes of several texts as one pass of the packed graph.

    Args:
        session: session of the packed graph.
        graph_io: inputs and outputs of the graph that it was made from.
        texts: number of texts that it was made for.
    """

    def __init__(self, session: ort.InferenceSession, graph_io: GraphIO, texts: int) -> None:
        self._session: Final = session
        self._io: Final = session.io_binding()
        self._tokens: Final = graph_io.inputs[InputRole.TOKENS].name
        self._selection: Final = graph_io.inputs[InputRole.LOGIT_POSITIONS].name
        self._outputs: Final = [each.name for each in session.get_outputs()]
        self._idle: Final = [_idle_inputs(session.get_inputs(), text) for text in range(texts)]
        """Inputs of a text without tokens: it runs one, of which nothing is used."""
        self._last_bindings: Final[list[TextBinding | None]] = [None] * texts
        """The binding that each batch index of the graph had last: binding its cache again takes time."""
        self._bound: Final[dict[str, ort.OrtValue | None]] = {}
        """What is bound, by name; None for outputs that ONNX Runtime allocates."""
        self._joined: Final[dict[str, tuple[Array, ort.OrtValue]]] = {}
        """Buffers of the outputs that have rows of all texts, by name."""

    def run(self, bindings: Sequence[TextBinding], options: ort.RunOptions) -> None:
        """Run the passes of `bindings` as one."""
        indices = self._batch_indices(bindings)
        tokens = [each.inputs[self._tokens].numpy()[0] for each in bindings]
        ends = np.cumsum([0, *map(len, tokens)]).tolist()
        logit_positions = [
            each.inputs[self._selection].numpy() + start for each, start in zip(bindings, ends, strict=False)
        ]
        self._bind(self._tokens, wrapped(np.concatenate(tokens)[None]))
        self._bind(self._selection, wrapped(np.concatenate(logit_positions)))
        order = np.empty(ends[-1], np.int64)
        first = 0
        outputs: dict[str, ort.OrtValue] = {}
        for batch_index, idle in enumerate(self._idle):
            inputs, width = idle, 1
            if (index := indices.get(batch_index)) is not None:
                binding, start, end = bindings[index], ends[index], ends[index + 1]
                width = end - start
                order[start:end] = np.arange(first, first + width)
                inputs = {
                    of_text(name, batch_index): binding.inputs[name]
                    for name in binding.inputs
                    if name not in self._bound
                }
                inputs[of_text(ROWS, batch_index)] = wrapped(np.arange(start, end))
                outputs |= {of_text(name, batch_index): value for name, value in binding.outputs.items()}
            first += width
            for name, value in inputs.items():
                self._bind(name, value)
        self._bind(ORDER, wrapped(order))
        shared = [name for name in self._outputs if name in bindings[0].outputs]
        parts = {name: [each.outputs[name].numpy() for each in bindings] for name in shared}
        for name in self._outputs:
            self._bind_output(name, self._join(name, parts[name]) if name in parts else outputs.get(name))
        self._session.run_with_iobinding(self._io, options)
        for name in shared:
            first, joined = 0, self._joined[name][0].reshape(-1, parts[name][0].shape[-1])
            for part in parts[name]:
                own_rows = part.reshape(-1, part.shape[-1])
                own_rows[...] = joined[first : first + len(own_rows)]
                first += len(own_rows)
        for each, own in zip(bindings, tokens, strict=True):
            each.others = OtherTexts(len(bindings) - 1, ends[-1] - len(own))

    def release(self) -> None:
        """Unbind the caches of the texts of the last pass, which would otherwise stay in memory."""
        if self._bound:
            self._io.clear_binding_inputs()
            self._io.clear_binding_outputs()
            self._bound.clear()
            self._last_bindings[:] = [None] * len(self._last_bindings)

    def _batch_indices(self, bindings: Sequence[TextBinding]) -> dict[int, int]:
        """Index in `bindings` by batch index of the graph, which is the one of the last pass if that is free."""
        last = self._last_bindings
        indices = {last.index(each): index for index, each in enumerate(bindings) if each in last}
        free = (batch_index for batch_index in range(len(last)) if batch_index not in indices)
        indices |= {next(free): index for index, each in enumerate(bindings) if each not in last}
        last[:] = [bindings[indices[each]] if each in indices else None for each in range(len(last))]
        return indices

    def _join(self, name: str, parts: Sequence[Array]) -> ort.OrtValue:
        """A buffer for the rows of an output that belong to all texts."""
        shape = (*parts[0].shape[:-2], sum(part.shape[-2] for part in parts), parts[0].shape[-1])
        if name not in self._joined or self._joined[name][0].shape != shape:
            array = np.empty(shape, parts[0].dtype)
            self._joined[name] = array, wrapped(array)
        return self._joined[name][1]

    def _bind(self, name: str, value: ort.OrtValue) -> None:
        if self._bound.get(name) is not value:
            self._bound[name] = value
            self._io.bind_ortvalue_input(name, value)

    def _bind_output(self, name: str, value: ort.OrtValue | None) -> None:
        if value is None:  # a pass leaves what it allocated in the binding, which the next one would write to
            self._io.bind_output(name)
        elif self._bound.get(name) is not value:
            self._io.bind_ortvalue_output(name, value)
        self._bound[name] = value


def _idle_inputs(inputs: Sequence[ort.NodeArg], text: int) -> dict[str, ort.OrtValue]:
    """Zeros for the inputs of a text, as of a pass over one token without a cache."""
    found = {}
    for each in inputs:
        if each.name.endswith(of_text("", text)):
            shape = [size if isinstance(size, int) else 1 for size in each.shape]
            array = np.zeros(shape, GraphValue(each.name, each.type, tuple(each.shape)).dtype)
            if not shape:  # the total length
                array[...] = 1
            found[each.name] = wrapped(array)
    return found


class SharedGraph:
    """A graph whose passes texts may share.

    Args:
        session: its session.
        load: loads what runs several passes as one; returns None if nothing can.
    """

    def __init__(self, session: ort.InferenceSession, load: Callable[[], PackedPasses | None]) -> None:
        self.session: Final = session
        self.cannot_share = False
        """Whether it turned out not to have a packed form."""
        self._load: Callable[[], PackedPasses | None] | None = load
        """Loads the packed graph; None once it has."""
        self._packed: PackedPasses | None = None

    def packed(self) -> PackedPasses | None:
        """What runs several passes as one, loaded when there are several for the first time."""
        if self._load is not None:
            self._packed, self._load = self._load(), None
            self.cannot_share = self._packed is None
        return self._packed

    def release(self) -> None:
        """Let go of the caches of the last pass of several texts."""
        if self._packed is not None:
            self._packed.release()

    def close(self) -> None:
        """Free the packed graph."""
        self._packed, self._load, self.cannot_share = None, None, True


class SharedPasses:
    """Passes that threads hand in one at a time, each while it has the turn of the request queue.

    Args:
        texts: largest number of texts of a pass.
        gather: lets other threads hand in theirs.
    """

    def __init__(self, texts: int, gather: Gather) -> None:
        self.totals = NO_PASSES
        self.texts: Final = texts
        self._gather: Final = gather
        self.graphs: Final[list[SharedGraph]] = []
        """The graphs whose passes may be handed in."""
        self._handed_in: Final[list[TextBinding]] = []

    def hand_in(self, binding: TextBinding) -> None:
        """Let a pass, which `run` ends, run together with the next one of the same thread."""
        if binding.handed_in_at is None and not binding.graph.cannot_share:
            binding.handed_in_at = time.perf_counter()
            self._handed_in.append(binding)

    def withdraw(self, binding: TextBinding) -> None:
        """Forget a pass that was handed in and has not run."""
        binding.handed_in_at = None
        if binding in self._handed_in:
            self._handed_in.remove(binding)

    def run(self, binding: TextBinding, options: ort.RunOptions) -> None:
        """Run a pass, alone in its graph or together with those of the same graph that are handed in meanwhile.

        The turn is given to others until their passes are handed in too. The first thread that has it back runs all of
        them; the others find that theirs have run.

        Raises:
            Exception: ONNX Runtime failed; all texts of the same pass get the same error.
        """
        handed_in, started = self._handed_in, binding.handed_in_at or time.perf_counter()
        if binding.handed_in_at is None and binding.graph.cannot_share:
            # It waits for nobody, and leaves those that wait for each other alone.
            self._run([binding], options)
        else:
            self.hand_in(binding)
            try:
                self._gather(lambda: binding not in handed_in or len(handed_in) >= self.texts)
                if binding in handed_in:
                    bindings = sorted(handed_in, key=lambda each: each.number)
                    handed_in.clear()
                    self._run(bindings, options)
            except BaseException:
                self.withdraw(binding)
                raise
        texts, tokens, _ = binding.others
        binding.others = OtherTexts(texts, tokens, time.perf_counter() - started - binding.pass_s)
        error, binding.error, binding.handed_in_at = binding.error, None, None
        if error is not None:
            raise error

    def release(self) -> None:
        """Let go of the caches of the last passes; called by a thread that has the turn."""
        for graph in self.graphs:
            graph.release()

    def close(self) -> None:
        """Free the packed graphs; passes run alone from now on."""
        for graph in self.graphs:
            graph.close()
        self.graphs.clear()  # each refers to its session, which maps the files of the weights

    def _run(self, bindings: Sequence[TextBinding], options: ort.RunOptions) -> None:
        """Run the passes of some texts, those of each graph together if they are several; texts keep their errors."""
        if len(bindings) == 1:  # what several texts need takes 15 us between two passes
            self.release()
            self._run_pass(bindings[0].graph, None, bindings, options)
            return
        graphs = dict.fromkeys(each.graph for each in bindings)
        for graph in set(self.graphs).difference(graphs):
            graph.release()
        for each in bindings:
            each.error = RuntimeError("the pass was interrupted")  # until its pass has run
        for graph in graphs:
            own = [each for each in bindings if each.graph is graph]
            packed = graph.packed() if min(len(own), self.texts) > 1 else None
            if packed is None:
                graph.release()
            # Of a text that two readers follow, both passes are handed in, so there may be more than there are texts.
            width = self.texts if packed is not None else 1
            for first in range(0, len(own), width):
                self._run_pass(graph, packed, own[first : first + width], options)

    def _run_pass(
        self, graph: SharedGraph, packed: PackedPasses | None, bindings: Sequence[TextBinding], options: ort.RunOptions
    ) -> None:
        """Run one pass, in the packed form of a graph or in the graph itself."""
        started = time.perf_counter()
        try:
            if packed is not None:
                packed.run(bindings, options)
            else:
                bindings[0].others = ALONE
                graph.session.run_with_iobinding(bindings[0], options)
        except Exception as error:  # noqa: BLE001  each text raises it in its own thread
            for each in bindings:
                each.error = error
            return
        passes, all_texts, all_tokens = self.totals
        tokens = sum(each.tokens for each in bindings)
        self.totals = PassTotals(passes + 1, all_texts + len(bindings), all_tokens + tokens)
        for each in bindings:
            each.error, each.pass_s = None, time.perf_counter() - started
