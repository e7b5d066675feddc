"""A loaded model: `load` it, then `generate`, `stream`, or open a `session`.

One decode runs at a time; other threads wait their turn. `cancel` may be called from any thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from ..errors import BundleError, ContextError, EdgeError, InputError, TemplateError
from ..models.bundle import MAP_NAME, Bundle, open_bundle
from ..models.find import find_model
from ..models.pairing import find_draft
from .conversation import Session
from .decode import DecodeLimits
from .devices.providers import choose_device
from .generation import CachedSequence, complete
from .graph.graph_io import GraphIO
from .graph.memory import trim_heap
from .graph.open_graph import open_graph
from .graph.session import GraphSession, SessionConfig
from .kv.arena import KVArena
from .measure.exactness import SAMPLE_TEXT, ExactnessReport
from .options import GenerateOptions, ModelDefaults
from .request_queue import AnswerStream, RequestQueue
from .result import Chunk, Reply
from .sampling import SamplingParams
from .speculation.choice import Speculation
from .speculation.draft_loading import share_cores
from .speculation.drafters.draft_model import DraftModel
from .speculation.pass_cost import PassCost
from .speculation.pool import DrafterPool, OracleMode, Recording
from .speculation.speculator import Speculator
from .text.chat_template import ChatTemplate, Message, load_template
from .text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import os

_MOST_THREADS: Final = 1024


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    threads: int | None = None,
    context: int | None = None,
    cache: bool = True,
    draft: str | os.PathLike[str] | None = "auto",
    history: bool = False,
    learned: bool = True,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Engine:
    """Load a model.

    Args:
        model: an .onnx file, a model folder, or `org/name[:variant][@revision]` on the Hugging Face Hub; None for the
            model that comes with edge-run.
        device: `auto`, `cpu`, `gpu`, `npu` or the name of an execution provider.
        threads: compute threads; None for one per physical core.
        context: most tokens a conversation may have; None for what the model allows.
        cache: whether what was learned about the model on this machine is kept on disk: weights packed for it (see
            `prepacked`), what a pass costs, recycled candidates.
        draft: the draft model: a path, None for none, or `auto` for the one the model names.
        history: whether to keep conversations on disk, and to draft from earlier ones.
        learned: whether what answers teach about the model (recycled candidates) is read from the cache and kept there;
            a measurement that is to be repeatable does without.
        tokenizer: a tokenizer.json, or a folder with one, for a model that has none beside it.

    Raises:
        BundleError: there is no such model, or it is damaged.
        DeviceError: this machine has no such device.
        InputError: a number is out of range.
    """
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise InputError(f"threads is {threads}", f"it must be 1 or more, and at most {_MOST_THREADS}")
    if context is not None and context < 2:
        raise InputError(f"context is {context}", "it must be 2 or more")
    chosen = choose_device(device)
    path = find_model(model, chosen.kind)
    tokens = None if tokenizer is None else Path(tokenizer).expanduser()
    bundle = open_bundle(path, kind=chosen.kind, tokenizer=tokens)
    config = SessionConfig(chosen, threads or 0)
    return Engine(bundle, config, context, cache=cache, draft=draft, history=history, learned=learned)


class Engine:
    """A model in memory. Use `load` to make one; close it, or use it in a `with` block, to free the memory."""

    def __init__(
        self,
        bundle: Bundle,
        config: SessionConfig,
        context: int | None = None,
        *,
        cache: bool = True,
        draft: str | os.PathLike[str] | None = "auto",
        history: bool = False,
        learned: bool = True,
    ) -> None:
        self.bundle: Final = bundle
        pair = find_draft(bundle, draft)
        draft_config = config
        if pair is not None:
            config, draft_config = share_cores(config, pair.draft)
        self._graph: GraphSession | None = open_graph(bundle, config, cache=cache)
        self.graph_io: Final = self._graph.graph_io
        self.context: Final = _context_limit(bundle, self.graph_io.capacity, context)
        """Most tokens of prompt and answer together."""
        self.device: Final = config.device
        _require_whole_head(bundle, self.graph_io)
        self.tokenizer: Final = TextTokenizer(bundle, self.graph_io.vocab_size)
        self.template: Final = load_template(bundle, self.tokenizer)
        self.defaults: Final = ModelDefaults.of(bundle)
        self._drafter_pool: Final = DrafterPool(
            self._graph, bundle, self.context, pair, draft_config, cache=cache, history=history, learned=learned
        )
        trim_heap()
        self._text: CachedSequence | None = None
        self.turns: Final = RequestQueue()

    def generate(self, prompt: str, options: GenerateOptions | None = None, **changes: Any) -> Reply:
        """Answer `prompt` whole. Options can be given as a `GenerateOptions`, by name, or both.

        Raises:
            ContextError: the prompt does not fit the context.
            InputError: an option is out of range or unknown.
            TemplateError: the model has no chat template (use `raw=True`) or a broken one.
        """
        return Reply.of(self.stream(prompt, options, **changes))

    def stream(self, prompt: str, options: GenerateOptions | None = None, **changes: Any) -> AnswerStream:
        """Answer `prompt` piece by piece; errors as for `generate`, raised before the first piece."""
        if not isinstance(prompt, str):
            raise InputError(f"the prompt is {prompt!r}", "it must be text")
        chosen = (options or GenerateOptions()).changed(changes)
        if chosen.raw:
            if chosen.system is not None:
                raise InputError("a raw prompt has no system message", "write it into the prompt, or leave raw out")
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            messages = [{"role": "system", "content": chosen.system}] if chosen.system is not None else []
            ids = self.encode_chat([*messages, {"role": "user", "content": prompt}])
        return self.run(None, ids, chosen)

    async def agenerate(self, prompt: str, options: GenerateOptions | None = None, **changes: Any) -> Reply:
        """`generate` for asyncio: decodes in a worker thread."""
        return Reply.of([chunk async for chunk in self.astream(prompt, options, **changes)])

    def astream(self, prompt: str, options: GenerateOptions | None = None, **changes: Any) -> AsyncIterator[Chunk]:
        """`stream` for asyncio: decodes in a worker thread; cancelling the task cancels the answer."""
        from .async_stream import stream_in_thread  # noqa: PLC0415  asyncio takes a tenth of the import time

        return stream_in_thread(lambda: self.stream(prompt, options, **changes))

    def session(self, *, system: str | None = None, resume: str | os.PathLike[str] | None = None) -> Session:
        """Open a conversation with its own cache, new or as `Session.save` left it.

        Raises:
            InputError: the saved conversation cannot be read or is of another model.
            TemplateError: the model has no chat template.
        """
        if resume is not None:
            if system is not None:
                raise InputError("a resumed conversation has its system message already", "give system or resume")
            return Session.resume(self, Path(resume))
        return Session(self, system=system)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the model's files; tells saved conversations of one model from another's."""
        return self.bundle.fingerprint

    def cancel(self) -> None:
        """End the answer being written, if there is one, after its current pass; callable from any thread."""
        self.turns.cancel()

    def close(self) -> None:
        """End the answer being written and free the model's memory; calling it again does nothing."""
        self.turns.close()
        self._drafter_pool.close()
        self._graph = None
        self._text = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a conversation as the chat template writes it, ready for the assistant's turn.

        Raises:
            TemplateError: there is no chat template, or it failed.
        """
        text = self.require_template().render(messages, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def require_template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            TemplateError: it has none.
        """
        if self.template is None:
            hint = "continue plain text: --raw -p TEXT (raw=True)"
            raise TemplateError(f"{self.bundle.folder} has no chat template", hint)
        return self.template

    def new_sequence(self) -> CachedSequence:
        """An empty arena of this model's, for one conversation.

        Raises:
            EdgeError: the engine is closed.
        """
        if self._graph is None:
            raise EdgeError("this engine is closed", "load the model again")
        return CachedSequence(self._graph.bind(self._graph.arena(self.context)))

    def run(self, text: CachedSequence | None, prompt: Sequence[int], options: GenerateOptions) -> AnswerStream:
        """Answer the token ids of `prompt` over a conversation's arena, or from nothing, when this answer's turn comes.

        Raises:
            ContextError: the prompt does not fit the context.
            InputError: the prompt is empty.
        """
        self.check_fits(prompt)
        return AnswerStream(self.turns, lambda cancelled: self.write(text, prompt, options, cancelled))

    def replay(
        self,
        text: CachedSequence | None,
        prompt: Sequence[int],
        answer: Sequence[int],
        options: GenerateOptions,
        *,
        foresight: OracleMode = OracleMode.NONE,
    ) -> AnswerStream:
        """`run`, except that the answer's tokens are recorded ones: for measuring what drafting a real answer costs.

        Every pass and every choice is made and paid for; only their outcome is replaced. With `foresight`, a
        drafter that knows the answer, or one that is always wrong, takes the place of the others.

        Raises:
            ContextError: the prompt does not fit the context.
            InputError: the prompt or the answer is empty, or the answer not of this model's tokens.
        """
        self.check_fits(prompt)
        if not answer:
            raise InputError("the recorded answer is empty", "leave it out")
        if min(answer) < 0 or max(answer) >= self.graph_io.vocab_size:
            raise InputError("the recorded answer has tokens that the model does not", "record it with this model")
        most = min(len(answer), options.max_tokens or len(answer))
        recorded = Recording(tuple(answer), foresight)
        limited = options.changed({"max_tokens": most})
        return AnswerStream(self.turns, lambda cancelled: self.write(text, prompt, limited, cancelled, recorded))

    def pass_cost(self) -> PassCost:
        """What passes cost on this machine; measured now if it is not known yet."""
        return self._drafter_pool.pass_cost(self.new_sequence)

    def speculator(self, sampling: SamplingParams, arena: KVArena) -> Speculator | None:
        """Every drafter at hand, for answers that are decoded without `run` over `arena`."""
        return self._drafter_pool.speculator(Speculation.AUTO, sampling, self.new_sequence, (), arena)

    def draft_model(self) -> DraftModel | None:
        """The draft model that guesses ahead, loaded if need be; None if there is none. It follows every answer."""
        return self._drafter_pool.draft_model(self.new_sequence)

    def exactness_report(self) -> ExactnessReport:
        """How exact speculation is on this machine, as far as it is known; a little is measured now if nothing is."""
        return self._drafter_pool.exactness_report(
            self.new_sequence, self.tokenizer.encode(SAMPLE_TEXT, add_special_tokens=True)
        )

    def store_exactness_report(self, exactness_report: ExactnessReport) -> None:
        """Take over what was found out about that, and keep it."""
        self._drafter_pool.store_exactness_report(exactness_report)

    def check_fits(self, prompt: Sequence[int]) -> None:
        """Check that a prompt leaves room for an answer.

        Raises:
            ContextError: it does not.
            InputError: it is empty.
        """
        if not prompt:
            raise InputError("the prompt is empty", "give at least one character")
        if len(prompt) >= self.context:
            raise ContextError(
                f"the prompt has {len(prompt)} tokens and the model's context is {self.context}",
                "shorten it, or start the conversation again",
            )

    def write(
        self,
        text: CachedSequence | None,
        prompt: Sequence[int],
        options: GenerateOptions,
        cancelled: Callable[[], bool],
        recorded: Recording | None = None,
    ) -> Generator[Chunk, None, None]:
        """Write an answer now; to be started only by an `AnswerStream` whose turn it is."""
        if text is None:
            if self._text is None:
                self._text = self.new_sequence()
            text = self._text
            # An answer outside a session starts from nothing, so that it depends on nothing that was asked before.
            text.tokens.clear()
        # A recorded answer may hold any token; it ends where it ends.
        limits = DecodeLimits(options.max_tokens, frozenset() if recorded else self.tokenizer.eos)
        kept = min(text.bound.arena.length, len(text.tokens))
        sampling = options.sampling(self.defaults)
        speculator = self._drafter_pool.speculator(
            options.speculation,
            sampling,
            self.new_sequence,
            prompt,
            text.bound.arena,
            recorded,
            exact=options.exact,
            drawing=options.drawing,
        )
        epsilon = None
        if options.exact and recorded is None:
            speculator, epsilon = self._exactly(speculator, sampling)
        yield from complete(
            text,
            prompt,
            self.tokenizer,
            sampling,
            limits,
            options.stops,
            cancelled,
            speculator,
            answer=recorded.answer if recorded else None,
            epsilon=epsilon,
            keep_rounds=options.explain,
        )
        self._drafter_pool.remember(text.tokens[kept:])

    def _exactly(self, speculator: Speculator | None, sampling: SamplingParams) -> tuple[Speculator | None, float]:
        """Who may guess in an exact answer, and which scores are too near to trust passes over guesses."""
        if speculator is None or not sampling.greedy:
            return None, 0.0
        exactness_report = self.exactness_report()
        return (speculator, exactness_report.epsilon) if exactness_report.noise.sound else (None, 0.0)


def _require_whole_head(bundle: Bundle, graph_io: GraphIO) -> None:
    """Refuse a draft that cannot say most of its tokens.

    Raises:
        BundleError: the model is one.
    """
    if graph_io.vocab_size < graph_io.input_vocab and bundle.file(MAP_NAME) is not None:
        raise BundleError(
            f"{bundle.folder} is a draft whose head has {graph_io.vocab_size} of {graph_io.input_vocab} tokens",
            "run the model that it drafts for",
        )


def _context_limit(bundle: Bundle, capacity: int | None, asked: int | None) -> int:
    """The context to use: what was asked for, up to what the model allows and a cache of fixed size holds.

    Raises:
        InputError: more was asked for than the model allows, or nothing says what it allows.
    """
    limits = [limit for limit in (bundle.context, capacity) if limit is not None]
    allowed = min(limits, default=None)
    if allowed is None:
        if asked is None:
            raise InputError(f"nothing beside {bundle.graph} says how long the context is", "give it with --context")
        return asked
    if asked is not None and asked > allowed:
        raise InputError(f"context is {asked}", f"this model allows at most {allowed}")
    return allowed if asked is None else asked
