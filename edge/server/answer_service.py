"""What all requests share: the models, the metrics, and the requests that are being computed."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from ..service.model_pool import ModelPool
from .answer_worker import AnswerWorker
from .error_objects import RefusedError
from .server_metrics import ServerMetrics
from .server_settings import ServerSettings

_JOIN_S: Final = 5.0
"""Seconds to wait for the end of a thread that was cancelled."""


class AnswerService:
    """The state of one server.

    Args:
        pool: the models; closed with the service.
        settings: limits.
    """

    def __init__(self, pool: ModelPool, settings: ServerSettings) -> None:
        self.pool: Final = pool
        self.settings: Final = settings
        self.metrics: Final = ServerMetrics(pool.status)
        self._workers: Final[set[AnswerWorker[bytes]]] = set()
        self._draining = False

    @property
    def draining(self) -> bool:
        """Whether no further requests are taken."""
        return self._draining

    @property
    def busy(self) -> bool:
        """Whether a request is being computed."""
        return any(not worker.ended for worker in self._workers)

    def drain(self) -> None:
        """Refuse further requests; those that have begun go on."""
        self._draining = True

    def cancel_all(self) -> None:
        """End all answers after their current pass."""
        for worker in list(self._workers):
            worker.cancellation.cancel()

    def close(self) -> None:
        """End all answers and unload all models."""
        self.drain()
        self.cancel_all()
        self.pool.close()
        for worker in list(self._workers):
            worker.join(_JOIN_S)

    def start(self, work: Callable[[AnswerWorker[bytes]], None]) -> AnswerWorker[bytes]:
        """Start the work of a request in a thread.

        Raises:
            RefusedError: the server is shutting down, or has too many requests.
        """
        if self._draining:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down", "the server is shutting down")
        self._workers.difference_update([worker for worker in self._workers if worker.ended])
        if len(self._workers) >= self.settings.max_requests:
            raise RefusedError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "busy",
                f"{len(self._workers)} requests are being answered or wait",
                "try again later",
            )
        worker = AnswerWorker(work)
        self._workers.add(worker)
        worker.start()
        return worker
