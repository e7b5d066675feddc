"""The endpoints that compute, one run a request, and the state of the server that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from starlette.types import Receive, Scope, Send

from ...errors import CancelledError, EdgeError
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine
from ...runtime.graph.memory import trim_heap
from ...runtime.result import Chunk, Reply
from ...runtime.scheduling.request_run import Cancellation, LoopQueue, Run
from ...runtime.structure.response_format import CLIENT
from ..service.body_decoder import StrictStruct
from ..service.generation_fields import GenerationRequest
from ..service.model_pool import ModelPool
from ..service.openai_objects import GenerationObjects
from ..service.request_error import describe
from .http_protocol import (
    LARGE_BODY,
    Protocol,
    ProtocolRoute,
    RefusedError,
    encode_json,
    error_response,
    next_events,
    read_body,
    server_failure,
    watching_client,
)
from .image_urls import with_fetched_images
from .server_metrics import ServerMetrics
from .server_settings import ServerSettings

_JOIN_S: Final = 5.0
"""Seconds to wait for the end of a thread that was cancelled."""
_PARSERS: Final = ThreadPoolExecutor(2, "edge-run parser")
"""Parses large bodies: two at a time, so that what they take in memory stays bounded."""
Compute: TypeAlias = Callable[..., Iterator[bytes]]
"""Computes the response to a request, in the thread of its run, from the parsed request, the model (an `Engine`, or an
`Encoder`), its id, and the `Cancellation` that says when to stop; where no model is needed, from the request and its
`Run`. It yields the pieces of the body, and raises an `EdgeError` if the request cannot be answered. The response of a
stream begins with the first piece, which may be empty: errors from then on occur in its middle."""


class RequestService:
    """The state of one server: the models, the metrics, and the requests that are being computed.

    Args:
        pool: the models; closed with the service.
        settings: limits.
    """

    def __init__(self, pool: ModelPool, settings: ServerSettings) -> None:
        self.pool: Final = pool
        self.settings: Final = settings
        self.metrics: Final = ServerMetrics(pool.status)
        self.draining = False
        """Whether no further requests are taken."""
        self._runs: Final[set[Run[bytes]]] = set()

    @property
    def busy(self) -> bool:
        """Whether a request is being computed."""
        return any(not run.ended for run in self._runs)

    def drain(self) -> None:
        """Refuse further requests; requests that have begun go on."""
        self.draining = True

    def cancel_all(self) -> None:
        """End all answers after their current pass."""
        for run in list(self._runs):
            run.cancellation.cancel()

    def close(self) -> None:
        """End all answers and unload all models."""
        self.drain()
        self.cancel_all()
        self.pool.close()
        for run in list(self._runs):
            run.join(_JOIN_S)

    def start(self, run: Run[bytes]) -> None:
        """Start the run of a request.

        Raises:
            RefusedError: the server is shutting down, or has too many requests.
        """
        if self.draining:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down", "the server is shutting down")
        self._runs.difference_update([run for run in self._runs if run.ended])
        if len(self._runs) >= self.settings.max_requests:
            what = f"{len(self._runs)} requests are being answered or wait"
            raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, "busy", what, "try again later")
        self._runs.add(run)
        run.start()


class Endpoint(ProtocolRoute):
    """A path whose response is computed in the thread of a `Run`.

    The client is watched meanwhile: when it goes away, the run is cancelled, whether its response is streamed,
    computed, or waits for its place.

    Args:
        service: the state of the server.
        protocol: the API that the path belongs to.
        path: the path.
        body: the body of a request, which names its `model`, or None.
        compute: answers what the body asks for; its docstring is for the list of paths.
        loads: whether that takes the model which the request names.
        encoders: whether that model may be an encoder.
    """

    def __init__(
        self,
        service: RequestService,
        protocol: Protocol,
        path: str,
        body: type[StrictStruct],
        compute: Compute,
        *,
        loads: bool = True,
        encoders: bool = False,
    ) -> None:
        super().__init__(protocol, "POST", path, compute)
        self.app = self._answer
        self._service: Final = service
        self._parse: Final = body.parse
        self._compute: Final = compute
        self._loads: Final = loads
        self._use: Final = service.pool.use_any if encoders else service.pool.use

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (body := await read_body(scope, receive, send, self._service.settings)) is None:
            return
        CLIENT.set(scope["client"][0] if scope.get("client") else "")
        large, settings = len(body) >= LARGE_BODY, self._service.settings
        pieces: LoopQueue[bytes] = LoopQueue()
        try:
            given: bytes | dict[str, Any] = body
            if settings.allow_image_urls and (b"http:" in body or b"https:" in body):
                given, large = await with_fetched_images(body), True
            parsed = asyncio.get_running_loop().run_in_executor(_PARSERS, self._parse, given) if large else None
            request = self._parse(given) if parsed is None else await parsed
            run = Run(partial(self._work, request, large), "edge-run request", pieces)
            self._service.start(run)
        except EdgeError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        del body, given
        streams = getattr(request, "stream", False)
        disconnected = asyncio.Event()

        def leave() -> None:
            disconnected.set()
            run.cancellation.cancel()

        try:
            async with watching_client(receive, leave):
                await self._respond(pieces, disconnected, scope, receive, send, streams=streams)
        finally:
            run.cancellation.cancel()

    def _work(self, request: Any, large: bool, run: Run[bytes]) -> None:
        """Compute a response. A `large` one's memory goes back to the system.

        A text of 1 MB takes a hundred times as much, in the heap of one of many threads, and the C library keeps it.
        """
        keep_s = getattr(request, "keep_s", None)
        try:
            if not self._loads:
                for piece in self._compute(request, run):
                    run.put(piece)
                return
            name = self._service.pool.find(request.model).id
            if getattr(request, "unloads", False):
                self._service.pool.keep(name, 0.0)
                run.put(next(self._compute(request, None, name, run.cancellation)))
                return
            with self._use(name, cancellation=run.cancellation, keep_s=keep_s) as engine:
                run.cancellation.check()
                try:
                    for piece in self._compute(request, engine, name, run.cancellation):
                        run.put(piece)
                except EdgeError:
                    run.cancellation.check()
                    raise
        finally:
            if large:
                trim_heap()

    async def _respond(
        self,
        pieces: LoopQueue[bytes],
        disconnected: asyncio.Event,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        streams: bool,
    ) -> None:
        """Send the response of a run: as events while they come, or whole."""
        begun, last, protocol = False, b"", self.protocol
        try:
            async with asyncio.timeout(self._service.settings.request_timeout_s):
                taken = await pieces.take()
                if streams:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": protocol.headers})
                while taken:
                    if streams:
                        await send({"type": "http.response.body", "body": b"".join(taken), "more_body": True})
                        taken = await next_events(pieces, self._service.settings.silence_s, protocol.silence)
                    else:
                        last += b"".join(taken)
                        taken = await pieces.take()
        except BaseException as error:
            if (shown := self._shown(error)) is None:
                raise
            # The traceback holds this frame, and with it the error and the request.
            shown.__traceback__ = None
            if disconnected.is_set():
                return
            if not begun:
                await error_response(shown, scope)(scope, receive, send)
                return
            last = protocol.encode(protocol.error(shown))
        if not begun:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(last))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _shown(self, error: BaseException) -> EdgeError | None:
        """What the client is told of an error; None for one that ends the server's task."""
        if isinstance(error, CancelledError):
            what = "the answer was cancelled by the server"
            return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down", what)
        if isinstance(error, EdgeError):
            return error
        if isinstance(error, TimeoutError):
            limit = self._service.settings.request_timeout_s
            return RefusedError(HTTPStatus.GATEWAY_TIMEOUT, "timeout", f"the answer took more than {limit:g} seconds")
        if isinstance(error, Exception):
            return server_failure(error)
        return None


