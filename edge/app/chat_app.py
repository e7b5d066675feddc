"""The ASGI application of the app: the page, its API, and the OpenAI-compatible API beside them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..server.asgi_app import Guard, asgi_app, not_routed, origin_refusal
from .app_access import OPEN_PATH, session_refusal
from .app_service import AppService
from .conversation_endpoints import conversation_routes
from .models.model_endpoints import model_routes
from .page_files import PageFiles, PageHeaders, index_page
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

    app = Starlette(
        routes=[
            Route("/", index_page, methods=["GET"]),
            Mount("/page", PageFiles()),
            Route(OPEN_PATH, service.access.enter, methods=["GET"]),
            Route(OPEN_PATH, service.access.give_token, methods=["POST"]),
            Route("/api/events", context.events, methods=["GET"]),
            *state_routes(context, service.models),
            *conversation_routes(context, service.generations),
            *model_routes(service.models),
            *tool_routes(context),
        ],
        middleware=[
            Middleware(PageHeaders),
            Middleware(Guard, partial(origin_refusal, context.settings)),
            Middleware(Guard, partial(session_refusal, service.access)),
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
