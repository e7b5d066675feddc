"""The ASGI application: its routes, who may use them, and the end of its models.

A web page can make the browser send requests to a server on the same machine. Requests whose `Host` is not a name of
this server come from a page whose name was pointed at this machine (DNS rebinding). Requests with another `Origin` come
from a page of another site; browsers send some of them without asking the server first, so they are refused before
anything is done, and bodies have to be declared as JSON, which a page cannot do without asking.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...version import __version__
from .endpoints import RequestService
from .http_protocol import JsonResponse, RefusedError, UnreadBodyResponse, error_response, server_failure
from .protocols import PROTOCOLS
from .server_metrics import CONTENT_TYPE
from .server_settings import MAX_HEADER_BYTES, ServerSettings

_CLIENT_GONE: Final = 499
"""Status under which requests are counted whose client went away before a response."""
_WITH_BODY: Final = ("POST", "PUT", "PATCH")
"""Methods whose requests have a body."""


def closing_app(routes: Sequence[BaseRoute], middleware: Sequence[Middleware], close: Callable[[], None]) -> Starlette:
    """An application that answers errors as this server does; ending its lifespan calls `close`."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            # Closing waits for the passes in progress.
            await asyncio.to_thread(close)

    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: _not_routed}, lifespan=lifespan
    )
    # A client that follows a redirect would send its body twice.
    app.router.redirect_slashes = False
    return app


def asgi_app(service: RequestService, *further: Middleware) -> Starlette:
    """The ASGI application of a service, with further middleware; ending its lifespan closes the service."""
    settings = service.settings
    middleware = [Middleware(_counted, service), Middleware(guarded, partial(origin_refusal, settings))]
    if settings.allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allow_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
            )
        )
    middleware.append(Middleware(guarded, partial(_key_refusal, settings.api_key)))
    middleware.extend(further)
    own = [route for protocol in PROTOCOLS for route in protocol.routes(service)]
    routes = [Route("/", _index, methods=["GET"]), *own, *_plain_routes(service)]
    return closing_app(routes, middleware, service.close)


def _plain_routes(service: RequestService) -> list[Route]:
    """The routes of endpoints that compute nothing; their docstrings are for the list of paths."""

    async def health(_request: Request) -> Response:
        """Whether the server takes requests: 200, or 503 while it ends."""
        if service.draining:
            return JsonResponse({"status": "draining"}, HTTPStatus.SERVICE_UNAVAILABLE)
        return JsonResponse({"status": "ok"})

    async def metrics(_request: Request) -> Response:
        """What the server counts, for Prometheus."""
        return Response(await asyncio.to_thread(service.metrics.text), media_type=CONTENT_TYPE)

    paths = {"/health": health, "/metrics": metrics}
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in paths.items()]


async def _index(request: Request) -> Response:
    """The version of the server, and its paths."""
    paths = [
        {
            "path": route.path_format,
            "methods": sorted((route.methods or set()) - {"HEAD"}),
            "description": (route.endpoint.__doc__ or "").partition("\n")[0],
        }
        for route in request.app.routes
        if isinstance(route, Route)
    ]
    return JsonResponse({"name": "edge-run", "version": __version__, "paths": paths})


async def _not_routed(request: Request, error: Exception) -> Response:
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
    return UnreadBodyResponse(refusal, request.scope)


def _counted(app: ASGIApp, service: RequestService) -> ASGIApp:
    """Middleware that counts requests, and answers those on which the server fails."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        status = _CLIENT_GONE

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, counted)
        except Exception as error:
            if status != _CLIENT_GONE:
                raise
            await error_response(server_failure(error), scope)(scope, receive, counted)
        finally:
            # Paths come from clients, and the number of names in the metrics must stay small.
            routes = (route for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE)
            service.metrics.count_request(next((route.path_format for route in routes), "other"), status)

    return answer


def guarded(app: ASGIApp, refusal: Callable[[Scope], RefusedError | Response | None]) -> ASGIApp:
    """Middleware that refuses the requests for which `refusal` gives a reason, or a response."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := refusal(scope)) is not None:
            response = refused if isinstance(refused, Response) else UnreadBodyResponse(refused, scope)
            await response(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


def origin_refusal(settings: ServerSettings, scope: Scope) -> RefusedError | None:
    """Why a request with too long headers, to an unknown host or from another site is refused; None for others."""
    headers = Headers(scope=scope)
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        what = f"the headers have more than {MAX_HEADER_BYTES} bytes"
        return RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", what)
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    if len(hosts) != 1 or not settings.allows_host(hosts[0]):
        shown = hosts[0] if hosts else "missing"
        what = f"the Host header {shown!r:.200} is not a name of this server"
        hint = "use localhost or 127.0.0.1, or start the server with --allow-host NAME"
        return RefusedError(HTTPStatus.MISDIRECTED_REQUEST, "host_not_allowed", what, hint)
    own = f"{scope.get('scheme', 'http')}://{hosts[0]}".lower()
    allowed = settings.allow_origins
    if "*" in allowed or all(origin in allowed or origin.lower() == own for origin in origins):
        return None
    what = f"pages of {origins[0]!r:.200} may not use this server"
    return RefusedError(HTTPStatus.FORBIDDEN, "origin_not_allowed", what, "start the server with --allow-origin ORIGIN")


def _key_refusal(key: str | None, scope: Scope) -> RefusedError | None:
    """Why a request without the API key, or with a body that is not declared as JSON, is refused."""
    if key is not None and scope["path"] != "/health":  # which tells nothing but that the server runs
        headers = Headers(scope=scope)
        default = f"bearer {headers.get('x-api-key', '')}"  # the header of Anthropic's clients
        scheme, _, given = headers.get("authorization", default).partition(" ")
        # The time of the comparison does not tell where the two differ.
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("utf-8"), key.encode()):
            return RefusedError(
                HTTPStatus.UNAUTHORIZED,
                "invalid_api_key",
                "the API key is missing or wrong",
                "send it as the header Authorization: Bearer KEY",
                {"www-authenticate": "Bearer"},
            )
    return content_type_refusal(scope)


def content_type_refusal(scope: Scope) -> RefusedError | None:
    """Why a request is refused whose body may be something other than JSON; None for all others."""
    if scope["method"] not in _WITH_BODY:
        return None
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return None
    what = f"the Content-Type is {kind!r:.100}" if kind else "the header Content-Type is missing"
    hint = "send JSON with Content-Type: application/json"
    return RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_content_type", what, hint)