def object_route(
    service: RequestService,
    protocol: Protocol,
    path: str,
    body: type[StrictStruct],
    answer: Callable[..., object],
    *,
    encoders: bool = False,
) -> Endpoint:
    """A path whose response is one object.

    Args:
        answer: returns it, from what the body asks for, the model, its id, and a `Cancellation`.

    Other arguments are those of `Endpoint`.
    """

    @wraps(answer)
    def compute(*given: Any) -> Iterator[bytes]:
        yield encode_json(answer(*given))

    return Endpoint(service, protocol, path, body, compute, encoders=encoders)


def progress_route(
    service: RequestService, protocol: Protocol, path: str, body: type[StrictStruct], work: Callable[..., object]
) -> Endpoint:
    """A path whose response is one object, or where the body wants a stream, its progress too.

    Args:
        work: returns the object, from what the body asks for, a function that sends another one before, and a
            `Cancellation`.

    Other arguments are those of `Endpoint`.
    """

    @wraps(work)
    def compute(request: Any, run: Run[bytes]) -> Iterator[bytes]:
        def report(value: object) -> None:
            if request.stream:
                run.put(protocol.encode(value))

        done = work(request, report, run.cancellation)
        yield protocol.encode(done) + protocol.end if request.stream else encode_json(done)

    return Endpoint(service, protocol, path, body, compute, loads=False)


def generating_route(
    service: RequestService, protocol: Protocol, path: str, body: type[StrictStruct], kind: type[GenerationObjects]
) -> Endpoint:
    """A path that generates text, whose responses have objects of `kind`; other arguments as for `Endpoint`.

    The docstring of the body's `request` is for the list of paths.
    """
    compute = partial(_generate, service.metrics, protocol, kind)
    compute.__doc__ = body.request.__doc__
    return Endpoint(service, protocol, path, body, compute)


def _generate(
    metrics: ServerMetrics,
    protocol: Protocol,
    kind: type[GenerationObjects],
    request: GenerationRequest,
    engine: Engine,
    model: str,
    cancellation: Cancellation,
) -> Iterator[bytes]:
    """Answer the prompts one after the other; each takes a place in the engine's queue before its first piece.

    Args:
        metrics: count the answers.
        protocol: writes the pieces of a stream.
        kind: makes the objects of the response.
        request: what to answer.
        engine: the model; None where the request unloads it.
        model: its id.
        cancellation: says when to stop.
    """
    request.check(engine)
    objects = kind(request, model)
    replies = []
    for index in range(len(request.prompts)):
        with cancellation.reading(request.begin(engine, index)) as stream:
            stream.start()
            chunks: list[Chunk] = []
            # An empty piece begins the response too; see `Compute`.
            yield b"".join(map(protocol.encode, objects.started())) if request.stream else b""
            try:
                for chunk in stream:
                    if chunk.finish_reason is not None and chunk.stats is not None:
                        waited_s = None if chunk.index else stream.waited_s
                        metrics.count_answer(model, chunk.finish_reason.value, chunk.stats, waited_s)
                    if chunk.finish_reason is FinishReason.CANCELLED:
                        raise request.cancelled()
                    if request.stream:
                        yield b"".join(map(protocol.encode, objects.chunk(chunk, index)))
                    else:
                        chunks.append(chunk)
            except CancelledError:
                raise
            except EdgeError as error:
                if not request.stream or not (failed := objects.failed(describe(error))):
                    raise
                yield b"".join(map(protocol.encode, failed))
            if not request.stream:
                replies.append(Reply.of(chunks))
    if not request.stream:
        yield encode_json(objects.whole(*replies))
    else:
        yield protocol.end
