"""The public face of a loaded model: `load` gives an `Engine`, which answers and opens conversations.

Several threads may ask at a time: a few answers are generated together, pass by pass, and other requests wait in a
queue. `cancel` may be called from any thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import psutil

from ..errors import InputError
from ..models.bundle import open_bundle
from ..models.find import find_model, path_of_user
from ..models.pairing import find_draft
from ..models.progress import Progress, silent
from .argument_types import checked_arguments
from .conversation import Session
from .devices.power import Power, choose_power, saver_threads
from .devices.processor import usable_cores
from .devices.providers import choose_device
from .embedding import embed_texts
from .graph.session import SessionConfig
from .loaded_model import LoadedModel
from .measure.thread_choice import chosen_threads
from .options import GenerateOptions, Persistence
from .prefill import never
from .result import Reply
from .scheduling.answer_stream import AnswerStream, AsyncAnswerStream
from .scheduling.request_queue import DEFAULT_MAX_WAITING, DEFAULT_PARALLEL, RequestQueue
from .text.chat_template import Message
from .text.messages import template_messages

_log: Final = logging.getLogger(__name__)
Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]
"""What a user says, or the messages of a conversation."""

_PREFIX_SHARE: Final = 0.25
"""Share of the free memory that the KV caches of earlier answers may take."""


@checked_arguments
def load(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    threads: int | None = None,
    power: str = Power.AUTO,
    context: int | None = None,
    cache: bool = True,
    draft: str | os.PathLike[str] | None = "auto",
    history: bool = False,
    learned: bool = True,
    tokenizer: str | os.PathLike[str] | None = None,
    progress: Progress = silent,
    prefix_cache: int | None = None,
    parallel: int = DEFAULT_PARALLEL,
    max_waiting: int = DEFAULT_MAX_WAITING,
) -> Engine:
    """Load a model.

    Args:
        model: an .onnx file, a model folder, or `org/name[:variant][@revision]` on the Hugging Face Hub; None for the
            model that comes with edge-run.
        device: `auto`, `cpu`, `gpu`, `npu` or the name of an execution provider.
        threads: number of compute threads, at most one per processor that this program may use; None for the number
            that `edge-run tune` found to be fastest, else one per performance core, or half as many to save power.
        power: `performance`, `saver` (fewer threads, which sleep between passes: slower, for less processor time), or
            `auto` for `saver` where the machine runs on its battery now. The text does not depend on it.
        context: largest number of tokens of a conversation; None for what the model allows.
        cache: whether to keep on disk what is measured and prepared for this machine: packed weights, the cost of a
            pass, n-gram tables, candidates of the recycling drafter.
        draft: the draft model: a path, None for none, or `auto` for the one the model names.
        history: whether to keep conversations on disk, and to draft from earlier ones.
        learned: whether to keep in the cache what drafters learn from answers; switch it off for repeatable
            measurements.
        tokenizer: a tokenizer.json, or a folder with one, for a model that has none beside it.
        prefix_cache: maximum bytes of memory for the KV caches of earlier answers, from which prompts with the same
            beginning continue; None for a quarter of the memory that is free now, 0 for none.
        parallel: number of answers that are generated at a time. Each has a KV cache of its own; they alternate, one
            forward pass each.
        max_waiting: number of further requests that may wait; more are refused with a `BusyError`.
        progress: called as `progress(stage, fraction)` while an answer waits for a long prompt to be read, or for the
            measurements that the first answer of a new model needs; in the thread that generates.

    Raises:
        BundleError: there is no such model, or it is damaged.
        DeviceError: this machine has no such device.
        InputError: a number is out of range.
    """
    threads = usable_threads(threads)
    if context is not None and context < 2:
        raise InputError(f"context is {context}", "it must be 2 or more")
    if prefix_cache is not None and prefix_cache < 0:
        raise InputError(f"prefix_cache is {prefix_cache}", "it must be a number of bytes, 0 or more")
    if parallel < 1 or max_waiting < 0:
        name, value, least = ("parallel", parallel, 1) if parallel < 1 else ("max_waiting", max_waiting, 0)
        raise InputError(f"{name} is {value}", f"it must be {least} or more")
    chosen, mode = choose_device(device), choose_power(power)
    tokenizer_path = (
        None if tokenizer is None else path_of_user(tokenizer, "give a tokenizer.json, or a folder with one")
    )
    bundle = open_bundle(find_model(model, chosen.kind), kind=chosen.kind, tokenizer=tokenizer_path)
    if not threads and mode.saves:
        threads = saver_threads()
    elif not threads and cache:
        threads = chosen_threads(bundle, SessionConfig(chosen))
    pair = find_draft(bundle, draft)
    if prefix_cache is None:
        prefix_cache = int(_PREFIX_SHARE * psutil.virtual_memory().available)
    persistence = Persistence(cache, history, learned, prefix_cache)
    queue = RequestQueue(parallel, max_waiting)
    config = SessionConfig(chosen, threads, mode)
    return Engine(LoadedModel(bundle, config, context, pair, persistence, progress, queue))


def usable_threads(wanted: int | None) -> int:
    """The number of threads to compute with: `wanted`, as far as they can run at the same time; 0 for None.

    Raises:
        InputError: the number is less than 1.
    """
    if wanted is None:
        return 0
    if wanted < 1:
        raise InputError(f"threads is {wanted}", "it must be 1 or more")
    if wanted > (most := usable_cores()):
        _log.warning("threads is %d, but this program may use %d processors: %d threads compute", wanted, most, most)
    return min(wanted, most)


@dataclass(frozen=True)
class EngineLoad:
    """How busy an engine is."""

    active: int
    """Number of answers that are being generated."""
    waiting: int
    """Number of requests that wait."""
    cached_bytes: int
    """Bytes of the KV caches that are kept of earlier answers."""


class Engine:
    """A model in memory. Make one with `load`; close it, or use it in a `with` block, to free the memory."""

    def __init__(self, model: LoadedModel) -> None:
        self.model: Final = model
        """The loaded model, for measurements and other work with token ids."""
        self.bundle: Final = model.bundle
        self.graph_io: Final = model.graph_io
        self.context: Final = model.context
        """Largest number of tokens of prompt and answer together."""
        self.device: Final = model.device
        self.tokenizer: Final = model.tokenizer
        self.template: Final = model.template
        """The chat template, or None."""

    def generate(self, prompt: Prompt, options: GenerateOptions | None = None, **changes: Any) -> Reply:
        """Answer `prompt` and return the whole answer.

        Options can be given as a `GenerateOptions`, by name, or both.

        Args:
            prompt: what a user says, or a conversation in the form of OpenAI's chat API: a list of messages with a role
                (system, developer, user, assistant or tool) and a content. What conversations have in common with
                earlier ones is not computed again.
            options: options of the answer.
            changes: options by name.

        Raises:
            ContextError: the prompt does not fit the context.
            InputError: an option is out of range or unknown, or a message has another form.
            TemplateError: the model has no chat template (use `raw=True`) or a broken one.
        """
        return Reply.of(self.stream(prompt, options, **changes))

    @checked_arguments
    def stream(self, prompt: Prompt, options: GenerateOptions | None = None, **changes: Any) -> AnswerStream:
        """Answer `prompt` piece by piece; arguments and errors as for `generate`, raised before the first piece."""
        chosen = (options or GenerateOptions()).changed(changes)
        return self.model.answer(None, self._prompt_ids(prompt, chosen), chosen)

    async def agenerate(self, prompt: Prompt, options: GenerateOptions | None = None, **changes: Any) -> Reply:
        """`generate` for asyncio: decodes in a worker thread."""
        return Reply.of([chunk async for chunk in self.astream(prompt, options, **changes)])

    def astream(self, prompt: Prompt, options: GenerateOptions | None = None, **changes: Any) -> AsyncAnswerStream:
        """`stream` for asyncio: decodes in a worker thread; cancelling the task cancels the answer.

        A stream that is left early is closed with `await stream.aclose()`, or by dropping it.
        """
        return AsyncAnswerStream(lambda: self.stream(prompt, options, **changes))

    @checked_arguments
    def count_tokens(self, prompt: Prompt, options: GenerateOptions | None = None) -> int:
        """Number of tokens of the prompt that `stream` would run for these arguments, without running it.

        Args:
            prompt: a text or a conversation, as for `generate`.
            options: options of the answer. Its start counts.

        Raises:
            InputError: a message has another form, or an option does not fit the prompt.
            TemplateError: the model has no chat template, or it failed.
        """
        chosen = options or GenerateOptions()
        start = self.model.answer_start(chosen)
        return len(self._prompt_ids(prompt, chosen)) + (0 if start is None else len(start.token_ids))

    @checked_arguments
    def session(self, *, system: str | None = None, resume: str | os.PathLike[str] | None = None) -> Session:
        """Open a conversation with a KV cache of its own: a new one, or one that `Session.save` wrote.

        Raises:
            InputError: the saved conversation cannot be read or belongs to another model.
            TemplateError: the model has no chat template.
        """
        if resume is not None:
            if system is not None:
                raise InputError("a resumed conversation has its system message already", "give system or resume")
            return Session.resume(self.model, Path(resume))
        return Session(self.model, system=system)

    @checked_arguments
    def encode_chat(
        self, messages: Sequence[Message], /, *, special_tokens_in_messages: bool = False, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation in the chat template, up to the beginning of the assistant's answer.

        Args:
            messages: roles and contents, in order.
            special_tokens_in_messages: as in `GenerateOptions`.
            variables: what the template takes besides, such as `tools` and `documents`.

        Raises:
            TemplateError: the model has no chat template, or it failed.
        """
        return self.model.encode_chat(messages, special_tokens_in_messages=special_tokens_in_messages, **variables)

    @checked_arguments
    def embed(
        self, texts: Sequence[str | Sequence[int]], *, cancelled: Callable[[], bool] = never
    ) -> npt.NDArray[np.float32]:
        """Embed texts: vectors whose dot products say how similar the texts are.

        A text is tokenized like a raw prompt, with the tokens that the tokenizer itself adds. The hidden states of its
        tokens are pooled as the model's `1_Pooling/config.json` says (the last token's, or their mean); without that
        file, the last token's is taken. Instructions that a model wants before a query are part of the text.

        Args:
            texts: the texts, or their token ids, each of which must fit the context.
            cancelled: called before every forward pass; True ends the work with an error.

        Returns:
            float32 `[n, d]`, rows of length 1.

        Raises:
            ContextError: a text does not fit the context.
            EdgeError: `cancelled` returned True.
            InputError: the graph does not give hidden states (export it with --hidden-states), a text is empty, or the
                model wants another pooling.
        """
        return embed_texts(self.model, texts, self.model.queue.turn, cancelled)

    def _prompt_ids(self, prompt: Prompt, options: GenerateOptions) -> list[int]:
        """Token ids of a prompt or a conversation; errors as for `generate`."""
        if options.raw:
            if not isinstance(prompt, str):
                raise InputError("raw continues a text, but the prompt is messages", "leave raw out, or give a text")
            if options.system is not None:
                raise InputError("a raw prompt has no system message", "write it into the prompt, or leave raw out")
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        if isinstance(prompt, str):
            messages = [{"role": "system", "content": options.system}] if options.system is not None else []
            return self.model.encode_request([*messages, {"role": "user", "content": prompt}], options)
        if options.system is not None:
            raise InputError("system is given beside messages", "make it the first message, of the role system")
        return self.model.encode_request(template_messages(prompt), options)

    def load_now(self) -> EngineLoad:
        """How busy the engine is."""
        queue = self.model.queue
        return EngineLoad(queue.running, queue.waiting, self.model.prefixes.nbytes)

    def cancel(self) -> None:
        """End the answers being generated after their current passes; callable from any thread."""
        self.model.queue.cancel()

    def close(self) -> None:
        """End the answers being generated and free the model's memory; calling it again does nothing.

        Raises:
            EdgeError: it was called by something that an answer has called, such as the progress function.
        """
        self.model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
