"""What reads an engine's prompts: makes the int8 prompt graph, checks it, and measures whether it pays here."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Final

from ...errors import BundleError, InputError
from ...models.bundle import Bundle
from ...models.manifest import DeviceKind
from ...models.progress import Progress, silent
from ..arguments.load_options import LoadOptions
from ..graph.graph_choice import ChosenGraphs
from ..graph.open_graph import prompt_graph_obstacle
from ..graph.session import DecoderGraph
from ..measure.prompt_choice import LEAST_WIDTH, PromptChoice, measure_prompt_speed
from ..measure.system_load import GraphTimes
from ..prefill import INT8_GRAPH, PrefillMode
from ..scheduling.idle_thread import IdleThread
from ..scheduling.request_queue import RequestQueue
from ..text.tokenizer import TextTokenizer
from .prompt_graph import PromptGraph

MAKING: Final = "making the int8 prompt graph"
CHECKING: Final = "checking the int8 prompt graph"
TIMING: Final = "timing prompts"
_NO_ROOM: Final = "could not be written to the cache folder"
_NOT_LOADED: Final = "not loaded, which would take longer than it saves"
"""Why it did not read a prompt that is too short."""
_CONTEXT: Final = 384
"""Tokens of the cache to measure with."""


class PrefillChoice:
    """Which graph reads the prompts of one engine, and the int8 prompt graph if there may be one.

    Args:
        graph: the engine's graphs.
        bundle: the model.
        tokenizer: the model's.
        context: maximum number of tokens of a sequence.
        queue: the engine's request queue.
        options: which graph is to read prompts, and what may be kept on disk. Without what drafters learn, nothing is
            made in the background either.
    """

    def __init__(
        self,
        graph: DecoderGraph,
        bundle: Bundle,
        tokenizer: TextTokenizer,
        context: int,
        queue: RequestQueue,
        options: LoadOptions,
    ) -> None:
        mode = self._mode = PrefillMode(options.prefill)
        self._config: Final = graph.config
        self._graphs = graph if isinstance(graph, ChosenGraphs) else None
        further = () if self._graphs is None else self._graphs.further
        self._prompt: Final = next((each for each in further if isinstance(each, PromptGraph)), None)
        self._obstacle: Final = prompt_graph_obstacle(bundle, graph.config, graph.graph_io, mode, cache=options.cache)
        self._bundle: Final = bundle
        self._tokenizer: Final = tokenizer
        self._context: Final = min(context, _CONTEXT)
        self._queue: Final = queue
        self._learns: Final = options.learned and mode is PrefillMode.AUTO
        self._background: Final = IdleThread(queue, self._prepare, "edge-run prompt graph")
        if self._prompt is not None and mode is PrefillMode.AUTO:
            self._prompt.prepare = self._background.start

    @property
    def refusal(self) -> str | None:
        """Why the model's own graph reads long prompts; None if the int8 prompt graph does."""
        return self._obstacle if self._prompt is None else self._prompt.refusal

    def refusal_of(self, tokens_by_graph: Mapping[str, int]) -> str | None:
        """Why the model's own graph read a prompt; None if the int8 prompt graph read some of it, or may read others.

        Args:
            tokens_by_graph: see `Stats.prompt_readers`.
        """
        if self.refusal is None and self._prompt is not None and self._prompt.was_declined:
            return _NOT_LOADED if sum(tokens_by_graph.values()) >= LEAST_WIDTH else None
        return self.refusal

    def described(self, tokens_by_graph: Mapping[str, int]) -> str | None:
        """What read a prompt with int8 weights, or why nothing did, in a phrase.

        Args:
            tokens_by_graph: see `Stats.prompt_readers`.

        Returns:
            None for a short prompt, and where no int8 prompt graph was asked for.
        """
        every = sum(tokens_by_graph.values())
        if read := tokens_by_graph.get(INT8_GRAPH, 0):
            return f"int8 prompt graph: {read} of {every} tokens read"
        refusal = self.refusal_of(tokens_by_graph)
        is_asked = self._mode is not PrefillMode.PLAIN and self._config.device.kind is DeviceKind.CPU
        return f"int8 prompt graph: {refusal}" if refusal is not None and is_asked and every >= LEAST_WIDTH else None

    def prepare(self, progress: Progress) -> None:
        """Write the graph if it was asked for by name, and use it without a check.

        Raises:
            BundleError: the model cannot have one.
            InputError: it cannot run here.
        """
        if self._mode is not PrefillMode.INT8:
            return
        if self._obstacle is not None:
            raise InputError(f"the int8 prompt graph {self._obstacle}", "leave --prefill out")
        from .int8_graph_files import int8_graph_plan  # noqa: PLC0415 -- importing protobuf takes 28 ms

        obstacle = int8_graph_plan(self._bundle)
        if isinstance(obstacle, str):
            raise BundleError(
                f"{self._bundle.folder} cannot have an int8 prompt graph: {obstacle}", "leave --prefill out"
            )
        if self._prompt is not None and self._write(self._prompt, progress):
            self._prompt.refusal = None
            self._background.start()  # a prompt that comes before loads it itself

    def tune(self, progress: Progress = silent) -> PromptChoice | None:
        """Make the graph now, check it and measure whether it pays; `refusal` says what came of it.

        Returns:
            What was measured; None if the model cannot have the graph.

        Raises:
            BundleError: the model is damaged.
            EdgeError: ONNX Runtime failed.
        """
        if self._prompt is None:
            return None
        with self._queue.turn():
            self._make(progress)
        return self._prompt.choice

    def close(self) -> None:
        """Abandon work in the background, and let the graphs go."""
        self._background.close()
        self._graphs = None

    def _prepare(self, progress: Progress) -> None:
        """Load the graph for the next prompt, made or measured first if it has to be; errors as for `_make`."""
        if self._graphs is not None and self._prompt is not None:
            if self._learns and self._prompt.is_unmeasured:
                self._make(progress)
            else:
                self._graphs.bind_further(self._prompt, self._graphs.arena(1))

    def _write(self, prompt: PromptGraph, progress: Progress) -> bool:
        """Write the graph's files, if they are not there; False if that is not possible, which a line has said."""
        from .int8_graph_files import int8_graph_path  # noqa: PLC0415 -- importing protobuf takes 28 ms

        path = int8_graph_path(self._bundle, self._config, lambda _, fraction: progress(MAKING, fraction))
        if path is None:
            prompt.refusal = _NO_ROOM
        return path is not None

    def _make(self, progress: Progress) -> None:
        """Write the graph, check its quality, time it, and use it from now on if both are good.

        Args:
            progress: receives stages and their fractions, between short steps; it may wait.

        Raises:
            BundleError: the model is damaged.
            EdgeError: ONNX Runtime failed.
        """
        from ..measure.logit_quality import KL_LIMIT, measure_quality, quality_prompts  # noqa: PLC0415 -- see `_write`
        from .int8_graph_files import int8_graph_plan  # noqa: PLC0415 -- see `_write`

        prompt, graphs = self._prompt, self._graphs
        if prompt is None or graphs is None:
            return
        plan = int8_graph_plan(self._bundle)
        if isinstance(plan, str):
            prompt.keep(PromptChoice(plan))
            return
        graphs.page_limit.drop()  # making it reads the weights once more
        if not prompt.fits(plan) or not self._write(prompt, progress):
            return
        earlier = prompt.choice if prompt.choice is not None and prompt.choice.times.doubtful else None
        if earlier is None:
            graphs.release(prompt.name)
        arena = graphs.arena(self._context)
        if graphs.bind_further(prompt, arena) is None:
            return
        plain, int8 = graphs.bind(arena), graphs.bind(arena)
        plain.prefers_base, int8.preferred = True, prompt.name
        if earlier is None:
            prompts, times = quality_prompts(self._tokenizer), GraphTimes()
            checking = partial(progress, CHECKING)
            kl = measure_quality(int8, plain, prompts, checking, prompts=True).mean_kl
        else:  # only its times are doubtful
            kl, times = earlier.mean_kl, deepcopy(earlier.times)
        measure_prompt_speed(plain, int8, times, self._config.threads, partial(progress, TIMING))
        obstacle = None if times.seconds else f"a context of {self._context} tokens is too short"
        prompt.keep(PromptChoice(obstacle, times, kl, KL_LIMIT))
        if prompt.refusal is not None:
            graphs.release(prompt.name)
        graphs.page_limit.drop()
