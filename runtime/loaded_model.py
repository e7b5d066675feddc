"""A model in memory with everything that answering takes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ..errors import BundleError, EdgeError, InputError, TemplateError
from ..models.bundle import TARGET_IDS_NAME, Bundle
from ..models.device_kind import DeviceKind
from ..models.pairing import DraftPair
from ..models.progress import Progress, silent
from .decode import check_prompt_fits
from .devices.processor import default_threads
from .generation import CachedSequence, Generation
from .graph.graph_io import GraphIO
from .graph.memory import trim_heap
from .graph.open_graph import open_graph
from .graph.session import GraphSession, SessionConfig
from .kv.arena import KVArena
from .kv.prefix_cache import PrefixCache
from .options import GenerateOptions, GenerationRequest, ModelDefaults, Persistence
from .result import Chunk
from .scheduling.alternating_choices import generate_choices
from .scheduling.answer_stream import AnswerStream
from .scheduling.request_queue import RequestQueue
from .speculation.draft_loading import share_cores
from .speculation.pool import DrafterPool
from .speculation.replay import OracleMode, Recording
from .text.answer_start import AnswerStart
from .text.chat_template import ChatTemplate, Message, encode_chat, load_template
from .text.tokenizer import TextTokenizer


class LoadedModel:
    """A loaded graph with its tokenizer, chat template, drafters and request queue.

    Args:
        bundle: the model's files.
        config: how the graph runs.
        context: largest number of tokens of prompt and answer together; None for what the model allows.
        pair: the draft model; None for none.
        persistence: what is read from disk and kept there.
        progress: receives the progress of what an answer waits for: measurements of a new model, long prompts.
        queue: the request queue of the engine; None for one of the usual size.

    Raises:
        BundleError: the model is damaged, or a draft model that cannot generate by itself.
        InputError: `context` is more than the model allows, or nothing says what it allows.
    """

    def __init__(
        self,
        bundle: Bundle,
        config: SessionConfig,
        context: int | None,
        pair: DraftPair | None,
        persistence: Persistence,
        progress: Progress = silent,
        queue: RequestQueue | None = None,
    ) -> None:
        self.bundle: Final = bundle
        self._progress = progress
        draft_config = config
        if pair is not None:
            config, draft_config = share_cores(config, pair.draft)
        graph = open_graph(bundle, config, cache=persistence.cache)
        self._graph: GraphSession | None = graph
        self.graph_io: Final = graph.graph_io
        self.context: Final = _context_limit(bundle, graph.graph_io.capacity, context)
        """Largest number of tokens of prompt and answer together."""
        self.device: Final = config.device
        self.threads: Final = config.threads
        """Number of compute threads; 0 for `default_threads`."""
        self.power: Final = config.power
        """Whether the threads spin while they wait for work, or sleep."""
        _require_whole_head(bundle, graph.graph_io)
        self.tokenizer: Final = TextTokenizer(bundle, graph.graph_io.vocab_size)
        self.template: Final = load_template(bundle, self.tokenizer)
        self.defaults: Final = ModelDefaults.of(bundle)
        self.drafters: Final = DrafterPool(graph, bundle, self.context, pair, draft_config, persistence, progress)
        self.queue: Final = RequestQueue() if queue is None else queue
        self.prefixes: Final = PrefixCache(self._new_arena, persistence.prefix_bytes)
        """KV caches of finished answers and conversations."""
        trim_heap()

    @property
    def compute_threads(self) -> int | None:
        """Number of threads that compute; None on other devices than the CPU."""
        return (self.threads or default_threads()) if self.device.kind is DeviceKind.CPU else None

    def close(self) -> None:
        """End the answers being generated and free the memory; calling it again does nothing."""
        self.queue.close()
        self.drafters.close()
        self._graph = None
        self.prefixes.clear()

    def require_template(self) -> ChatTemplate:
        """Return the chat template.

        Raises:
            TemplateError: the model has none.
        """
        if self.template is None:
            hint = "continue plain text: --raw -p TEXT (raw=True)"
            raise TemplateError(f"{self.bundle.folder} has no chat template", hint)
        return self.template

    def encode_chat(
        self, messages: Sequence[Message], /, *, special_tokens_in_messages: bool = False, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation in the chat template, up to the beginning of the assistant's answer.

        Args:
            messages: roles and contents, in order.
            special_tokens_in_messages: whether the text of a special token becomes that token also where it comes from
                a message, a tool or a document, and not only where the template writes it.
            variables: what the template takes besides, such as `tools` and `documents`.

        Raises:
            InputError: the messages are nested too deep.
            TemplateError: the model has no chat template, or it failed.
        """
        template = self.require_template()
        return encode_chat(
            template,
            self.tokenizer,
            messages,
            special_tokens_in_messages=special_tokens_in_messages,
            **variables,
        )

    def encode_request(self, messages: Sequence[Message], options: GenerateOptions) -> list[int]:
        """Token ids of a conversation with the tools and variables of an answer's options; errors as above."""
        return self.encode_chat(
            messages,
            special_tokens_in_messages=options.special_tokens_in_messages,
            tools=list(options.tools) or None,
            **(options.template_variables or {}),
        )

    def new_sequence(self, *, hidden_states: bool = False) -> CachedSequence:
        """Make an empty sequence with a KV cache of its own; with `hidden_states`, its passes give them too.

        Raises:
            EdgeError: the model is closed.
        """
        return CachedSequence(
            self._open_graph().bind(self._new_arena(), hidden_states=hidden_states), progress=self._progress
        )

    def continue_prefix(self, sequence: CachedSequence, prompt_ids: Sequence[int]) -> None:
        """Let an empty sequence start from the cache slots that an earlier one has of its prompt."""
        sequence.bound.use(self.prefixes.take(prompt_ids))
        sequence.token_ids = list(prompt_ids[: sequence.arena.length])

    def answer_start(self, options: GenerateOptions) -> AnswerStart | None:
        """What an answer begins with; None for nothing.

        Raises:
            InputError: a token id is not one of the model's, or ends the answer.
        """
        if not len(options.answer_start):
            return None
        vocab_size = self.graph_io.vocab_size
        return AnswerStart.of(
            options.answer_start, self.tokenizer, vocab_size=vocab_size, ignore_eos=options.ignore_eos
        )

    def answer(
        self, sequence: CachedSequence | None, prompt_ids: Sequence[int], options: GenerateOptions
    ) -> AnswerStream:
        """Answer a prompt of token ids.

        Args:
            sequence: the cache to continue; None to start from an empty one.
            prompt_ids: the whole prompt, also the part that the cache holds, without the start of the answer.
            options: options of the answer. Several answers to the prompt need a `sequence` of None.

        Raises:
            ContextError: the prompt does not fit the context.
            InputError: the prompt is empty, or the start of the answer has a token that it cannot have.
        """
        start = self.answer_start(options)
        request = options.request(prompt_ids, self.defaults, start)
        check_prompt_fits(request.prompt_ids, self.context)
        start_text = "" if start is None else start.text
        if options.n > 1:
            return AnswerStream(
                self.queue,
                lambda cancelled: self._choices(request, options.n, cancelled),
                choices=options.n,
                start_text=start_text,
            )
        return AnswerStream(
            self.queue,
            lambda cancelled: self.generate(sequence, request, cancelled),
            sequence,
            start_text=start_text,
        )

    def replay(
        self,
        sequence: CachedSequence | None,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        options: GenerateOptions,
        *,
        oracle_mode: OracleMode = OracleMode.NONE,
    ) -> AnswerStream:
        """Give a recorded answer at the cost of generating it: measures what drafting a real answer takes.

        Every pass runs and every token is chosen as for `answer`; then the recorded token replaces the chosen one.

        Args:
            sequence: as for `answer`.
            prompt_ids: as for `answer`.
            answer_ids: tokens of the recorded answer.
            options: options of the answer, which cannot have a start.
            oracle_mode: whether a drafter that knows the answer replaces the others.

        Raises:
            ContextError: the prompt does not fit the context.
            InputError: the prompt or the recorded answer is empty, or the answer has tokens that the model has not.
        """
        check_prompt_fits(prompt_ids, self.context)
        if not answer_ids:
            raise InputError("the recorded answer is empty", "leave it out")
        if len(options.answer_start):
            raise InputError("a recorded answer has a start of its own", "leave answer_start out")
        if min(answer_ids) < 0 or max(answer_ids) >= self.graph_io.vocab_size:
            raise InputError("the recorded answer has tokens that the model does not", "record it with this model")
        max_tokens = min(len(answer_ids), options.max_tokens or len(answer_ids))
        recording = Recording(tuple(answer_ids), oracle_mode)
        request = options.changed({"max_tokens": max_tokens}).request(prompt_ids, self.defaults, recording=recording)
        return AnswerStream(self.queue, lambda cancelled: self.generate(sequence, request, cancelled), sequence)

    def generate(
        self, sequence: CachedSequence | None, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> Generator[Chunk, None, None]:
        """Generate an answer; only an `AnswerStream`, in its turn, may iterate over the chunks.

        An answer outside a conversation continues from the longest prefix that an earlier sequence shares with it.
        """
        if sequence is None:
            # What another request has computed may differ in the last bits, so exact answers start afresh.
            arena = self.prefixes.take(() if request.exact else request.prompt_ids)
            token_ids = list(request.prompt_ids[: arena.length])
            bound = self._open_graph().bind(arena)
            sequence = CachedSequence(bound, token_ids, self._progress, self.prefixes)
        return Generation(sequence, request, self.tokenizer, self.drafters, cancelled).generate()

    def _choices(
        self, request: GenerationRequest, count: int, cancelled: Callable[[], bool]
    ) -> Generator[Chunk, None, None]:
        """Generate several answers to a prompt, which differ in their seeds."""
        seeds = [(request.sampling.seed + index) % (1 << 64) for index in range(count)]
        requests = [replace(request, sampling=replace(request.sampling, seed=seed)) for seed in seeds]
        return generate_choices([partial(self.generate, None, each, cancelled) for each in requests])

    def _new_arena(self) -> KVArena:
        return self._open_graph().arena(self.context)

    def _open_graph(self) -> GraphSession:
        if self._graph is None:
            raise EdgeError("this engine is closed", "load the model again")
        return self._graph


def _require_whole_head(bundle: Bundle, graph_io: GraphIO) -> None:
    """Refuse a draft model whose LM head lacks most of the vocabulary.

    Raises:
        BundleError: the model is one.
    """
    if graph_io.vocab_size < graph_io.input_vocab and bundle.file(TARGET_IDS_NAME) is not None:
        raise BundleError(
            f"{bundle.folder} is a draft whose head has {graph_io.vocab_size} of {graph_io.input_vocab} tokens",
            "run the model that it drafts for",
        )


def _context_limit(bundle: Bundle, capacity: int | None, wanted: int | None) -> int:
    """The context to use: `wanted`, at most what the model allows and a cache of fixed size holds.

    Raises:
        InputError: `wanted` is more than that, or nothing says what the model allows.
    """
    limits = [limit for limit in (bundle.context, capacity) if limit is not None]
    allowed = min(limits, default=None)
    if allowed is None:
        if wanted is None:
            raise InputError(f"nothing beside {bundle.graph} says how long the context is", "give it with --context")
        return wanted
    if wanted is not None and wanted > allowed:
        raise InputError(f"context is {wanted}", f"this model allows at most {allowed}")
    return allowed if wanted is None else wanted
