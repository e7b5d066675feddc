"""Endpoints that compute: a request's body in, its answer out, as one JSON object or as events."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Final, Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from ...errors import EdgeError
from ...runtime.engine import Engine
from ...runtime.graph.memory import trim_heap
from ...runtime.structure.response_format import CLIENT
from ..service.cancellation import CancelledError
from ..service.request_error import ErrorCode, RequestError
from .answer_service import AnswerService
from .answer_worker import AnswerWorker
from .error_objects import RefusedError, UnreadBodyResponse, error_object, error_response
from .event_stream import event, send_events
from .request_body import ClientGoneError, read_body

_log: Final = logging.getLogger(__name__)
_LARGE_BODY: Final = 64 << 10
"""Bytes of a body from which on it is parsed in a thread, or it would keep all other clients waiting. What it takes in
memory is returned to the system."""

_PARSERS: Final = ThreadPoolExecutor(2, "edge-run parser")
"""Parses large bodies: two at a time, so that what they take in memory stays bounded."""


class AnyBody(Protocol):
    """What the bodies of all requests have."""

    @property
    def model(self) -> str | None:
        """The model that a request names; None for the first one."""


Body = TypeVar("Body", bound=AnyBody)


class AnswerEndpoint(ABC, Generic[Body]):
    """An ASGI application for one path; its subclasses say what a body means and how it is answered.

    The answer is computed in a thread (`AnswerWorker`). The client is watched meanwhile: when it goes away, the answer
    is cancelled, whether it is streamed, computed, or waits for its place.
    """

    def __init__(self, service: AnswerService) -> None:
        self.service: Final = service

    @abstractmethod
    def parse(self, body: bytes) -> Body:
        """Decode a body.

        Raises:
            RequestError: the body is not valid.
        """

    def streams(self, _request: Body) -> bool:
        """Whether the answer is sent as events."""
        return False

    @abstractmethod
    def compute(self, request: Body, engine: Engine, model: str, worker: AnswerWorker[bytes]) -> None:
        """Compute the answer, in the worker's thread.

        Accepts the worker and pushes events, or one JSON object.

        Args:
            request: what `parse` returned.
            engine: the model.
            model: its id, for the answer.
            worker: takes what is computed, and says whether to stop.

        Raises:
            EdgeError: the request cannot be answered.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            body = await read_body(scope, receive, self.service.settings)
        except ClientGoneError:
            return
        except RefusedError as error:
            await UnreadBodyResponse(error)(scope, receive, send)
            return
        CLIENT.set(scope["client"][0] if scope.get("client") else "")
        large = len(body) >= _LARGE_BODY
        try:
            parsed = asyncio.get_running_loop().run_in_executor(_PARSERS, self.parse, body) if large else None
            request = self.parse(body) if parsed is None else await parsed
            work = self._large_work if large else self._work
            worker = self.service.start(partial(work, request))
        except EdgeError as error:
            await error_response(error)(scope, receive, send)
            return
        del body
        async with _cancelled_when_left(receive, worker) as left:
            if self.streams(request):
                await self._stream(worker, left, scope, receive, send)
            else:
                await self._whole(worker, left, scope, receive, send)

    def _large_work(self, request: Body, worker: AnswerWorker[bytes]) -> None:
        """`_work`, after which the memory that tokenizing a long text took goes back to the system.

        A text of 1 MB takes a hundred times as much, in the heap of one of many threads, and the C library keeps it.
        """
        try:
            self._work(request, worker)
        finally:
            trim_heap()

    def _work(self, request: Body, worker: AnswerWorker[bytes]) -> None:
        name = self.service.pool.find(request.model).id
        with self.service.pool.use(name, cancellation=worker.cancellation) as engine:
            worker.cancellation.check()
            try:
                self.compute(request, engine, name, worker)
            except EdgeError:
                worker.cancellation.check()
                raise

    async def _whole(
        self, worker: AnswerWorker[bytes], left: asyncio.Event, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            async with asyncio.timeout(self.service.settings.request_timeout_s):
                pieces: list[bytes] = []
                while taken := await worker.take():
                    pieces += taken
        except BaseException as error:
            if (shown := self._shown(error)) is None:
                raise
            if not left.is_set():
                await error_response(shown)(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % sum(map(len, pieces)))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": False})

    async def _stream(
        self, worker: AnswerWorker[bytes], left: asyncio.Event, scope: Scope, receive: Receive, send: Send
    ) -> None:
        begun = False
        last = b""
        try:
            async with asyncio.timeout(self.service.settings.request_timeout_s):
                await worker.accepted()
                begun = True
                await send_events(send, worker, self.service.settings.silence_s)
        except BaseException as error:
            if (shown := self._shown(error)) is None:
                raise
            if left.is_set():
                return
            if not begun:
                await error_response(shown)(scope, receive, send)
                return
            last = event(error_object(shown))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _shown(self, error: BaseException) -> EdgeError | None:
        """What the client is told of an error; None for one that ends the server's task."""
        if isinstance(error, CancelledError):
            return RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down", "the answer was cancelled by the server"
            )
        if isinstance(error, EdgeError):
            return error
        if isinstance(error, TimeoutError):
            limit = self.service.settings.request_timeout_s
            return RefusedError(HTTPStatus.GATEWAY_TIMEOUT, "timeout", f"the answer took more than {limit:g} seconds")
        if isinstance(error, Exception):
            _log.error("a request failed: %s", type(error).__name__, exc_info=error)
            return RequestError(f"the server failed: {type(error).__name__}", code=ErrorCode.INTERNAL)
        return None


@asynccontextmanager
async def _cancelled_when_left(receive: Receive, worker: AnswerWorker[bytes]) -> AsyncIterator[asyncio.Event]:
    """Cancel the work when the client goes away, and at the end of the block; yields whether the client went away."""
    left = asyncio.Event()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()
        worker.cancellation.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield left
    finally:
        watching.cancel()
        worker.cancellation.cancel()
        with suppress(asyncio.CancelledError):
            await watching
