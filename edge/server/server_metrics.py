"""What the server counts, as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from ...runtime.result import Stats
from ..service.pooled_model import ModelStatus

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_RATES: Final = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)

_MODEL_GAUGES: Final[tuple[tuple[str, str, Callable[[ModelStatus], int]], ...]] = (
    ("requests_running", "Answers being generated.", lambda model: model.active),
    ("requests_waiting", "Requests that wait for a place.", lambda model: model.waiting),
    ("kv_cache_bytes", "Bytes of the KV caches that are kept for further answers.", lambda model: model.cached_bytes),
)
"""Gauges of a model: name, explanation, value."""


class ServerMetrics:
    """Counters of one server, in a registry of its own.

    Args:
        models: the models in memory or being loaded; called when the metrics are read.
    """

    def __init__(self, models: Callable[[], Iterable[ModelStatus]]) -> None:
        self._registry: Final = CollectorRegistry()
        self._requests: Final = self._counter("requests", "Requests by endpoint and status.", "endpoint", "status")
        self._prompt_tokens: Final = self._counter("prompt_tokens", "Tokens of prompts.", "model")
        self._reused_tokens: Final = self._counter(
            "reused_tokens", "Prompt tokens that were in the KV cache already.", "model"
        )
        self._completion_tokens: Final = self._counter("completion_tokens", "Tokens of answers.", "model")
        self._answers: Final = self._counter("answers", "Answers by what ended them.", "model", "finish_reason")
        self._cache_hits: Final = self._counter(
            "prefix_cache_hits", "Answers that continued from a KV cache in memory.", "model"
        )
        self._draft_tokens: Final = self._counter(
            "draft_tokens", "Draft tokens that were verified, by drafter.", "model", "source"
        )
        self._accepted_tokens: Final = self._counter(
            "accepted_draft_tokens", "Draft tokens that were accepted, by drafter.", "model", "source"
        )
        self._first_token: Final = self._histogram(
            "time_to_first_token_seconds", "Seconds from the start of an answer to its first token.", _SECONDS
        )
        self._rate: Final = self._histogram(
            "tokens_per_second", "Tokens per second of an answer after its first token.", _RATES
        )
        self._registry.register(_Gauges(models))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"edgerun_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"edgerun_{name}", text, ("model",), buckets=buckets, registry=self._registry)

    def count_request(self, endpoint: str, status: int) -> None:
        """Count a request that has been answered, or whose client went away (status 499)."""
        self._requests.labels(endpoint, str(status)).inc()

    def count_answer(self, model: str, finish_reason: str, stats: Stats, *, first_choice: bool) -> None:
        """Count an answer that has ended.

        Args:
            model: the model's id.
            finish_reason: what ended the answer.
            stats: its statistics.
            first_choice: whether it is the first of several answers to one prompt, which is counted once.
        """
        self._answers.labels(model, finish_reason).inc()
        if first_choice:
            self._prompt_tokens.labels(model).inc(stats.prompt_tokens)
            self._reused_tokens.labels(model).inc(stats.reused_tokens)
            self._cache_hits.labels(model).inc(stats.reused_tokens > 0)
        discarded = 0 if stats.best_of is None else stats.best_of.discarded_tokens
        self._completion_tokens.labels(model).inc(stats.completion_tokens + discarded)
        if stats.completion_tokens:
            self._first_token.labels(model).observe(stats.first_token_s)
        if stats.decode_tokens:
            self._rate.labels(model).observe(stats.decode_tokens_per_second)
        for source, counts in stats.by_source.items():
            self._draft_tokens.labels(model, source).inc(counts.drafted)
            self._accepted_tokens.labels(model, source).inc(counts.accepted)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    """What is measured when the metrics are read."""

    def __init__(self, models: Callable[[], Iterable[ModelStatus]]) -> None:
        self._models: Final = models
        self._process: Final = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        """Read all gauges."""
        models = [model for model in self._models() if model.loaded]
        for name, text, value in _MODEL_GAUGES:
            gauge = GaugeMetricFamily(f"edgerun_{name}", text, labels=["model"])
            for model in models:
                gauge.add_metric([model.id], value(model))
            yield gauge
        yield GaugeMetricFamily("edgerun_models_loaded", "Models in memory.", len(models))
        yield GaugeMetricFamily(
            "edgerun_process_resident_memory_bytes", "Memory of the process.", self._process.memory_info().rss
        )
