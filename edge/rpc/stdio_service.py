"""The protocol on standard input and output: its methods, and the JSON Schema made of them and their docstrings."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import chain
from typing import Annotated, Any, Final, cast

import msgspec
import psutil
from msgspec import UNSET, Meta

from ...models.hub.downloaded_model import DownloadedModel, parse_hub_id
from ...models.hub.fetch import fetch_model
from ...runtime.decode import FinishReason
from ...runtime.devices.processor import Power, available_memory, battery, choose_power
from ...runtime.devices.providers import available_devices
from ...runtime.result import Reply
from ...runtime.scheduling.request_run import Run
from ...version import __version__
from ..service.generation_fields import GenerationRequest, check_token_ids
from ..service.model_files import describe_model
from ..service.model_pool import ModelPool
from ..service.openai_objects import ChatCompletionObjects, CompletionObjects, GenerationObjects
from ..service.pooled_model import ModelState
from ..service.text_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from . import protocol
from .connection import MAX_REQUESTS, Call, Connection, method_of, methods_of
from .line_transport import MAX_UNREAD_BYTES, STDIN, LineWriter, binary, read_lines, take_over_stdout
from .session_methods import MAX_SESSIONS, SessionMethods

_LAST_LINES_S: Final = 5.0
"""Seconds that the client has to read the last responses when the process ends."""


class RpcMethods(SessionMethods):
    """The methods of the protocol.

    Args:
        pool: the models.
        power: how models run.
        max_line_bytes: largest line of the client.
    """

    def __init__(self, pool: ModelPool, power: Power, max_line_bytes: int) -> None:
        super().__init__(pool)
        self._power: Final = power
        self._max_line_bytes: Final = max_line_bytes

    def initialize(
        self,
        _call: Call,
        protocol_version: Annotated[int, Meta(ge=1, description="Newest version that the client knows.")],  # noqa: ARG002
        client_info: protocol.ClientInfo | None = None,  # noqa: ARG002
    ) -> protocol.InitializeResult:
        """The first request."""
        return protocol.InitializeResult(
            protocol_version=protocol.PROTOCOL_VERSION,
            server_info=protocol.ServerInfo(name="edge-run", version=__version__),
            capabilities=protocol.Capabilities(methods=list(METHODS), notifications=list(protocol.NOTIFICATIONS)),
            limits=protocol.Limits(
                max_line_bytes=self._max_line_bytes,
                max_requests=MAX_REQUESTS,
                max_sessions=MAX_SESSIONS,
                max_unread_bytes=MAX_UNREAD_BYTES,
            ),
        )

    def models_list(self, _call: Call) -> protocol.ModelList:
        """No parameters."""
        loaded = {status.id for status in self._pool.status() if status.loaded}
        return protocol.ModelList(
            models=[
                protocol.ModelInfo(
                    id=entry.id,
                    loaded=entry.id in loaded,
                    owner=entry.owner,
                    created=entry.created,
                    capabilities=describe_model(entry, self._pool.kind)["capabilities"],
                )
                for entry in self._pool.offered.entries()
            ]
        )

    def models_pull(
        self,
        call: Call,
        id: Annotated[str, Meta(description="org/name, org/name:variant or org/name:variant@revision.")],  # noqa: A002
    ) -> protocol.PullResult:
        """A model on the Hugging Face Hub to download or to update."""
        id_ = parse_hub_id(id)

        def progress(stage: str, done: int, total: int) -> None:
            call.cancellation.check()
            call.progress(stage, done / total if total else 0.0, done_bytes=done, total_bytes=total)

        done: Future[DownloadedModel] = Future()

        def download(_run: Run[None]) -> None:
            with suppress(InvalidStateError):  # the request was cancelled meanwhile
                try:
                    done.set_result(fetch_model(id_, self._pool.kind, newest=True, progress=progress))
                except Exception as error:  # noqa: BLE001  who waits raises it
                    done.set_exception(error)

        # In a thread of its own, so that who waits for it can be cancelled while the network is silent.
        Run(download, "edge-run download").start()
        with call.cancellation.calling(done.cancel):
            found = done.result()
        offered = any(found.id in (entry.id, *entry.aliases) for entry in self._pool.offered.entries())
        return protocol.PullResult(
            id=found.id, commit=found.commit, path=str(found.folder), bytes=found.bytes, offered=offered
        )

    def models_load(self, call: Call, model: protocol.ModelName = None) -> ModelState:
        """A model."""
        return self._pool.load(model, call.progress, cancellation=call.cancellation)

    def models_unload(self, _call: Call, model: protocol.ModelName = None) -> protocol.UnloadResult:
        """A model."""
        return protocol.UnloadResult(unloaded=self._pool.unload(model))

    def generate(self, call: Call, body: ChatBody) -> protocol.Completion:
        """The next message of a conversation."""
        return self._generate(ChatCompletionObjects, call, body.request())

    def complete(self, call: Call, body: CompletionBody) -> protocol.Completion:
        """The continuation of a text."""
        return self._generate(CompletionObjects, call, body.request())

    def _generate(self, kind: type[GenerationObjects], call: Call, request: GenerationRequest) -> protocol.Completion:
        model = self._pool.offered.find(request.model).id
        objects, replies = kind(request, model), []
        use = self._pool.use(model, call.progress, cancellation=call.cancellation, keep_s=request.keep_s)
        with use as engine:
            request.check(engine)
            for index in range(len(request.prompts)):
                chunks = []
                with call.cancellation.reading(request.begin(engine, index)) as stream:
                    for chunk in stream:
                        chunks.append(chunk)
                        for object_ in objects.chunk(chunk, index) if request.stream else ():
                            call.notify("generate/update", protocol.GenerateUpdate(request_id=call.id, chunk=object_))
                call.cancellation.check()
                replies.append(reply := Reply.of(chunks))
                if reply.finish_reason is FinishReason.CANCELLED:
                    raise request.cancelled()
        return cast("protocol.Completion", objects.whole(*replies))

    def rank(
        self,
        call: Call,
        query: str,
        documents: list[str],
        model: protocol.ModelName = None,
        instruction: Annotated[str | None, Meta(description="What makes a document relevant.")] = None,
    ) -> protocol.RankResult:
        """Documents to compare with a query."""
        with self._pool.use_any(model, call.progress, cancellation=call.cancellation) as used:
            found = used.score(query, documents, instruction=instruction, cancelled=lambda: call.cancellation.cancelled)
            return protocol.RankResult(scores=found.scores.tolist())

    def tokenize(self, call: Call, body: TokenizeBody) -> protocol.TokenizeResult:
        """A text or a conversation."""
        request = body.request()
        with self._pool.use(request.model, call.progress, cancellation=call.cancellation) as engine:
            tokens = request.encode(engine)
            shown = engine.tokenizer.token_bytes.shown
            pieces = list(map(shown, tokens)) if request.with_pieces else UNSET
            return protocol.TokenizeResult(tokens=tokens, pieces=pieces, count=len(tokens), context=engine.context)

    def detokenize(self, call: Call, body: DetokenizeBody) -> protocol.DetokenizeResult:
        """Token ids."""
        with self._pool.use(body.model, call.progress, cancellation=call.cancellation) as engine:
            check_token_ids(engine, body.tokens, "tokens")
            return protocol.DetokenizeResult(content=engine.tokenizer.decode(body.tokens))

    def status(self, call: Call) -> protocol.Status:
        """No parameters."""
        open_sessions = sum(each is not None for each in list(self._sessions.values()))
        return protocol.Status(
            models=list(self._pool.status()),
            requests=protocol.Requests(running=call.connection.running, sessions=open_sessions),
            memory=protocol.Memory(
                process=psutil.Process().memory_info().rss,
                available=available_memory(),
                total=psutil.virtual_memory().total,
                max_models=self._pool.max_bytes,
            ),
            devices=[
                protocol.DeviceInfo(name=str(device), kind=device.kind.value, vendor=device.vendor)
                for device in available_devices()
            ],
            power=_power_state(self._power),
        )

    def shutdown(self, _call: Call) -> protocol.Done:
        """No parameters."""
        return protocol.Done()


METHODS: Final = methods_of(RpcMethods)
"""The methods of the protocol, by name."""


def _cancel_request(_self: object, call: Call, id: protocol.RequestId) -> protocol.Done:  # noqa: A002
    """A request in progress."""
    call.connection.cancel(id)
    return protocol.Done()


CLIENT_NOTIFICATIONS: Final = {
    "$/cancelRequest": method_of("cancel/request", _cancel_request),
    "session/cancel": METHODS["session/cancel"],
}
"""Messages of the client that have no id, and get no response."""


def serve(pool: ModelPool, *, power: Power, max_line_bytes: int, debug: bool) -> None:
    """Answer the client until the input ends, the client closes the output, or it asks to shut down.

    Args:
        pool: the models; closed at the end.
        power: how models run.
        max_line_bytes: largest line of the client.
        debug: whether to write tracebacks of unexpected errors to standard error.
    """
    binary(STDIN)
    writer = LineWriter(take_over_stdout(), lambda: connection.end())  # noqa: PLW0108  the connection is made after it
    connection = Connection(writer, RpcMethods(pool, power, max_line_bytes), METHODS, CLIENT_NOTIFICATIONS, debug=debug)
    connection.serve(read_lines(STDIN, max_line_bytes))
    pool.close()
    writer.close(_LAST_LINES_S)


def _power_state(power: Power) -> protocol.PowerState:
    """What the operating system says of the battery, and what follows from it."""
    found = battery()
    return protocol.PowerState(
        on_battery=None if found is None or found.power_plugged is None else not found.power_plugged,
        battery_percent=None if found is None else float(found.percent),
        mode=choose_power(power).value,
    )


def protocol_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of every message.

    A message of either side validates against the whole. `methods` and `notifications` name the schemas of parameters
    and results, for programs that generate code.
    """
    methods = {name: (each.kind, each.result) for name, each in METHODS.items()}
    notified = {name: each.kind for name, each in CLIENT_NOTIFICATIONS.items()}
    types: list[Any] = [
        *chain(*methods.values()),
        *notified.values(),
        *protocol.NOTIFICATIONS.values(),
        protocol.ErrorObject,
        protocol.RequestId,
    ]
    types = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    id_ = by_type[protocol.RequestId]
    requests = [_call(name, by_type[params], id_) for name, (params, _) in methods.items()]
    sent = [_call(name, by_type[kind]) for name, kind in notified.items()]
    received = [_call(name, by_type[kind]) for name, kind in protocol.NOTIFICATIONS.items()]
    results = list({str(by_type[result]): by_type[result] for _, result in methods.values()}.values())
    # The id of an error is null where the request's could not be read, or belongs to another request.
    nullable_id = {"anyOf": [*id_.get("anyOf", [id_]), {"type": "null"}]}
    responses = [
        _message({"id": id_, "result": {"anyOf": results}}),
        _message({"id": nullable_id, "error": by_type[protocol.ErrorObject]}),
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"edge-run rpc, protocol version {protocol.PROTOCOL_VERSION}",
        "description": "Every message is one line of UTF-8 JSON. See docs/rpc.md.",
        "anyOf": [{"$ref": "#/$defs/ClientMessage"}, {"$ref": "#/$defs/ServerMessage"}],
        "methods": {
            name: {"params": by_type[params], "result": by_type[result]} for name, (params, result) in methods.items()
        },
        "notifications": {
            "client": {name: by_type[kind] for name, kind in notified.items()},
            "server": {name: by_type[kind] for name, kind in protocol.NOTIFICATIONS.items()},
        },
        "$defs": {
            "ClientMessage": {"title": "Request or notification of the client", "oneOf": [*requests, *sent]},
            "ServerMessage": {"title": "Response or notification to the client", "anyOf": [*responses, *received]},
            **components,
        },
    }


def _call(method: str, params: dict[str, Any], id_: dict[str, Any] | None = None) -> dict[str, Any]:
    """The schema of a request, or of a notification if it has no id."""
    optional = method in METHODS and not METHODS[method].kind.__struct_fields__
    members = {**({} if id_ is None else {"id": id_}), "method": {"const": method}, "params": params}
    return _message(members, optional="params" if optional else "")


def _message(members: dict[str, Any], optional: str = "") -> dict[str, Any]:
    properties = {"jsonrpc": {"const": "2.0"}, **members}
    required = [name for name in properties if name != optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
