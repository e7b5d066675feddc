"""Endpoints without a model: a JSON object in, a JSON object out, computed in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Final, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...errors import EdgeError, UnknownIdError
from ...runtime.graph.memory import trim_heap
from ..service.body_decoder import MAX_CHARACTERS
from ..service.text_bodies import Parameters
from .http_protocol import (
    LARGE_BODY,
    OPENAI,
    JsonResponse,
    Protocol,
    ProtocolRoute,
    RefusedError,
    error_response,
    read_body,
    server_failure,
)
from .server_settings import ServerSettings

_QUICK: Final = ThreadPoolExecutor(8, "edge-run api")
_SLOW: Final = ThreadPoolExecutor(2, "edge-run api, slow")
Handler: TypeAlias = Callable[..., object]
"""Answers a request, in a thread: returns what becomes the JSON response, or a response; errors are EdgeErrors.

Its parameters say what it takes: the parts of the path that vary, `query` (the parameters after the question mark), and
either `body`, a struct, or the fields of the body, of which none other is allowed. A request without a body has no
fields.
"""


def not_found(what: str, hint: str = "") -> RefusedError:
    """The error for a path that names what is not there."""
    return RefusedError(HTTPStatus.NOT_FOUND, "not_found", what, hint)


class JsonRoute(ProtocolRoute):
    """A route whose handler takes and returns JSON.

    Args:
        settings: limits of the size of the body.
        method: GET, POST, PUT, PATCH or DELETE.
        path: the path, with `{name}` for parts that vary.
        handler: answers the requests.
        slow: whether that may take seconds, such as tokenizing a long text. Only two of such requests are answered at a
            time, so that they do not keep others waiting.
        max_characters: largest number of characters of the body's texts and names.
        protocol: the API that the path belongs to.
    """

    def __init__(
        self,
        settings: ServerSettings,
        method: str,
        path: str,
        handler: Handler,
        *,
        slow: bool = False,
        max_characters: int = MAX_CHARACTERS,
        protocol: Protocol = OPENAI,
    ) -> None:
        super().__init__(protocol, method, path, handler)
        self.app = self._answer
        self._settings: Final = settings
        self._max_characters: Final = max_characters
        self._threads: Final = _SLOW if slow else _QUICK
        self.parameters: Final = Parameters(handler, {*self.param_convertors, "query"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (body := await read_body(scope, receive, send, self._settings)) is None:
            return
        response = await asyncio.get_running_loop().run_in_executor(self._threads, self._respond, Request(scope), body)
        await response(scope, receive, send)

    def _respond(self, request: Request, body: bytes) -> Response:
        try:
            given = {**request.path_params, "query": request.query_params}
            arguments = {name: given[name] for name in self.parameters.elsewhere}
            result = self.parameters.function(**arguments, **self.parameters.read(body or b"{}", self._max_characters))
        except EdgeError as error:
            # In a body, an unknown id is an invalid value.
            if isinstance(error, UnknownIdError) and error.id in request.path_params.values():
                return error_response(not_found(error.what, error.hint), request.scope)
            return error_response(error, request.scope)
        except Exception as error:  # noqa: BLE001  what it is goes to the log
            return error_response(server_failure(error, "its log says more"), request.scope)
        finally:
            if len(body) >= LARGE_BODY:
                trim_heap()
        return result if isinstance(result, Response) else JsonResponse(result)


def json_routes(
    settings: ServerSettings,
    table: Iterable[tuple[str, str, Handler]],
    *,
    slow: bool = False,
    protocol: Protocol = OPENAI,
) -> list[ProtocolRoute]:
    """Routes of methods, paths and handlers; other arguments as for `JsonRoute`."""
    return [JsonRoute(settings, *row, slow=slow, protocol=protocol) for row in table]
