"""An answer's statistics in words, its JSON, several answers one after another, and its rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import Any, Final

from rich.table import Table

from ...runtime.engine import Engine
from ...runtime.graph.device_loading import on_cpu_text
from ...runtime.graph.graph_io import GraphIO, LogitsMode
from ...runtime.result import BestOf, Chunk, Reply, Stats
from ...runtime.speculation.choice import SOURCE_NAMES, Speculation
from ...runtime.speculation.rounds import Round
from ...runtime.speculation.tree import Source
from ...runtime.text.token_logprobs import TokenLogprob
from .output import SafeConsole, write_out, write_reasoning

_SHORTEST_SHOWN_S: Final = 0.0005
"""Shorter parts of the time to the first token would be shown as 0 ms."""
_WIDTH: Final = 130


def stats_line(stats: Stats, engine: Engine, load_s: float | None = None) -> str:
    """The statistics of an answer on one line, for `--stats` and `/stats`.

    Args:
        stats: the statistics.
        engine: what gave the answer.
        load_s: seconds that loading the model took; None to leave it out.
    """
    parts = [
        f"prompt {stats.prompt_tokens} tokens" + (f" ({stats.reused_tokens} reused)" if stats.reused_tokens else ""),
        *([] if (reader := engine.prefill_choice.described(stats.prompt_readers)) is None else [reader]),
        f"first token after {_ms(stats.first_token_s)}{_before_first_token(stats)}",
        f"{stats.completion_tokens} tokens at {stats.decode_tokens_per_second:.1f} tokens/s",
        f"{stats.tokens_per_pass:.2f} tokens per pass",
        f"{_ms(stats.total_s)} in all",
    ]
    if stats.by_block_pass:
        found = ", ".join(f"{number}: {count}" for number, count in stats.by_block_pass.items())
        parts.append(f"tokens found in pass ({found}) over their block")
    if stats.mean_logprob is not None:
        parts.append(f"mean log-probability {stats.mean_logprob:.3f}")
    if stats.by_model:
        share = stats.by_model.get("draft", 0) / sum(stats.by_model.values())
        parts.append(f"lossy: {share:.0%} of the tokens by the draft model")
    if stats.merged_tokens:
        parts.append(f"lossy: {stats.merged_tokens} tokens of images merged with others")
    if stats.drafted:
        sources = ", ".join(f"{name} {count.accepted}/{count.drafted}" for name, count in stats.by_source.items())
        parts.append(f"draft tokens accepted: {sources}")
    if stats.replayed_tokens:
        parts.append(f"{stats.replayed_tokens} tokens run again")
    if stats.passes_ahead:
        kept = f"{stats.passes_kept}/{stats.passes_ahead} draft passes ahead kept"
        parts.append(f"{kept}, {_ms(stats.hidden_s)} of drafting hidden")
    if (threads := engine.compute_threads) is not None:
        saving = " (power saver)" if engine.power.saves else ""
        parts.append(f"{threads} thread{'s' if threads > 1 else ''}{saving}")
    else:
        parts.append(f"on {engine.device}{' (simulated)' if engine.device.simulated else ''}")
    if engine.on_cpu:
        parts.append(f"on the CPU: {on_cpu_text(engine.on_cpu)}")
    if load_s is not None:
        parts.append(f"loaded in {_ms(load_s)}")
    return ", ".join(parts)


def best_of_line(chosen: BestOf) -> str:
    """What the choice of the best answers took, on one line."""
    candidates = len(chosen.candidates)
    parts = [f"best of {candidates} answer{'s' if candidates > 1 else ''}", f"{chosen.stopped} stopped early"]
    if chosen.stopped and chosen.saved_tokens is not None:
        parts[-1] += f", which saved up to {chosen.saved_tokens} tokens"
    return ", ".join([*parts, f"{chosen.discarded_tokens} tokens of answers that are not shown"])


def _before_first_token(stats: Stats) -> str:
    """What the time to the first token consists of, where that is more than the prefill."""
    parts = {
        "measuring this model": stats.measuring_s,
        "loading the drafters": stats.drafter_loading_s,
        "reading the prompt": stats.prefill_s,
    }
    shown = [f"{_ms(seconds)} {name}" for name, seconds in parts.items() if seconds >= _SHORTEST_SHOWN_S]
    return f" ({', '.join(shown)})" if len(shown) > 1 else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def reply_json(
    reply: Reply, engine: Engine, speculation: Speculation, load_s: float, *, with_logprobs: bool
) -> dict[str, Any]:
    """The object that `--json` prints; docs/guide/terminal.md describes its fields."""
    stats = reply.stats
    answer = partial(_answer_json, speculation=speculation, load_s=load_s, with_logprobs=with_logprobs)
    described = answer(reply) | {
        "prompt_graphs": {
            "tokens": dict(stats.prompt_readers),
            "int8_refusal": engine.prefill_choice.refusal_of(stats.prompt_readers),
        },
        "model": str(engine.bundle.folder),
        "device": str(engine.device),
        "on_cpu": dict(engine.on_cpu),
        "threads": engine.compute_threads,
        "power": engine.power.value,
    }
    if reply.alternatives:
        described["choices"] = [answer(choice) for choice in reply.choices]
    if stats.best_of is not None:
        described["best_of"] = _best_of_json(stats.best_of)
    return described


def _answer_json(reply: Reply, speculation: Speculation, load_s: float, *, with_logprobs: bool) -> dict[str, Any]:
    """What `--json` prints of one answer."""
    stats = reply.stats
    described: dict[str, Any] = {
        "text": reply.text,
        "finish_reason": reply.finish_reason.value,
        **({"reasoning": reply.reasoning} if reply.reasoning else {}),
        **({"tool_calls": [call.message for call in reply.tool_calls]} if reply.tool_calls else {}),
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            **({"merged_image_tokens": stats.merged_tokens} if stats.merged_tokens else {}),
            "completion_tokens": stats.completion_tokens,
        },
        "timing": {
            "load_ms": round(load_s * 1e3, 3),
            "ttft_ms": round(stats.first_token_s * 1e3, 3),
            "measuring_ms": round(stats.measuring_s * 1e3, 3),
            "drafter_loading_ms": round(stats.drafter_loading_s * 1e3, 3),
            "prefill_ms": round(stats.prefill_s * 1e3, 3),
            "decode_tokens_per_second": round(stats.decode_tokens_per_second, 3),
            "total_ms": round(stats.total_s * 1e3, 3),
        },
        "speculation": {
            "mode": str(speculation),
            "target_passes": stats.target_passes,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "replayed_tokens": stats.replayed_tokens,
            "tokens_per_pass": round(stats.tokens_per_pass, 3),
            "by_source": {name: asdict(count) for name, count in stats.by_source.items()},
            "passes_ahead": stats.passes_ahead,
            "passes_kept": stats.passes_kept,
            "hidden_ms": round(stats.hidden_s * 1e3, 3),
        },
        **({"tokens_by_block_pass": dict(stats.by_block_pass)} if stats.by_block_pass else {}),
        **({"tokens_by_model": dict(stats.by_model)} if stats.by_model else {}),
    }
    if stats.mean_logprob is not None:
        described["mean_logprob"] = stats.mean_logprob
    if with_logprobs:
        described["logprobs"] = [_token_json(token) for token in reply.logprobs]
    return described


def _best_of_json(chosen: BestOf) -> dict[str, Any]:
    """The candidates that the best answers were chosen of, in the order of their seeds."""
    return {
        "candidates": [
            {
                **asdict(each),
                "mean_logprob": each.mean_logprob if math.isfinite(each.mean_logprob) else None,
                "finish_reason": None if each.finish_reason is None else each.finish_reason.value,
            }
            for each in chosen.candidates
        ],
        "stopped": chosen.stopped,
        "discarded_tokens": chosen.discarded_tokens,
        "saved_tokens": chosen.saved_tokens,
    }


def chunk_json(chunk: Chunk, *, with_logprobs: bool, several: bool = False) -> dict[str, Any]:
    """The object that `--json-stream` prints for a piece of an answer; of `several`, it says of which one."""
    described: dict[str, Any] = {**({"index": chunk.index} if several else {}), "delta": chunk.text}
    if chunk.reasoning:
        described["reasoning"] = chunk.reasoning
    if with_logprobs:
        described["logprobs"] = [_token_json(token) for token in chunk.logprobs]
    return described


def _token_json(token: TokenLogprob) -> dict[str, Any]:
    """A token and its alternatives with their log-probabilities."""
    return {
        "token_id": token.token_id,
        "text": token.text,
        "bytes": list(token.bytes),
        "logprob": token.logprob if math.isfinite(token.logprob) else None,
        "top": [_token_json(other) for other in token.top],
    }


class AnswerPrinter:
    """Writes answers as they come, one after another; of several, each has a heading, and later ones are held back.

    Args:
        count: number of answers.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._index = -1
        self._held: dict[int, list[Chunk]] = {}
        """Pieces of answers whose turn has not come, by index."""
        self._ended: set[int] = set()
        self._open_line = True
        """Whether the last line has no end yet."""

    def write(self, chunk: Chunk) -> None:
        """Write a piece of an answer, or hold it back until all answers before it have ended."""
        self._held.setdefault(chunk.index, []).append(chunk)
        while pieces := self._held.pop(max(self._index, 0) + (self._index in self._ended), None):
            for piece in pieces:
                self._write(piece)

    def _write(self, chunk: Chunk) -> None:
        if self._count > 1 and chunk.index != self._index:
            if self._index >= 0:
                self.end()
                write_out("\n")
            write_out(f"Answer {chunk.index + 1} of {self._count}:\n")
            self._open_line = True
        self._index = chunk.index
        if chunk.finish_reason is not None:
            self._ended.add(chunk.index)
        write_reasoning(chunk.reasoning)
        if chunk.text:
            write_out(chunk.text)
            self._open_line = not chunk.text.endswith("\n")

    def end(self) -> None:
        """End the last line of an answer; one without text has an empty line."""
        if self._open_line:
            write_out("\n")
        self._open_line = False


