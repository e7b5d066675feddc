"""The ASGI application: its routes, its middleware, and the end of its models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...version import __version__
from ..service.openai_objects import model_object, object_list
from ..service.request_error import ErrorCode, RequestError
from .access_guard import KeyGuard, OriginGuard
from .answer_endpoint import AnswerEndpoint
from .answer_service import AnswerService
from .error_objects import JsonResponse, RefusedError, UnreadBodyResponse, error_response
from .generation_endpoints import ChatEndpoint, CompletionEndpoint, ResponsesEndpoint
from .server_metrics import CONTENT_TYPE
from .text_endpoints import DetokenizeEndpoint, EmbeddingEndpoint, TokenizeEndpoint

_log: Final = logging.getLogger(__name__)
CLIENT_GONE: Final = 499
"""Status under which requests are counted whose client went away before a response."""
_ENDPOINTS: Final[Mapping[str, Callable[[AnswerService], AnswerEndpoint[Any]]]] = {
    "/v1/chat/completions": ChatEndpoint,
    "/v1/completions": CompletionEndpoint,
    "/v1/responses": ResponsesEndpoint,
    "/v1/embeddings": EmbeddingEndpoint,
    "/tokenize": TokenizeEndpoint,
    "/detokenize": DetokenizeEndpoint,
}
"""Endpoints that compute, by path."""


def asgi_app(service: AnswerService) -> Starlette:
    """The ASGI application of a service; ending its lifespan closes the service."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            # Closing waits for the passes in progress.
            await asyncio.to_thread(service.close)

    settings = service.settings
    plain = _PlainEndpoints(service)
    middleware = [Middleware(_RequestCount, service), Middleware(OriginGuard, settings)]
    if settings.allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allow_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
            )
        )
    middleware.append(Middleware(KeyGuard, settings))
    app = Starlette(
        routes=[
            Route("/", plain.index, methods=["GET"]),
            *(Route(path, endpoint(service), methods=["POST"]) for path, endpoint in _ENDPOINTS.items()),
            Route("/v1/models", plain.models, methods=["GET"]),
            Route("/v1/models/{id:path}", plain.model, methods=["GET"]),
            Route("/health", plain.health, methods=["GET"]),
            Route("/metrics", plain.metrics, methods=["GET"]),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: not_routed},
        lifespan=lifespan,
    )
    # A client that follows a redirect would send its body twice.
    app.router.redirect_slashes = False
    return app


class _PlainEndpoints:
    """Endpoints that compute nothing."""

    def __init__(self, service: AnswerService) -> None:
        self._service: Final = service

    async def index(self, request: Request) -> Response:
        """The version of the server, and its paths."""
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        paths = [
            {
                "path": route.path_format,
                "methods": sorted((route.methods or set()) - {"HEAD"}),
                "description": (route.endpoint.__doc__ or "").partition("\n")[0],
            }
            for route in routes
        ]
        return JsonResponse({"name": "edge-run", "version": __version__, "paths": paths})

    async def models(self, _request: Request) -> Response:
        """The models that are offered."""
        entries = await asyncio.to_thread(self._service.pool.names)
        return JsonResponse(object_list([model_object(entry.id, entry.created) for entry in entries]))

    async def model(self, request: Request) -> Response:
        """One model."""
        try:
            entry = await asyncio.to_thread(self._service.pool.find, request.path_params["id"])
        except RequestError as error:
            return error_response(error)
        return JsonResponse(model_object(entry.id, entry.created))

    async def health(self, _request: Request) -> Response:
        """Whether the server takes requests: 200, or 503 while it ends."""
        if self._service.draining:
            return JsonResponse({"status": "draining"}, HTTPStatus.SERVICE_UNAVAILABLE)
        return JsonResponse({"status": "ok"})

    async def metrics(self, _request: Request) -> Response:
        """What the server counts, for Prometheus."""
        return Response(await asyncio.to_thread(self._service.metrics.text), media_type=CONTENT_TYPE)


async def not_routed(request: Request, error: Exception) -> Response:
    """The response to a path or a method that the server does not have."""
    assert isinstance(error, HTTPException)  # noqa: S101  registered for this class alone
    status = HTTPStatus(error.status_code)
    method, path = request.method, request.url.path
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "")
        refusal = RefusedError(
            status, "method_not_allowed", f"{path} does not take {method}", f"send {allowed}", error.headers
        )
    else:
        refusal = RefusedError(status, "unknown_path", f"there is no {path!r:.200}", "paths are in docs/server.md")
    return UnreadBodyResponse(refusal)


class _RequestCount:
    """Middleware that counts requests, and answers those on which the server fails."""

    def __init__(self, app: ASGIApp, service: AnswerService) -> None:
        self._app: Final = app
        self._metrics: Final = service.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception as error:
            if status != CLIENT_GONE:
                raise
            _log.error("a request failed: %s", type(error).__name__, exc_info=error)
            failure = RequestError(f"the server failed: {type(error).__name__}", code=ErrorCode.INTERNAL)
            await error_response(failure)(scope, receive, counted)
        finally:
            self._metrics.count_request(_endpoint(scope), status)


def _endpoint(scope: Scope) -> str:
    """The endpoint of a request, as the metrics name it: paths come from clients, and their number must stay small."""
    routes = (route for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE)
    return next((route.path_format for route in routes), "other")
