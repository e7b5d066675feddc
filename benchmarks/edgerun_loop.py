"""Greedy decoding with edge-run's engine, as a program would use it."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx

import edgerun
from prompts import prompt_tokens

if TYPE_CHECKING:
    from edgerun.edge.bench.runner import TurnTokens


class EdgeRunLoop:
    """A loaded bundle and one cached sequence of at most `capacity` tokens; `settings` go to `edgerun.load`."""

    def __init__(self, model: Path, threads: int, capacity: int, **settings: Any) -> None:
        self._model = model
        self._engine = edgerun.load(model, threads=threads, context=capacity, draft=None, **settings)
        self._vocab = self._engine.graph_io.vocab_size
        self._sequence = self._engine.model.new_sequence()
        self._recordings: dict[str, list[TurnTokens]] = {}

    def prefill(self, tokens: int, seed: int = 0) -> float:
        """Seconds to process a prompt of `tokens` tokens and choose the next one."""
        return self._answer(tokens, 1, seed).first_token_s

    def decode(self, context: int, tokens: int) -> float:
        """Seconds per token of `tokens` greedy tokens after a prompt of `context` tokens, which is read once."""
        stats = self._answer(context, tokens + 1, reuse=True)
        if stats.completion_tokens != tokens + 1 or stats.decode_passes != tokens:
            raise RuntimeError(f"not plain decoding of {tokens + 1} tokens: {stats}")
        return (stats.total_s - stats.first_token_s) / tokens

    def passes(self, context: int, width: int, repeats: int) -> float:
        """Median seconds of a pass over `width` tokens, with logits of all, after a prompt of `context` tokens."""
        bound = self._sequence.bound
        if bound.arena.length != context:
            self._answer(context, 1)
        new = prompt_tokens(width, self._vocab)
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            bound.forward(new)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def serve(self, clients: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        """Answer the prompts of that many clients at a time; returns the seconds of all, and of each first token."""
        options = edgerun.GenerateOptions(
            max_tokens=tokens, temperature=0.0, speculation=edgerun.Speculation.OFF, ignore_eos=True
        )
        first_s = [0.0] * clients
        started = time.perf_counter()

        def ask(client: int) -> None:
            ids = prompt_tokens(prompt, self._vocab, seed + client)
            for chunk in self._engine.model.answer(None, ids, options):
                if not first_s[client] and (chunk.text or chunk.finish_reason is not None):
                    first_s[client] = time.perf_counter() - started

        threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"seconds": time.perf_counter() - started, "first_s": first_s}

    def replay(self, file: str, turn: int, clients: int, first: int, speculation: str) -> float:
        """Seconds in which that many clients get recorded answers, the first of them by index; prompts are read before.

        Args:
            file: the recording.
            turn: which turn of every conversation, counted from 1.
            clients: number of answers at a time.
            first: index of the first answer among those of the recording; after the last one they begin again.
            speculation: off, or the drafters.
        """
        options = edgerun.GenerateOptions(speculation=edgerun.Speculation.parse(speculation))
        turns = self._recorded(file, turn)
        chosen = [turns[(first + client) % len(turns)] for client in range(clients)]
        started = threading.Barrier(clients + 1)

        def ask(recorded: TurnTokens) -> None:
            sequence = self._engine.model.new_sequence()
            for _ in self._engine.model.answer(sequence, recorded.prompt, edgerun.GenerateOptions(max_tokens=1)):
                pass
            started.wait()
            for _ in self._engine.model.replay(sequence, recorded.prompt, recorded.answer or (), options):
                pass

        threads = [threading.Thread(target=ask, args=(each,)) for each in chosen]
        for thread in threads:
            thread.start()
        started.wait()
        begin = time.perf_counter()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    def fill(self, prompt: list[int], answer: list[int], budget_s: float, *, replay: bool) -> dict[str, Any]:
        """Complete a prompt by as many tokens as `answer` has, if that takes no longer than the budget; 0 for no limit.

        Returns:
            The seconds, the number of prompt tokens that were read, and whether the completion came to its end. With
            `replay`, its tokens are those of `answer`.
        """
        options = edgerun.GenerateOptions(max_tokens=len(answer), temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        engine = self._engine
        stream = engine.replay(None, prompt, answer, options) if replay else engine.answer(prompt, options)
        timer = threading.Timer(budget_s, stream.cancel)
        if budget_s:
            timer.start()
        reply = edgerun.Reply.of(stream)
        seconds = time.perf_counter() - started
        timer.cancel()
        ended = reply.finish_reason is edgerun.FinishReason.LENGTH
        return {"seconds": seconds, "read": len(prompt) - reply.stats.reused_tokens, "ended": ended}

    def choices(self, count: int, prompt: int, tokens: int, seed: int) -> float:
        """Seconds of that many sampled answers to one prompt."""
        options = edgerun.GenerateOptions(
            max_tokens=tokens,
            n=count,
            temperature=1.0,
            seed=seed,
            speculation=edgerun.Speculation.OFF,
            ignore_eos=True,
        )
        started = time.perf_counter()
        for _ in self._engine.model.answer(None, prompt_tokens(prompt, self._vocab, seed), options):
            pass
        return time.perf_counter() - started

    def logits(self, text: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of every position of a text, float32 [tokens, vocabulary]; the text is read in one pass."""
        self._sequence.continue_with([])
        return self._sequence.bound.forward(text).copy()

    def weights_bytes(self) -> int:
        """Bytes of all tensors of the bundle's graph without tables of rotary positions; shared ones count once."""
        graph = onnx.load(str(self._model / "model.onnx"), load_external_data=False).graph
        total = 0
        seen = set()
        for tensor in graph.initializer:
            where = {entry.key: entry.value for entry in tensor.external_data}
            place = (where.get("location"), where.get("offset"))
            if tensor.name in ("rope.cos", "rope.sin") or (where and place in seen):
                continue
            seen.add(place)
            total += int(where["length"]) if where else len(tensor.raw_data)
        return total

    def _recorded(self, file: str, turn: int) -> list[TurnTokens]:
        """The turns of a recording, shuffled."""
        # Other versions of edge-run are measured by this class too, and need not have these.
        from edgerun.edge.bench.prompt_sets import read_recording  # noqa: PLC0415
        from edgerun.edge.bench.runner import BenchSettings, encode_turn  # noqa: PLC0415

        if file not in self._recordings:
            settings = BenchSettings(max_tokens=200, replay=True)
            exchanges = [each.exchanges for each in read_recording(Path(file)) if len(each.exchanges) >= turn]
            turns = [encode_turn(self._engine, settings, each[turn - 1], each[: turn - 1]) for each in exchanges]
            random.Random(1).shuffle(turns)
            self._recordings[file] = [each for each in turns if each.answer]
        return self._recordings[file]

    def _answer(self, context: int, tokens: int, seed: int = 0, *, reuse: bool = False) -> edgerun.Stats:
        """Answer a prompt of `context` tokens; `reuse` keeps the cache of an equal prompt."""
        if not reuse:
            self._sequence.continue_with([])  # drops all cached tokens
        options = edgerun.GenerateOptions(
            max_tokens=tokens, temperature=0.0, speculation=edgerun.Speculation.OFF, ignore_eos=True
        )
        *_, last = self._engine.model.answer(self._sequence, prompt_tokens(context, self._vocab, seed), options)
        if last.stats is None:
            raise RuntimeError("the answer has no statistics")
        return last.stats