def show_rounds(rounds: Sequence[Round | None], graph_io: GraphIO) -> None:
    """Print one line for each round on standard error; neighbouring plain rounds of one kind share a line.

    Args:
        rounds: the rounds after the first token; None for those in which drafting was disabled.
        graph_io: inputs and outputs of the target's graph.
    """
    console = SafeConsole(stderr=True)
    if not console.is_terminal:
        console.width = _WIDTH
    if not graph_io.supports_verification:
        last_only = graph_io.logits_mode is LogitsMode.LAST
        why = "gives logits of the last token only" if last_only else "takes one new token per pass"
        console.print(f"no rounds: the graph {why}, so it cannot verify drafts; edge-run export may upgrade it")
        return
    if not rounds:
        console.print("no rounds: the answer ended with its first token, or speculation is off")
        return
    ahead = any(each is not None and each.ahead.passes for each in rounds)
    table = Table(title="rounds after the first token", box=None, pad_edge=False, header_style="bold")
    table.add_column("round", justify="right")
    table.add_column("candidates")
    for name in ("expected\ntokens", "pass\nwidth", "draft tokens\naccepted", "draft\nms", "target\nms", "host\nms"):
        table.add_column(name, justify="right")
    if ahead:
        table.add_column("ahead\nkept", justify="right")
        table.add_column("hidden\nms", justify="right")
    table.add_column("")
    number = 0
    for kind, group in groupby(rounds, key=_kind):
        members = list(group)
        if kind is None:
            for each in members:
                number += 1
                assert each is not None  # noqa: S101  only rounds have kind None
                table.add_row(str(number), *_cells(each, ahead=ahead))
        else:
            first, number = number + 1, number + len(members)
            empty = [""] * (6 if ahead else 4)
            table.add_row(f"{first}-{number}" if number > first else f"{first}", "", "1", "1", *empty, kind)
    console.print(table)


