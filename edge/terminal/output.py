"""Prints answers and their statistics, as text or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from ...runtime.engine import Engine
from ...runtime.result import Reply, Stats
from ...runtime.speculation.choice import Speculation

_CONTROLS: Final = {code: "\ufffd" for code in [*range(32), 127, *range(0x80, 0xA0)] if chr(code) not in "\n\t"}


_FIGURE_NAMES: Final = {
    "max_abs_diff": "largest logit difference",
    "mean_kl": "mean KL",
    "p99_kl": "99th percentile KL",
    "top1_agreement": "top-1 agreement",
    "float_perplexity": "float perplexity",
}


def for_terminal(text: str) -> str:
    """Replace control characters, with which a model could otherwise control the terminal."""
    return text.translate(_CONTROLS)


def write_out(text: str) -> None:
    """Write a piece of an answer to standard output and flush it; control characters do not reach a terminal."""
    sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_error(line: str) -> None:
    """Write a line to standard error, if the process has one."""
    if sys.stderr is not None:
        print(line, file=sys.stderr)  # noqa: T201


def stats_line(stats: Stats, load_s: float | None = None) -> str:
    """The statistics of an answer on one line, for `--stats` and `/stats`."""
    parts = [
        f"prompt {stats.prompt_tokens} tokens" + (f" ({stats.reused_tokens} reused)" if stats.reused_tokens else ""),
        f"first token after {stats.first_token_s * 1e3:.0f} ms",
        f"{stats.completion_tokens} tokens at {stats.decode_tokens_per_second:.1f} tokens/s",
        f"{stats.tokens_per_pass:.2f} tokens per pass",
    ]
    if stats.drafted:
        sources = ", ".join(f"{name} {count.accepted}/{count.drafted}" for name, count in stats.by_source.items())
        parts.append(f"draft tokens accepted: {sources}")
    if load_s is not None:
        parts.append(f"loaded in {load_s * 1e3:.0f} ms")
    return ", ".join(parts)


def figures_text(figures: Mapping[str, float]) -> str:
    """The figures of a model's quality in words, such as `mean KL 0.0012`."""
    return ", ".join(f"{_FIGURE_NAMES.get(name, name)} {value:.4g}" for name, value in figures.items())


def reply_json(reply: Reply, engine: Engine, speculation: Speculation, load_s: float) -> dict[str, Any]:
    """The object that `--json` prints; docs/user-guide.md describes its fields."""
    stats = reply.stats
    return {
        "text": reply.text,
        "finish_reason": reply.finish_reason.value,
        "usage": {"prompt_tokens": stats.prompt_tokens, "completion_tokens": stats.completion_tokens},
        "timing": {
            "load_ms": round(load_s * 1e3, 3),
            "ttft_ms": round(stats.first_token_s * 1e3, 3),
            "decode_tokens_per_second": round(stats.decode_tokens_per_second, 3),
            "total_ms": round(stats.total_s * 1e3, 3),
        },
        "speculation": {
            "mode": str(speculation),
            "target_passes": stats.target_passes,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "tokens_per_pass": round(stats.tokens_per_pass, 3),
            "by_source": {name: asdict(count) for name, count in stats.by_source.items()},
        },
        "model": str(engine.bundle.folder),
        "device": str(engine.device),
    }
