"""The public face of a loaded model: an `Engine` answers and opens conversations.

Several threads may ask at a time: a few answers are generated together, pass by pass, and other requests wait in a
queue. `cancel` may be called from any thread.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, Unpack
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .arguments.argument_types import checked_arguments, lists_options
from .arguments.option_keywords import GenerateKeywords
from .conversation import Session
from .embedding import embed_texts
from .graph.shared_passes import NO_PASSES, PassTotals
from .kv.prefix_cache import CachedSequence
from .loaded_model import LoadedModel
from .options import GenerateOptions
from .overflow import Overflow, answer_reserve
from .prefill import never
from .ranking import ChoiceScore, Relevance, rank_choices, score_documents
from .result import Chunk, Reply
from .scheduling.answer_stream import AnswerStream, read_async
from .speculation.choice import Speculation
from .text.chat_template import Message
from .text.infill import SUGGESTION_TOKENS, InfillTokens
from .text.messages import ChatPrompt, template_messages

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]
"""What a user says, or the messages of a conversation."""


@dataclass(frozen=True)
class EngineActivity:
    """How busy an engine is."""

    active: int
    """Number of answers that are being generated."""
    waiting: int
    """Number of requests that wait."""
    cached_bytes: int
    """Bytes of the KV caches that are kept of earlier answers."""
    passes: PassTotals = NO_PASSES
    """What the forward passes of answers had, where answers share them."""


class Engine:
    """A model in memory. Make one with `load`; close it, or use it in a `with` block, to free the memory."""

    def __init__(self, model: LoadedModel) -> None:
        self.model: Final = model
        """What is behind this face; programs use the attributes below."""
        self.bundle: Final = model.bundle
        self.graph_io: Final = model.graph_io
        self.context: Final = model.context
        """Largest number of tokens of prompt and answer together."""
        self.overflow: Final = model.overflow
        """What happens where a conversation is longer than the context; None for the default of the place."""
        self.device: Final = model.device
        self.tokenizer: Final = model.tokenizer
        self.vocab_size: Final = model.graph_io.vocab_size
        self.template: Final = model.template
        """The chat template, or None."""
        self.answer_format: Final = model.answer_format
        """How reasoning and calls are found in answers."""
        self.defaults: Final = model.defaults
        """How the model samples where options do not say."""
        self.threads: Final = model.config.threads
        """Number of compute threads that was asked for; 0 for the default."""
        self.compute_threads: Final = model.compute_threads
        """Number of threads that compute; None on other devices than the CPU."""
        self.power: Final = model.config.power
        self.on_cpu: Final = model.on_cpu
        """Which provider runs the nodes of the graph."""
        self.drafters: Final = model.drafters
        self.prefill_choice: Final = model.prefill_choice
        """Which graph reads prompts."""
        self.answer_start: Final = model.answer_start
        self.new_sequence: Final = model.new_sequence
        self.with_float_cache: Final = model.with_float_cache
        self.replay: Final = model.replay
        self.documents: Final[WeakValueDictionary[str, AnswerStream]] = WeakValueDictionary()
        """The latest completion of each document, and of each slot of an editor."""

    @lists_options(GenerateOptions)
    def generate(
        self, prompt: Prompt, options: GenerateOptions | None = None, **changes: Unpack[GenerateKeywords]
    ) -> Reply:
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

    @lists_options(GenerateOptions)
    @checked_arguments
    def stream(
        self, prompt: Prompt, options: GenerateOptions | None = None, **changes: Unpack[GenerateKeywords]
    ) -> AnswerStream:
        """Answer `prompt` piece by piece; arguments and errors as for `generate`, raised before the first piece."""
        chosen = (options or GenerateOptions()).changed(changes)
        chat = None if chosen.raw else self.chat_prompt(prompt, chosen)
        prompt_ids = self._raw_ids(prompt, chosen) if chat is None else chat.ids
        stream = self.model.answer(None, prompt_ids, chosen, chat)
        if chosen.suffix is not None and chosen.document is not None:
            stream.end_older(self.documents, chosen.document)
        return stream

    @lists_options(GenerateOptions)
    def complete(
        self,
        prefix: str,
        suffix: str = "",
        /,
        k: int = 1,
        options: GenerateOptions | None = None,
        **changes: Unpack[GenerateKeywords],
    ) -> Reply:
        """Fill the gap between two texts, with the model's tokens for filling in the middle.

        Args:
            prefix: the text before the gap.
            suffix: the text after it.
            k: number of suggestions. They begin with the k likeliest tokens, and share forward passes.
            options: options of the suggestions, which have at most `SUGGESTION_TOKENS` tokens by default.
            changes: options by name, such as `extra`, `document` and `least_confidence`.

        Returns:
            The suggestions as the `choices` of the reply.

        Raises:
            ContextError: the context has no room for the gap's surroundings.
            InputError: the model has no tokens for it, or an option is out of range or unknown.
        """
        chosen = GenerateOptions(max_tokens=SUGGESTION_TOKENS) if options is None else options
        filling = chosen.changed({"suffix": suffix, "n": k, "branch": k > 1})
        return Reply.of(self.stream(prefix, filling, **changes))

    def answer(
        self, prompt: ChatPrompt | Sequence[int], options: GenerateOptions, sequence: CachedSequence | None = None
    ) -> AnswerStream:
        """Answer a conversation of `chat_prompt`, or token ids as they are.

        Args:
            prompt: the conversation, or the token ids.
            options: options of the answer.
            sequence: the KV cache to continue in, of `LoadedModel.new_sequence`; None for what the prefix cache has.

        Raises:
            ContextError: the prompt does not fit the context.
            InputError: the prompt is empty, or the start of the answer has a token that it cannot have.
        """
        chat = prompt if isinstance(prompt, ChatPrompt) else None
        return self.model.answer(sequence, prompt.ids if isinstance(prompt, ChatPrompt) else prompt, options, chat)

    @checked_arguments
    def keep_prefix(self, prompt: Prompt, options: GenerateOptions | None = None) -> int:
        """Read the beginning of later prompts, and keep its KV cache in memory and on disk.

        Prompts that begin with it are answered without reading it again, also by later processes.

        Args:
            prompt: a system message, or the messages that conversations begin with; with the option `raw`, a text.
            options: options of the answers, of which tools, template variables and `raw` count here.

        Returns:
            Number of tokens that are kept.

        Raises:
            ContextError: they do not fit the context.
            InputError: a message has another form.
            TemplateError: the model has no chat template, or it failed.
        """
        chosen, chat = options or GenerateOptions(), None
        if chosen.raw:
            prompt_ids = self._raw_ids(prompt, chosen)
        else:
            system = [{"role": "system", "content": prompt}] if isinstance(prompt, str) else template_messages(prompt)
            chat = self.model.chat_prompt(system, chosen)
            prompt_ids = chat.ids if system[-1]["role"] == "user" else chat.before_user(system)
        reading = GenerateOptions(
            max_tokens=1, speculation=Speculation.OFF, keep_prefix=True, ignore_eos=True, raw=True
        )
        # With the messages, for their images.
        Reply.of(self.model.answer(None, prompt_ids, reading.changed({"overflow": Overflow.ERROR}), chat))
        self.model.prefixes.wait()
        return len(prompt_ids)

    @lists_options(GenerateOptions)
    async def agenerate(
        self, prompt: Prompt, options: GenerateOptions | None = None, **changes: Unpack[GenerateKeywords]
    ) -> Reply:
        """`generate` for asyncio: decodes in a worker thread."""
        return Reply.of([chunk async for chunk in self.astream(prompt, options, **changes)])

    @lists_options(GenerateOptions)
    def astream(
        self, prompt: Prompt, options: GenerateOptions | None = None, **changes: Unpack[GenerateKeywords]
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for asyncio: decodes in a worker thread; cancelling the task cancels the answer.

        A stream that is left early is closed with `await stream.aclose()`, or by dropping it.
        """
        return read_async(lambda: self.stream(prompt, options, **changes))

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
        return len(self._prompt_ids(prompt, options or GenerateOptions()))

    @checked_arguments
    def session(self, *, system: str | None = None, resume: str | os.PathLike[str] | None = None) -> Session:
        """Open a conversation, whose KV cache the prefix cache keeps: a new one, or one that `Session.save` wrote.

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
        template = self.model.require_template()
        return ChatPrompt(messages, template, self.tokenizer, variables, special_tokens_in_messages).ids

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
        return embed_texts(self.model, texts, cancelled)

    @checked_arguments
    def rank(
        self,
        prompt: Prompt,
        choices: Sequence[str | Sequence[int]],
        options: GenerateOptions | None = None,
        *,
        cancelled: Callable[[], bool] = never,
    ) -> tuple[ChoiceScore, ...]:
        """Compare texts by how probable they are as answers; the prompt is read once.

        Args:
            prompt: a text or a conversation, as for `generate`, made with `options`.
            choices: the texts, or their token ids. Special tokens that are written out in them are plain text.
            options: those that make the prompt count, such as `raw`, `system` and `answer_start`.
            cancelled: called before every forward pass; True ends the work with an `EdgeError`.

        Returns:
            The scores, the most probable choice first.

        Raises:
            ContextError: the prompt and a choice do not fit the context.
            InputError: a choice is empty; and the errors of `generate`.
        """
        return rank_choices(self.model, self._prompt_ids(prompt, options or GenerateOptions()), choices, cancelled)

    @checked_arguments
    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        cancelled: Callable[[], bool] = never,
    ) -> Relevance:
        """Say how relevant documents are to a query: the probability of "yes" as the answer to a question about each.

        The question is Qwen3-Reranker's; what comes before the document is read once. Errors are those of `rank`.

        Args:
            query: what is searched.
            documents: the texts, each of which must fit the context together with the query.
            instruction: what makes a document relevant; None for being an answer to a web search.
            cancelled: as for `rank`.
        """
        return score_documents(self.model, query, documents, instruction, cancelled)

    def _prompt_ids(self, prompt: Prompt, options: GenerateOptions) -> list[int]:
        """Token ids of a prompt, and of the start of its answer; errors as for `generate`."""
        start = self.model.answer_start(options)
        prompt_ids = self._raw_ids(prompt, options) if options.raw else self.chat_prompt(prompt, options).ids
        return prompt_ids if start is None else [*prompt_ids, *start.token_ids]

    def _raw_ids(self, prompt: Prompt, options: GenerateOptions) -> list[int]:
        """Token ids of a raw prompt; errors as for `generate`."""
        if not isinstance(prompt, str):
            raise InputError("raw continues a text, but the prompt is messages", "leave raw out, or give a text")
        if options.system is not None:
            raise InputError("a raw prompt has no system message", "write it into the prompt, or leave raw out")
        if options.suffix is None:
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        start = self.model.answer_start(options)
        taken = answer_reserve(self.context, options.max_tokens) + (0 if start is None else len(start.token_ids))
        return InfillTokens.of(self.tokenizer).prompt_ids(
            prompt,
            options.suffix,
            options.extra,
            document=options.document or "",
            suffix_first=options.suffix_first,
            room=None if options.overflow == Overflow.ERROR else self.context - taken,
        )

    def chat_prompt(self, prompt: Prompt, options: GenerateOptions) -> ChatPrompt:
        """The conversation of a prompt that is not raw, and its token ids; errors as for `generate`."""
        if isinstance(prompt, str):
            system = [{"role": "system", "content": options.system}] if options.system is not None else []
            return self.model.chat_prompt([*system, {"role": "user", "content": prompt}], options)
        if options.system is not None:
            raise InputError("system is given beside messages", "make it the first message, of the role system")
        return self.model.chat_prompt(template_messages(prompt), options)

    def activity(self) -> EngineActivity:
        """How busy the engine is."""
        queue, shared = self.model.queue, self.model.shared_passes
        passes = NO_PASSES if isinstance(shared, str) else shared.totals
        return EngineActivity(queue.running, queue.waiting, self.model.prefixes.nbytes, passes)

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

    def __exit__(self, *_: object) -> None:
        self.close()
