"""The ASGI application of the app: the page, its API, and the OpenAI-compatible API beside them."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..server.asgi_app import Guard, asgi_app, not_routed, origin_refusal
from ..server.http_messages import JsonResponse, RefusedError, UnreadBodyResponse
from .app_access import OPEN_PATH, SESSION_LIFE_S, SessionGuard
from .app_service import AppService
from .conversation_endpoints import conversation_routes
from .event_channel import EventsEndpoint
from .message_endpoints import message_routes
from .models.model_endpoints import model_routes
from .page_files import PageFiles, PageHeaders, entrance_page, index_page, passage_page
from .state_endpoints import state_routes, tool_routes

_OPENAI_API: Final = "/v1/"


def chat_app(service: AppService) -> ASGIApp:
    """The ASGI application of the app; ending its lifespan closes the service."""
    context = service.context

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            # Closing waits for the passes in progress.
            await asyncio.to_thread(service.close)

    entrance = _Entrance(service)
    app = Starlette(
        routes=[
            Route("/", index_page, methods=["GET"]),
            Mount("/page", PageFiles()),
            Route(OPEN_PATH, entrance.enter, methods=["GET"]),
            Route(OPEN_PATH, entrance.new_token, methods=["POST"]),
            Route("/api/events", EventsEndpoint(context.events, context.settings.silence_s), methods=["GET"]),
            *state_routes(context, service.models),
            *conversation_routes(context, service.generations),
            *message_routes(context, service.generations),
            *model_routes(service.models),
            *tool_routes(context),
        ],
        middleware=[
            Middleware(PageHeaders),
            Middleware(Guard, partial(origin_refusal, context.settings)),
            Middleware(SessionGuard, service.access),
        ],
        exception_handlers={HTTPException: not_routed},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    programs = asgi_app(service.requests)

    async def side_by_side(scope: Scope, receive: Receive, send: Send) -> None:
        for_programs = scope["type"] == "http" and scope["path"].startswith(_OPENAI_API)
        await (programs if for_programs else app)(scope, receive, send)

    return side_by_side


class _Entrance:
    """The way in: a one-time token becomes a session."""

    def __init__(self, service: AppService) -> None:
        self._service: Final = service
        self._access: Final = service.access

    async def enter(self, request: Request) -> Response:
        """Let a browser in that has a token, or has been let in before."""
        if not self._access.take_token(request.query_params.get("token", "")):
            if self._access.has_session(request.scope):
                return RedirectResponse("/", HTTPStatus.SEE_OTHER)
            return entrance_page("This link has been used already, or is more than a few minutes old.")
        foreign = request.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}
        response = passage_page() if foreign else RedirectResponse("/", HTTPStatus.SEE_OTHER)
        response.set_cookie(
            self._access.cookie_name,
            self._access.new_session(),
            max_age=SESSION_LIFE_S,
            httponly=True,
            samesite="strict",
        )
        return response

    async def new_token(self, request: Request) -> Response:
        """A token for another process of the same user."""
        _, _, given = request.headers.get("authorization", "").partition(" ")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self._access.owner_key.encode()):
            return UnreadBodyResponse(
                RefusedError(HTTPStatus.UNAUTHORIZED, "invalid_api_key", "the key is missing or wrong")
            )
        if self._service.requests.draining:
            refusal = RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down", "the app is ending")
            return UnreadBodyResponse(refusal)
        return JsonResponse({"token": self._access.new_token()})
