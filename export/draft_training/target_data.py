"""What a target answers to prompts, with its probabilities, in files that an interrupted run continues.

Answers come from edge-run's engine, so that the target may be of any family and in any format that edge-run runs, and a
draft learns the model that it drafts for, quantization included.

An EAGLE-3 head also reads hidden states, which come from the graph of the target's bundle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper
from safetensors.numpy import load_file, save

from ...errors import ContextError, InputError
from ...models.atomic import write_atomically
from ...models.bundle import Bundle
from ...models.manifest import Architecture, GraphLayout
from ...models.progress import Progress, silent
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine
from ...runtime.kv.prefix_cache import CachedSequence
from ...runtime.options import GenerateOptions
from ...runtime.result import Reply
from ..check.contract_session import ContractSession
from ..checkpoint.source import Float32Array
from ..graph.decoder_parts import embedded_value
from ..graph.inputs_outputs import feature_layers
from .training_batches import Example

TOP_TOKENS: Final = 32
"""Number of tokens whose probabilities are stored: they have nearly all of the target's probability mass."""
_FILE_CONVERSATIONS: Final = 64
"""Number of conversations of a file: what an interrupted run may lose."""
_WIDTH: Final = 256
"""Largest number of positions whose logits are in memory at a time."""
_FEWEST_LAYERS: Final = 4
_CACHE_BYTES: Final = 1 << 30


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
    ends = np.cumsum(arrays["lengths"], dtype=np.int64)
    answers = np.split(arrays["answer"].astype(bool), ends)[:-1]
    tops = np.cumsum([each.sum() for each in answers], dtype=np.int64)
    ids, top_ids, top_probs = (
        np.split(arrays[name], places)[:-1] for name, places in (("ids", ends), ("top_ids", tops), ("top_probs", tops))
    )
    parts = zip(ids, answers, top_ids, top_probs, strict=True)
    return [Example(each.tolist(), answer.tolist(), top.astype(np.int64), probs) for each, answer, top, probs in parts]


def state_layers(layers: int) -> tuple[int, ...]:
    """The layers before which a head reads the residual stream of a target with so many layers.

    Published heads read before the layers 2, half of the layers and the third from the end; targets with too few
    layers for that have others.

    Raises:
        InputError: there are too few layers.
    """
    if layers < _FEWEST_LAYERS:
        raise InputError(
            f"an EAGLE-3 head reads three layers of its target, which has {layers}", "train a draft model instead"
        )
    usual = feature_layers(layers)
    return usual if usual[0] < usual[1] < usual[2] else (1, layers // 2, layers - 1)


class TargetStates:
    """Runs a target's graph over whole texts.

    Args:
        bundle: the target.
        longest: number of tokens of the longest text.

    Raises:
        InputError: the target is not a bundle of `edge-run export`, or has too few layers.
        ExportError: the graph does not run.
    """

    def __init__(self, bundle: Bundle, longest: int) -> None:
        if bundle.manifest is None or bundle.manifest.layout is not GraphLayout.EDGE:
            raise InputError(
                f"an EAGLE-3 head needs a target that edge-run exported, and {bundle.folder} is not",
                "export the target with edge-run export",
            )
        self.architecture: Final[Architecture] = bundle.manifest.architecture
        self.layers: Final = state_layers(self.architecture.layers)
        """The layers before which the residual stream is read."""
        model = onnx.load(bundle.graph, load_external_data=False)
        made = {name for node in model.graph.node for name in node.output}
        embedded = embedded_value(model.graph)
        taps = [embedded or "", *(f"layers.{layer - 1}.next_norm.residual" for layer in self.layers)]
        if not made.issuperset(taps):
            raise InputError(
                f"the graph of {bundle.folder} does not name the states of its layers", "export the target again"
            )
        for name in taps:
            model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        self._session = ContractSession(bundle.graph.parent, longest, model, extra_outputs=taps)
        self._longest = longest
        self._cached: dict[bytes, tuple[Float32Array, Float32Array]] = {}
        self._cached_bytes = 0

    def embeddings(self, token_ids: npt.NDArray[np.int64]) -> Float32Array:
        """The embeddings of any tokens, float32 [n, d].

        Raises:
            ExportError: the graph does not run.
        """
        parts = range(0, len(token_ids), self._longest)
        return np.concatenate([self._run(token_ids[start : start + self._longest])[0] for start in parts])

    def read(self, token_ids: npt.NDArray[np.int64]) -> tuple[Float32Array, Float32Array]:
        """The embeddings of a text's tokens [n, d], and their states [n, 3 d], the lowest layer first.

        What was read before is kept in memory, up to a limit.

        Raises:
            ExportError: the graph does not run.
        """
        key = token_ids.tobytes()
        if (found := self._cached.get(key)) is not None:
            return found
        embedded, *states = self._run(token_ids)
        read = embedded, np.concatenate(states, axis=1)
        size = sum(each.nbytes for each in read)
        if self._cached_bytes + size <= _CACHE_BYTES:
            self._cached[key] = read
            self._cached_bytes += size
        return read

    def _run(self, token_ids: npt.NDArray[np.int64]) -> list[Float32Array]:
        """The embeddings of a text and its states before each layer, float32 [n, d] each."""
        self._session.reset()
        self._session.forward(token_ids, np.array([len(token_ids) - 1]))
        return [each[0] for each in self._session.extra]
