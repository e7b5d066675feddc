"""The protocol on standard input and output, and its methods about models and single answers."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, Final

import psutil
from msgspec import UNSET

from ...models.hub.downloaded_model import DownloadedModel, parse_hub_id
from ...models.hub.fetch import fetch_model
from ...runtime.decode import FinishReason
from ...runtime.devices.processor import Power, available_memory, battery, choose_power
from ...runtime.devices.providers import available_devices
from ...runtime.result import Reply
from ...runtime.scheduling.request_run import Run
from ...version import __version__
from ..service.generation_fields import GenerationRequest, check_token_ids
from ..service.model_files import ModelFiles
from ..service.model_pool import ModelPool
from ..service.openai_objects import ChatCompletionObjects, CompletionObjects, GenerationObjects
from ..service.pooled_model import ModelState
from ..service.text_bodies import DetokenizeBody, TokenizeBody
from . import protocol
from .connection import MAX_REQUESTS, Call, Connection, Handler
from .line_transport import MAX_UNREAD_BYTES, STDIN, LineWriter, binary, read_lines, take_over_stdout
from .session_methods import MAX_SESSIONS, SessionMethods

_LAST_LINES_S: Final = 5.0
"""Seconds that the client has to read the last responses when the process ends."""


class ModelMethods:
    """Answers requests about models.

    Args:
        pool: the models.
    """

    def __init__(self, pool: ModelPool) -> None:
        self._pool: Final = pool
        self._files: Final = ModelFiles(pool)

    def handlers(self) -> dict[str, Handler]:
        """The methods by name."""
        return {
            "models/list": self._list,
            "models/pull": self._pull,
            "models/load": self._load,
            "models/unload": self._unload,
            "generate": partial(self._generate, ChatCompletionObjects),
            "complete": partial(self._generate, CompletionObjects),
            "rank": self._rank,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
        }

    def _list(self, _call: Call, _params: protocol.NoParams) -> protocol.ModelList:
        loaded = {status.id for status in self._pool.status() if status.loaded}
        return protocol.ModelList(
            models=[
                protocol.ModelInfo(
                    id=entry.id,
                    loaded=entry.id in loaded,
                    owner=entry.owner,
                    created=entry.created,
                    capabilities=self._files.describe(entry)["capabilities"],
                )
                for entry in self._pool.offered.entries()
            ]
        )

    def _pull(self, call: Call, params: protocol.PullParams) -> protocol.PullResult:
        id_ = parse_hub_id(params.id)

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

    def _load(self, call: Call, params: protocol.ModelParams) -> ModelState:
        return self._pool.load(params.model, call.progress, cancellation=call.cancellation)

    def _unload(self, _call: Call, params: protocol.ModelParams) -> protocol.UnloadResult:
        return protocol.UnloadResult(unloaded=self._pool.unload(params.model))

    def _generate(self, kind: type[GenerationObjects], call: Call, request: GenerationRequest) -> Mapping[str, Any]:
        model = self._pool.offered.find(request.model).id
        objects, replies = kind(request, model), []
        with self._pool.use(model, call.progress, cancellation=call.cancellation) as engine:
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
        return objects.whole(*replies)

    def _rank(self, call: Call, params: protocol.RankParams) -> protocol.RankResult:
        with self._pool.use_any(params.model, call.progress, cancellation=call.cancellation) as model:
            texts, stopped = params.documents, lambda: call.cancellation.cancelled
            found = model.score(params.query, texts, instruction=params.instruction, cancelled=stopped)
            return protocol.RankResult(scores=found.scores.tolist())

    def _tokenize(self, call: Call, request: TokenizeBody) -> protocol.TokenizeResult:
        with self._pool.use(request.model, call.progress, cancellation=call.cancellation) as engine:
            tokens = request.encode(engine)
            shown = engine.tokenizer.token_bytes.shown
            pieces = list(map(shown, tokens)) if request.with_pieces else UNSET
            return protocol.TokenizeResult(tokens=tokens, pieces=pieces, count=len(tokens), context=engine.context)

    def _detokenize(self, call: Call, request: DetokenizeBody) -> protocol.DetokenizeResult:
        with self._pool.use(request.model, call.progress, cancellation=call.cancellation) as engine:
            check_token_ids(engine, request.tokens, "tokens")
            return protocol.DetokenizeResult(content=engine.tokenizer.decode(request.tokens))


def serve(pool: ModelPool, *, power: Power, max_line_bytes: int, debug: bool) -> None:
    """Answer the client until the input ends, the client closes the output, or it asks to shut down.

    Args:
        pool: the models; closed at the end.
        power: how models run.
        max_line_bytes: largest line of the client.
        debug: whether to write tracebacks of unexpected errors to standard error.
    """

    def initialize(_call: Call, _params: protocol.InitializeParams) -> protocol.InitializeResult:
        return protocol.InitializeResult(
            protocol_version=protocol.PROTOCOL_VERSION,
            server_info=protocol.ServerInfo(name="edge-run", version=__version__),
            capabilities=protocol.Capabilities(
                methods=list(protocol.METHODS), notifications=list(protocol.NOTIFICATIONS)
            ),
            limits=protocol.Limits(
                max_line_bytes=max_line_bytes,
                max_requests=MAX_REQUESTS,
                max_sessions=MAX_SESSIONS,
                max_unread_bytes=MAX_UNREAD_BYTES,
            ),
        )

    def status(_call: Call, _params: protocol.NoParams) -> protocol.Status:
        return protocol.Status(
            models=list(pool.status()),
            requests=protocol.Requests(running=connection.running, sessions=len(sessions)),
            memory=protocol.Memory(
                process=psutil.Process().memory_info().rss,
                available=available_memory(),
                total=psutil.virtual_memory().total,
                max_models=pool.max_bytes,
            ),
            devices=[
                protocol.DeviceInfo(name=str(device), kind=device.kind.value, vendor=device.vendor)
                for device in available_devices()
            ],
            power=_power_state(power),
        )

    binary(STDIN)
    sessions = SessionMethods(pool)
    handlers = {**ModelMethods(pool).handlers(), **sessions.handlers()}
    writer = LineWriter(take_over_stdout(), lambda: connection.end())  # noqa: PLW0108  the connection is made after it
    handlers |= {"initialize": initialize, "status": status, "shutdown": lambda _call, _params: protocol.Done()}
    connection = Connection(writer, handlers, debug=debug)
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