def _kind(round_: Round | None) -> str | None:
    """Why a plain round drafted nothing; None for a round that gets a line of its own."""
    if round_ is None:
        return "plain: drafting is disabled for a while, because it cost more than it gained"
    if round_.width == 1 and not any(round_.candidates) and not round_.draft_passes and not round_.ahead.passes:
        return f"plain: {round_.note or 'no candidates'}"
    return None


def _cells(round_: Round, *, ahead: bool) -> tuple[str, ...]:
    before = round_.ahead
    ran = (f"{before.kept}/{before.passes}", f"{before.hidden_s * 1e3:.2f}") if before.passes else ("", "")
    note = round_.note
    if round_.width == 1 and not note:
        note = "no candidate is worth its cost"
    return (
        _sources(round_.candidates),
        f"{round_.expected_tokens:.2f}",
        str(round_.width),
        f"{sum(round_.accepted)}/{round_.width - 1} {_sources(round_.accepted)}".strip() if round_.width > 1 else "",
        f"{round_.draft_s * 1e3:.2f}" if round_.draft_passes or before.passes else "",
        f"{round_.target_s * 1e3:.2f}",
        f"{round_.host_s * 1e3:.2f}",
        *(ran if ahead else ()),
        note,
    )


def _sources(counts: Sequence[int]) -> str:
    return " ".join(f"{SOURCE_NAMES[Source(source)]}:{count}" for source, count in enumerate(counts) if count)
