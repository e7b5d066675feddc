"""Endpoints of the page's API: a JSON object in, a JSON object out, computed in a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, TypeAlias, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...errors import EdgeError, UnknownIdError
from ...models.hub.client import ConnectionFailedError, OfflineError
from ...runtime.graph.memory import trim_heap
from ..server.error_objects import JsonResponse, RefusedError, UnreadBodyResponse, error_response
from ..server.request_body import ClientGoneError, read_body
from ..server.server_settings import ServerSettings
from ..service.body_decoder import decode_body
from ..service.request_error import ErrorCode, RequestError
from ..service.strict_json import RequestLimits

_Body = TypeVar("_Body", bound=msgspec.Struct)
_log: Final = logging.getLogger(__name__)
_QUICK: Final = ThreadPoolExecutor(8, "edge-run api")
_SLOW: Final = ThreadPoolExecutor(2, "edge-run api, slow")
_LARGE_BODY: Final = 64 << 10
"""Bytes of a body from which on the memory that it took goes back to the system."""


@dataclass(frozen=True)
class ApiCall:
    """A request to the page's API."""

    path: Mapping[str, str]
    """Values of the parts of the path that vary."""
    query: Mapping[str, str]
    """Parameters after the question mark."""
    body_bytes: bytes

    def body(self, kind: type[_Body], limits: RequestLimits | None = None) -> _Body:
        """Decode the body; a request without one has no fields.

        Args:
            kind: its fields.
            limits: how much it may contain.

        Raises:
            RequestError: a field is unknown, missing or has another form.
        """
        return decode_body(self.body_bytes or b"{}", kind, limits)

    def integer(self, name: str, default: int, most: int) -> int:
        """A parameter after the question mark that is an integer of 1 to `most`.

        Raises:
            RequestError: it is something else.
        """
        text = self.query.get(name, str(default))
        digits = text.lstrip("0") if text.isascii() and text.isdecimal() else ""
        if not digits or len(digits) > len(str(most)) or int(digits) > most:
            raise RequestError(
                f"{name} is {text!r:.50}", f"it must be 1 to {most}", code=ErrorCode.INVALID_VALUE, param=name
            )
        return int(digits)


Handler: TypeAlias = Callable[[ApiCall], object]
"""Answers a request, in a thread: returns what becomes the JSON response, or a response; errors are EdgeErrors."""


def api_route(settings: ServerSettings, method: str, path: str, handler: Handler, *, slow: bool = False) -> Route:
    """A route of the page's API.

    Args:
        settings: limits of the body.
        method: GET, POST, PUT, PATCH or DELETE.
        path: the path, with `{name}` for parts that vary.
        handler: answers the requests.
        slow: whether that may take seconds, such as tokenizing a long text. Only two of such requests are answered at a
            time, so that they do not keep others waiting.
    """
    return Route(path, _ApiEndpoint(settings, handler, _SLOW if slow else _QUICK), methods=[method])


def not_found(what: str, hint: str = "") -> RefusedError:
    """The error for a path that names what is not there."""
    return RefusedError(HTTPStatus.NOT_FOUND, "not_found", what, hint)


def _with_status(error: EdgeError, call: ApiCall) -> EdgeError:
    """An error with the status that its reason has in the page's API."""
    # In a body, an unknown id is an invalid value.
    if isinstance(error, UnknownIdError) and error.id in call.path.values():
        return not_found(error.what, error.hint)
    if isinstance(error, OfflineError):
        return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "offline", error.what, error.hint)
    if isinstance(error, ConnectionFailedError):
        return RefusedError(HTTPStatus.BAD_GATEWAY, "hub_unreachable", error.what, error.hint)
    return error


class _ApiEndpoint:
    def __init__(self, settings: ServerSettings, handler: Handler, threads: ThreadPoolExecutor) -> None:
        self._settings: Final = settings
        self._handler: Final = handler
        self._threads: Final = threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, self._settings)
        except ClientGoneError:
            return
        except RefusedError as error:
            await UnreadBodyResponse(error)(scope, receive, send)
            return
        request = Request(scope)
        call = ApiCall(request.path_params, request.query_params, body)
        response = await asyncio.get_running_loop().run_in_executor(self._threads, self._respond, call)
        await response(scope, receive, send)

    def _respond(self, call: ApiCall) -> Response:
        try:
            result = self._handler(call)
        except EdgeError as error:
            return error_response(_with_status(error, call))
        except Exception as error:  # noqa: BLE001  what it is goes to the log
            _log.error("a request failed: %s", type(error).__name__, exc_info=error)
            what = f"the app failed: {type(error).__name__}"
            return error_response(RequestError(what, "its log says more", code=ErrorCode.INTERNAL))
        finally:
            if len(call.body_bytes) >= _LARGE_BODY:
                trim_heap()
        return result if isinstance(result, Response) else JsonResponse(result)
