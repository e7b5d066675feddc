"""What the server counts, as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from ...runtime.result import Stats
from ..service.pooled_model import ModelState

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_COUNTERS: Final[Mapping[str, tuple[str, ...]]] = {
    "requests": ("Requests by endpoint and status.", "endpoint", "status"),
    "prompt_tokens": ("Tokens of prompts.", "model"),
    "reused_tokens": ("Prompt tokens that were in the KV cache already.", "model"),
    "completion_tokens": ("Tokens of answers.", "model"),
    "answers": ("Answers by what ended them.", "model", "finish_reason"),
    "prefix_cache_hits": ("Answers that continued from a KV cache in memory.", "model"),
    "draft_tokens": ("Draft tokens that were verified, by drafter.", "model", "source"),
    "accepted_draft_tokens": ("Draft tokens that were accepted, by drafter.", "model", "source"),
}
"""Explanation and labels of each counter."""
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_HISTOGRAMS: Final = (
    ("waiting_seconds", "Seconds that a request waited for a place in the queue of its model.", _SECONDS),
    ("time_to_first_token_seconds", "Seconds from the start of an answer to its first token.", _SECONDS),
    (
        "tokens_per_second",
        "Tokens per second of an answer after its first token.",
        (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000),
    ),
)
"""Name, explanation and buckets of each histogram."""
_PASSES: Final = "passes of answers since the model was loaded, where answers share them."
_OF_MODEL: Final[tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, str], ...]] = (
    (GaugeMetricFamily, "requests_running", "Answers being generated.", "active"),
    (GaugeMetricFamily, "requests_waiting", "Requests that wait for a place.", "waiting"),
    (GaugeMetricFamily, "kv_cache_bytes", "Bytes of the KV caches that are kept for further answers.", "cached_bytes"),
    (CounterMetricFamily, "passes", f"Forward {_PASSES}", "passes"),
    (CounterMetricFamily, "pass_texts", f"Answers in forward {_PASSES}", "pass_texts"),
    (CounterMetricFamily, "pass_tokens", f"Tokens in forward {_PASSES}", "pass_tokens"),
)
"""What is read of a model: kind, name, explanation, and field of `ModelState`."""


class ServerMetrics(Collector):
    """Counters of one server, in a registry of its own.

    Args:
        models: the models in memory or being loaded; called when the metrics are read.
    """

    def __init__(self, models: Callable[[], Iterable[ModelState]]) -> None:
        self._registry: Final = CollectorRegistry()
        self._counters: Final = {
            name: Counter(f"edgerun_{name}", text, labels, registry=self._registry)
            for name, (text, *labels) in _COUNTERS.items()
        }
        self._waiting, self._first_token, self._rate = (
            Histogram(f"edgerun_{name}", text, ("model",), buckets=buckets, registry=self._registry)
            for name, text, buckets in _HISTOGRAMS
        )
        self._models: Final = models
        self._process: Final = psutil.Process()
        self._registry.register(self)

    def count_request(self, endpoint: str, status: int) -> None:
        """Count a request that has been answered, or whose client went away (status 499)."""
        self._counters["requests"].labels(endpoint, str(status)).inc()

    def count_answer(self, model: str, finish_reason: str, stats: Stats, waited_s: float | None) -> None:
        """Count an answer that has ended.

        Args:
            model: the model's id.
            finish_reason: what ended the answer.
            stats: its statistics.
            waited_s: seconds that its request waited for a place; None for a further answer to the same prompt, which
                is counted once.
        """
        counters = self._counters
        counters["answers"].labels(model, finish_reason).inc()
        discarded = 0 if stats.best_of is None else stats.best_of.discarded_tokens
        counters["completion_tokens"].labels(model).inc(stats.completion_tokens + discarded)
        if waited_s is not None:
            self._waiting.labels(model).observe(waited_s)
            counters["prompt_tokens"].labels(model).inc(stats.prompt_tokens)
            counters["reused_tokens"].labels(model).inc(stats.reused_tokens)
            counters["prefix_cache_hits"].labels(model).inc(stats.reused_tokens > 0)
        if stats.completion_tokens:
            self._first_token.labels(model).observe(stats.first_token_s)
        if stats.decode_tokens:
            self._rate.labels(model).observe(stats.decode_tokens_per_second)
        for source, counts in stats.by_source.items():
            counters["draft_tokens"].labels(model, source).inc(counts.drafted)
            counters["accepted_draft_tokens"].labels(model, source).inc(counts.accepted)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Read what is measured when the metrics are read."""
        models = [model for model in self._models() if model.loaded]
        for kind, name, text, field in _OF_MODEL:
            metric = kind(f"edgerun_{name}", text, labels=["model"])
            for model in models:
                metric.add_metric([model.id], getattr(model, field))
            yield metric
        yield GaugeMetricFamily("edgerun_models_loaded", "Models in memory.", len(models))
        yield GaugeMetricFamily(
            "edgerun_process_resident_memory_bytes", "Memory of the process.", self._process.memory_info().rss
        )
