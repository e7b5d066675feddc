"""A model in memory with everything that answering takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ..errors import BundleError, EdgeError, InputError, TemplateError
from ..models.bundle import TARGET_IDS_NAME, Bundle
from ..models.find import model_name
from ..models.manifest import DeviceKind
from ..models.progress import Progress, silent
from .arguments.load_options import LoadOptions
from .decode import check_prompt_fits
from .devices.processor import available_memory, default_threads, processor
from .devices.providers import device_identity
from .generation import Generation
from .graph.bound_graph import BoundGraph, ImagesOfText, keyed_ids
from .graph.cache_shift import CacheShift
from .graph.memory import trim_heap
from .graph.open_graph import open_graph
from .graph.ort import RUNTIME_BUILD
from .graph.session import DecoderGraph, SessionConfig
from .images.prompt_images import placed_images
from .images.vision_model import open_vision
from .int8_prompts.prefill_choice import PrefillChoice
from .kv.arena import KVArena
from .kv.features import FeatureSlots
from .kv.parked_cache import can_park
from .kv.prefix_cache import CachedSequence, PrefixCache
from .kv.prefix_files import PrefixFiles
from .measure.measurement_store import model_id
from .options import GenerateOptions, Request, model_defaults
from .overflow import context_limit, expected_tokens, fitted, overflow_of
from .prefill import PrefillMode
from .scheduling.answer_stream import AnswerStream
from .scheduling.request_queue import Chunks, RequestQueue, Ticket
from .scheduling.several_answers import PromptAnswers
from .speculation.choice import Speculation
from .speculation.draft_loading import DraftTarget, PlacedDraft
from .speculation.pool import DrafterPool
from .speculation.replay import OracleMode, Recording
from .strategies.anchored import anchor_sequences
from .strategies.search_choice import search_of
from .strategies.second_reader import second_readers, with_second_prompts
from .structure.format_compiler import FormatCompiler
from .text.chat_template import ChatTemplate, Message, load_template
from .text.detokenizer import AnswerStart
from .text.messages import ChatPrompt
from .text.tokenizer import TextTokenizer
from .tools.answer_format import AnswerFormat

_CACHES_SHARE: Final = 0.5
"""Share of the free memory, once a model is loaded, that the KV caches of simultaneous answers may take."""


class LoadedModel:
    """A loaded graph with its tokenizer, chat template, drafters and request queue.

    Args:
        bundle: the model's files.
        config: how the graph runs.
        options: the options that the model was loaded with; those that chose `config` and `draft` are not read again.
        draft: the draft model; None for none.
        progress: receives the progress of what an answer waits for: measurements of a new model, long prompts.

    Raises:
        BundleError: the model is damaged, a draft model that cannot generate by itself, or one that cannot have the
            int8 prompt graph that was asked for by name.
        InputError: the context is more than the model allows, or nothing says what it allows; or the int8 prompt graph
            was asked for by name where it cannot run; or there is no such form of calls.
    """

    def __init__(
        self,
        bundle: Bundle,
        config: SessionConfig,
        options: LoadOptions,
        draft: PlacedDraft | None = None,
        progress: Progress = silent,
    ) -> None:
        self.bundle: Final = bundle
        self._progress = progress
        self.config: Final = config
        """How the graph runs."""
        self._uses_cache = options.cache
        graph = open_graph(bundle, config, cache=options.cache, prefill=PrefillMode(options.prefill), steering=options)
        self._graph: DecoderGraph | None = graph
        self._feature_size = graph.graph_io.feature_size if draft is not None and draft.pair.head is not None else None
        self.graph_io: Final = graph.graph_io
        self.context: Final = context_limit(bundle, graph.graph_io.capacity, options.context)
        """Largest number of tokens of prompt and answer together."""
        self.device: Final = config.device
        self.on_cpu: Final = graph.on_cpu
        """Which provider runs the nodes of the graph."""
        if graph.graph_io.vocab_size < graph.graph_io.input_vocab and bundle.file(TARGET_IDS_NAME) is not None:
            sizes = f"{graph.graph_io.vocab_size} of {graph.graph_io.input_vocab} tokens"
            raise BundleError(f"{bundle.folder} is a draft whose head has {sizes}", "run the model that it drafts for")
        self.tokenizer: Final = TextTokenizer(bundle, graph.graph_io.vocab_size)
        self.template: Final = load_template(bundle, self.tokenizer)
        written = "" if self.template is None else self.template.written
        self.answer_format: Final = AnswerFormat(written, options.tool_format, self.tokenizer)
        """How reasoning and calls are found in answers."""
        self.defaults: Final = model_defaults(bundle)
        room = _CACHES_SHARE * available_memory() if self.device.kind is DeviceKind.CPU else math.inf
        self.queue: Final = RequestQueue(options.parallel, options.max_waiting, room)
        self.vision: Final = open_vision(bundle, config, graph, self.queue, options.cache, options.lossy_image_tokens)
        """What sees the images of messages; None for a model that reads text alone."""
        self.shared_passes: Final = graph.share_passes(options.parallel, self.queue.gather)
        """What runs the passes of simultaneous answers; if they take turns, why."""
        self.overflow: Final = options.overflow
        """What happens where a conversation is longer than the context; None for the default of the place."""
        self._formats: Final = FormatCompiler(self.tokenizer, graph.graph_io.vocab_size)
        self._shift: Final = CacheShift(bundle.graph, self.graph_io, self.new_arena)
        disk = options.prefix_disk if options.cache and not self.graph_io.states else 0  # files have slots alone
        parks = options.lossy_parking and can_park(self.graph_io.tensor_types)
        files = PrefixFiles(self._prefix_key, disk, lambda: self.prefill_choice.refusal is not None, parks=parks)
        self.prefixes: Final = PrefixCache(self.new_arena, options.prefix_cache or 0, files, parks=parks)
        """KV caches of finished answers and conversations, and of chosen prefixes on disk."""
        self.drafters: Final = DrafterPool(
            graph, bundle, self.context, draft, options, self.prefixes, self.queue, progress
        )
        self.prefill_choice: Final = PrefillChoice(graph, bundle, self.tokenizer, self.context, self.queue, options)
        """Which graph reads prompts."""
        self.prefill_choice.prepare(progress)
        target = DraftTarget(bundle, self.graph_io, self.context, options.cache, None, self.prefixes)
        self._anchor = anchor_sequences(options.anchor, config, target, progress)
        trim_heap()

    @property
    def compute_threads(self) -> int | None:
        """Number of threads that compute; None on other devices than the CPU."""
        return (self.config.threads or default_threads()) if self.device.kind is DeviceKind.CPU else None

    def close(self) -> None:
        """End the answers being generated and free the memory; calling it again does nothing."""
        self.queue.close()
        self.prefill_choice.close()
        if not isinstance(self.shared_passes, str):
            self.shared_passes.close()
        self.drafters.close()
        self._formats.close()
        if self.vision is not None:
            self.vision.close()
        self._graph = self._anchor = None
        self.prefixes.wait()
        self.prefixes.clear()

    def require_template(self) -> ChatTemplate:
        """Return the chat template.

        Raises:
            TemplateError: the model has none.
        """
        if self.template is None:
            hint = "continue plain text: --raw -p TEXT (raw=True)"
            raise TemplateError(f"{model_name(self.bundle.folder)} has no chat template", hint)
        return self.template

    def chat_prompt(self, messages: Sequence[Message], options: GenerateOptions) -> ChatPrompt:
        """A conversation with the tools and variables of an answer's options.

        Raises:
            TemplateError: the model has no chat template.
        """
        variables = {"tools": list(options.offered_tools) or None, **(options.template_variables or {})}
        marked = options.special_tokens_in_messages
        return ChatPrompt(messages, self.require_template(), self.tokenizer, variables, marked, self.vision)

    def new_sequence(self, *, hidden_states: bool = False) -> CachedSequence:
        """Make an empty sequence with a KV cache of its own; with `hidden_states`, its passes give them too.

        Raises:
            EdgeError: the model is closed.
        """
        return CachedSequence(
            self._open_graph().bind(self.new_arena(), hidden_states=hidden_states), progress=self._progress
        )

    def forked(self, sequence: CachedSequence, slots: int) -> CachedSequence:
        """A new sequence with a copy of the first `slots` slots of another."""
        arena = self.new_arena()
        arena.copy_from(sequence.arena, slots)
        bound = self._open_graph().bind(arena).steered(sequence.bound.steering)
        bound.images = sequence.bound.images
        return CachedSequence(bound, sequence.token_ids[:slots], self._progress)

    def cache_bytes(self, prompt_tokens: int, options: GenerateOptions) -> int:
        """Bytes of the KV caches that the answers to a prompt are expected to fill at a time."""
        tokens = expected_tokens(self.context, prompt_tokens, options.max_tokens)
        readers = 1 + sum(each.has_reader for each in options.strategies)
        return min(options.candidates, self.queue.parallel) * readers * tokens * self.graph_io.cache_bytes_per_token

    def with_float_cache(self) -> BoundGraph:
        """Load the graph once more, with a float cache, and bind it to one: what a quantized cache is compared with.

        Raises:
            BundleError: the graph cannot be loaded.
        """
        graph = open_graph(self.bundle, replace(self.config, kv_scales=None), cache=self._uses_cache)
        return graph.bind(graph.arena(self.context))

    def answer_start(self, options: GenerateOptions) -> AnswerStart | None:
        """What an answer begins with; None for nothing.

        Raises:
            InputError: a token id is not one of the model's, or ends the answer.
        """
        if not len(options.answer_start):
            return None
        size = self.graph_io.vocab_size
        return AnswerStart.of(options.answer_start, self.tokenizer, vocab_size=size, ignore_eos=options.ignore_eos)

    def request(
        self, prompt_ids: Sequence[int], options: GenerateOptions, start: AnswerStart | None, chat: ChatPrompt | None
    ) -> Request:
        """The request of an answer whose prompt, without `start`, fits the context or has been made to fit.

        Raises:
            ContextError: it does not fit.
            InputError: the prompt is empty, or cannot be shortened in this way.
            TemplateError: the chat template refuses the messages that are left.
        """
        overflow = overflow_of(options.overflow, self.overflow, chat, exact=options.exact)
        start_ids, room = () if start is None else start.token_ids, options.max_tokens
        chat, prompt_ids = fitted(chat, prompt_ids, overflow, self.context, len(start_ids), room)
        images = placed_images(self.vision, chat, prompt_ids, options)
        required = self.answer_format.required_calls(
            options.tools,
            options.tool_choice,
            prompt_ids,
            options.response_format,
            several=options.parallel_tool_calls,
            raw=options.raw,
        )
        grammar = self._formats.compile(options.response_format if required is None else required)
        if grammar is not None and start is not None:
            grammar.start(start.token_ids).end()
        reading = None
        if chat is not None and options.parse_answer:
            reading = self.answer_format.reading(
                options.offered_tools, prompt_ids, start_ids, several=options.parallel_tool_calls
            )
        prompt_ids = [*prompt_ids, *start_ids]
        sampling = options.sampling(self.defaults)
        check_prompt_fits(prompt_ids, self.context)
        options = options if images is None else images.limited(options, prompt_ids, self.context)
        search = search_of(options, self.graph_io, self.tokenizer)
        options = options if search is None else replace(options, speculation=Speculation.OFF)
        self._open_graph().steering(options)
        made = Request(
            prompt_ids, options, sampling, start, None, chat, overflow, grammar, images, reading=reading, search=search
        )
        return with_second_prompts(made, self.tokenizer, self.context, anchored=self._anchor is not None)

    def answer(
        self,
        sequence: CachedSequence | None,
        prompt_ids: Sequence[int],
        options: GenerateOptions,
        chat: ChatPrompt | None = None,
    ) -> AnswerStream:
        """Answer a prompt of token ids.

        Args:
            sequence: the cache to continue; None for what the prefix cache has of the prompt.
            prompt_ids: the whole prompt, also the part that the cache holds, without the start of the answer.
            options: options of the answer. Several answers to the prompt need a `sequence` of None.
            chat: the messages that the prompt was made of; None for a raw one.

        Raises:
            ContextError: the prompt does not fit the context.
            InputError: the prompt is empty, or the start of the answer has a token that it cannot have.
        """
        start = self.answer_start(options)
        request = self.request(prompt_ids, options, start, chat)

        def generate(ticket: Ticket) -> Chunks:
            if options.candidates > 1:
                continued = self.continued_prefix(request.prompt_ids, options, request.images)
                at_once = 1 if isinstance(self.shared_passes, str) else self.queue.parallel
                answers = PromptAnswers(self.queue, at_once, self.generate, self.forked, request, continued, ticket)
                return answers.chunks()
            return self.generate(sequence, request, partial(self.queue.yield_turn, ticket))

        return AnswerStream(
            self.queue,
            generate,
            sequence,
            cache_bytes=self.cache_bytes(len(request.prompt_ids), options),
            choices=options.n,
            start_text="" if start is None else start.text,
            start_parts=None if request.reading is None else request.reading.start_parts,
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
        recording = Recording(tuple(answer_ids), oracle_mode)
        grammar = self._formats.compile(options.response_format)
        options = replace(options, max_tokens=min(len(answer_ids), options.max_tokens or len(answer_ids)))
        request = Request(prompt_ids, options, options.sampling(self.defaults), recording=recording, grammar=grammar)
        return AnswerStream(
            self.queue,
            lambda ticket: self.generate(sequence, request, partial(self.queue.yield_turn, ticket)),
            sequence,
        )

    def generate(self, sequence: CachedSequence | None, request: Request, cancelled: Callable[[], bool]) -> Chunks:
        """Generate an answer; only an `AnswerStream`, in its turn, may iterate over the chunks.

        Without a `sequence`, it continues from the longest prefix that an earlier sequence shares with it.
        """
        if request.options.grammar_aligned > 1 and request.futures is None:
            return self._aligned(sequence, request, cancelled)
        sequence = sequence or self.continued_prefix(request.prompt_ids, request.options, request.images)
        sequence.steer(self._open_graph().steering(request.options))
        readers = second_readers(request, self.continued_prefix, self._anchor, cancelled)
        return Generation(sequence, request, self.tokenizer, self.drafters, self._shift, cancelled, readers).generate()

    def _aligned(self, sequence: CachedSequence | None, request: Request, cancelled: Callable[[], bool]) -> Chunks:
        """Generate an answer after the samples that it is aligned with, which have caches of their own."""
        from .structure.grammar_aligned import generate_aligned  # noqa: PLC0415 -- few answers need it

        def generate(each: Request, *, last: bool) -> Chunks:
            return self.generate(sequence if last else None, each, cancelled)

        return generate_aligned(generate, request)

    def continued_prefix(
        self, prompt_ids: Sequence[int], options: GenerateOptions, images: ImagesOfText | None = None
    ) -> CachedSequence:
        """A new sequence with what earlier ones have of the prompt."""
        prefixes = self.prefixes.of(steering := self._open_graph().steering(options))
        # What another request has computed may differ in the last bits, so exact answers start afresh.
        arena = prefixes.take(() if options.exact or options.penalty_alpha else keyed_ids(prompt_ids, images))
        if options.penalty_alpha:
            arena.features = FeatureSlots(self.graph_io.hidden_size or 0, self.context)
        bound, known = self._open_graph().bind(arena).steered(steering), list(prompt_ids[: arena.length])
        bound.images = images
        return CachedSequence(bound, known, self._progress, None if options.penalty_alpha else prefixes)

    def _prefix_key(self) -> str:
        """What cache slots depend on besides the tokens and the graph that reads the prompt."""
        scales = "" if self.config.kv_scales is None else self.config.kv_scales.digest
        types = [(str(each.dtype), each.shape_of(0)) for each in self.graph_io.tensor_types]
        where = (*device_identity(self.device), RUNTIME_BUILD, processor())
        return "\0".join(map(str, (model_id(self.bundle), *where, scales, types)))

    def new_arena(self) -> KVArena:
        """Make an empty KV cache.

        Raises:
            EdgeError: the model is closed.
        """
        arena = self._open_graph().arena(self.context)
        if self._feature_size is not None:
            arena.features = FeatureSlots(self._feature_size)
        return arena

    def _open_graph(self) -> DecoderGraph:
        if self._graph is None:
            raise EdgeError("this engine is closed", "load the model again")
        return self._graph
