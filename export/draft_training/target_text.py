"""What a target answers to prompts, with its probabilities, in files that an interrupted run continues.

Answers come from edge-run's engine, so that the target may be of any family and in any format that edge-run runs, and a
draft learns the model that it drafts for, quantization included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save

from ...errors import ContextError
from ...models.atomic import write_atomically
from ...models.progress import Progress, silent
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine
from ...runtime.generation import CachedSequence
from ...runtime.options import GenerateOptions
from ...runtime.result import Reply
from .training_batches import Example

TOP_TOKENS: Final = 32
"""Number of tokens whose probabilities are stored: they have nearly all of the target's probability mass."""
_FILE_CONVERSATIONS: Final = 64
"""Number of conversations of a file: what an interrupted run may lose."""
_WIDTH: Final = 256
"""Largest number of positions whose logits are in memory at a time."""


@dataclass(frozen=True)
class PromptConversation:
    """What a user says, turn by turn; the target answers each turn."""

    turns: tuple[str, ...]
    system: str | None = None


@dataclass(frozen=True)
class AnswerOptions:
    """How the target answers."""

    max_tokens: int = 256
    temperature: float = 0.0
    """0 for the likeliest tokens."""
    seed: int = 0
    """Conversation number k of a list is answered with the seed `seed` + k."""

    def of(self, number: int) -> GenerateOptions:
        """The options of conversation `number`: the target's own distribution, without filters and penalties."""
        return GenerateOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repeat_penalty=1.0,
            seed=self.seed + number,
            parse_answer=False,
        )


class TargetText:
    """Generates answers of a target, with its probabilities of the likeliest tokens at every position."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sequence: CachedSequence = engine.model.new_sequence()

    def answered(
        self,
        conversations: Sequence[PromptConversation],
        options: AnswerOptions,
        folder: Path,
        progress: Progress = silent,
        stage: str = "answers of the target",
    ) -> list[Example]:
        """Answer conversations, each turn of which becomes an example.

        Args:
            conversations: the prompts.
            options: how to answer.
            folder: folder of the answers, which belongs to this target, these conversations and options. Those that it
                has are not made again.
            progress: receives `stage`.
            stage: a few words for the user.

        Raises:
            EdgeError: the target cannot answer.
            OSError: the disk refused a write.
        """
        examples: list[Example] = []
        for start in range(0, len(conversations), _FILE_CONVERSATIONS):
            path = folder / f"answers-{start // _FILE_CONVERSATIONS:05}.safetensors"
            if not path.is_file():
                made: list[Example] = []
                for number, each in enumerate(conversations[start : start + _FILE_CONVERSATIONS], start):
                    made += self._answer(each, options.of(number))
                    progress(stage, (number + 1) / len(conversations))
                save_examples(path, made)
            examples += load_examples(path)
        progress(stage, 1.0)
        return examples

    def _answer(self, conversation: PromptConversation, options: GenerateOptions) -> list[Example]:
        """Answer the turns of a conversation, up to the first that does not fit the context."""
        engine, examples = self._engine, []
        messages: list[dict[str, Any]] = []
        if conversation.system is not None:
            messages.append({"role": "system", "content": conversation.system})
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn})
            if engine.template is None:
                prompt = engine.tokenizer.encode(
                    "\n".join(each["content"] for each in messages), add_special_tokens=True
                )
            else:
                prompt = engine.encode_chat(messages)
            try:
                reply = Reply.of(engine.model.answer(self._sequence, prompt, options))
            except ContextError:
                break
            answer = self._sequence.token_ids[len(prompt) :]
            example = self._labelled(prompt, answer, ended=reply.finish_reason is FinishReason.STOP)
            if any(example.answer):
                examples.append(example)
            messages.append({"role": "assistant", "content": reply.text})
        return examples

    def _labelled(self, prompt: Sequence[int], answer: Sequence[int], *, ended: bool) -> Example:
        """An example with the target's probabilities; of an answer that has ended, with the token that ends it."""
        bound, arena = self._sequence.bound, self._sequence.arena
        arena.rewind_to(min(arena.length, len(prompt) - 1))
        ids = [*prompt, *answer]
        top_ids: list[npt.NDArray[np.int64]] = []
        top_probs: list[npt.NDArray[np.float32]] = []
        last = np.zeros(0, np.float32)
        while arena.length < len(ids):
            place = arena.length
            chunk = ids[place : place + bound.prefill_width(_WIDTH, len(ids) - place)]
            skipped = len(prompt) - 1 - place
            logits = bound.forward(chunk, logits_for=range(min(max(0, skipped), len(chunk) - 1), len(chunk)))
            arena.commit(len(chunk))
            if skipped < len(chunk):
                best, probs = _top(logits)
                top_ids.append(best)
                top_probs.append(probs)
                last = logits[-1].copy()
        ends = sorted(self._engine.tokenizer.eos)
        counted = len(answer)
        if ended and ends and len(ids) < self._engine.context:
            ids.append(max(ends, key=lambda token: float(last[token])))
            counted += 1
        return Example(
            ids,
            [False] * len(prompt) + [True] * counted,
            np.concatenate(top_ids)[:counted],
            np.concatenate(top_probs)[:counted],
        )


def _top(logits: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The most likely tokens of logits [n, V], the best first, and their probabilities, [n, k]."""
    count = min(TOP_TOKENS, logits.shape[1])
    some = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    values = np.take_along_axis(logits, some, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    best = np.take_along_axis(values, order, axis=1).astype(np.float64)
    highest = best[:, :1]
    total = np.exp(logits - highest, dtype=np.float64).sum(axis=1, keepdims=True)
    return np.take_along_axis(some, order, axis=1).astype(np.int64), (np.exp(best - highest) / total).astype(np.float32)


def save_examples(path: Path, examples: Sequence[Example]) -> None:
    """Write answered examples to one safetensors file."""
    tops = [example.top_ids for example in examples if example.top_ids is not None]
    probs = [example.top_probs for example in examples if example.top_probs is not None]
    arrays: dict[str, npt.NDArray[Any]] = {
        "ids": np.array([token for example in examples for token in example.ids], np.int32),
        "answer": np.array([part for example in examples for part in example.answer], np.uint8),
        "lengths": np.array([len(example.ids) for example in examples], np.int32),
        "top_ids": np.concatenate(tops).astype(np.int32) if tops else np.zeros((0, 1), np.int32),
        "top_probs": np.concatenate(probs).astype(np.float32) if probs else np.zeros((0, 1), np.float32),
    }
    write_atomically(path, save(arrays))


def load_examples(path: Path) -> list[Example]:
    """Read what `save_examples` wrote."""
    arrays = load_file(path)
    examples = []
    at = answered = 0
    for length in arrays["lengths"].tolist():
        answer = arrays["answer"][at : at + length].astype(bool).tolist()
        count = sum(answer)
        examples.append(
            Example(
                arrays["ids"][at : at + length].tolist(),
                answer,
                arrays["top_ids"][answered : answered + count].astype(np.int64),
                arrays["top_probs"][answered : answered + count],
            )
        )
        at, answered = at + length, answered + count
    return examples
