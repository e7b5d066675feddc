"""Methods about models and single answers: list, pull, load, generate, tokenize, status."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Final

import psutil
from msgspec import UNSET

from ...errors import CancelledError
from ...models.graph_variant import DeviceKind
from ...models.hub.downloaded_model import DownloadedModel, parse_hub_id
from ...models.hub.fetch import fetch_model
from ...runtime.devices.processor import Power, choose_power
from ...runtime.devices.providers import available_devices
from ...runtime.result import Reply
from ...runtime.scheduling.request_run import Cancellation, Run
from ..service.generation_fields import GenerationRequest, check_token_ids
from ..service.model_pool import ModelPool, ModelState
from ..service.openai_objects import ChatCompletionObjects, new_id
from ..service.text_bodies import DetokenizeBody, TokenizeRequest
from .connection import Call, Handler
from .protocol import (
    DetokenizeResult,
    DeviceInfo,
    GenerateUpdate,
    Memory,
    ModelInfo,
    ModelList,
    ModelParams,
    NoParams,
    PowerState,
    PullParams,
    PullResult,
    Requests,
    Status,
    TokenizeResult,
    UnloadResult,
)


class ModelMethods:
    """Answers requests about models.

    Args:
        pool: the models.
        kind: kind of device that they run on.
        power: how they run.
        requests: says how many requests are in progress, and how many sessions are open.
    """

    def __init__(self, pool: ModelPool, kind: DeviceKind, power: Power, requests: Callable[[], Requests]) -> None:
        self._pool: Final = pool
        self._kind: Final = kind
        self._power: Final = power
        self._requests: Final = requests

    def handlers(self) -> dict[str, Handler]:
        """The methods by name."""
        return {
            "models/list": self._list,
            "models/pull": self._pull,
            "models/load": self._load,
            "models/unload": self._unload,
            "generate": self._generate,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "status": self._status,
        }

    def _list(self, _call: Call, _params: NoParams) -> ModelList:
        loaded = {status.id for status in self._pool.status() if status.loaded}
        return ModelList(
            models=[
                ModelInfo(id=entry.id, loaded=entry.id in loaded, owner=entry.owner, created=entry.created)
                for entry in self._pool.offered.entries()
            ]
        )

    def _pull(self, call: Call, params: PullParams) -> PullResult:
        id_ = parse_hub_id(params.id)

        def progress(stage: str, done: int, total: int) -> None:
            call.cancellation.check()
            call.progress(stage, done / total if total else 0.0, done_bytes=done, total_bytes=total)

        found = _downloaded(lambda: fetch_model(id_, self._kind, newest=True, progress=progress), call.cancellation)
        offered = any(found.id in (entry.id, *entry.aliases) for entry in self._pool.offered.entries())
        return PullResult(id=found.id, commit=found.commit, path=str(found.folder), bytes=found.bytes, offered=offered)

    def _load(self, call: Call, params: ModelParams) -> ModelState:
        return self._pool.load(params.model, call.progress, cancellation=call.cancellation)

    def _unload(self, _call: Call, params: ModelParams) -> UnloadResult:
        return UnloadResult(unloaded=self._pool.unload(params.model))

    def _generate(self, call: Call, request: GenerationRequest) -> Mapping[str, Any]:
        model = self._pool.offered.find(request.model).id
        objects = ChatCompletionObjects(request, model, int(time.time()), new_id("chatcmpl-"))
        with self._pool.use(model, call.progress, cancellation=call.cancellation) as engine:
            request.check(engine)
            chunks = []
            with call.cancellation.reading(request.begin(engine)) as stream:
                for chunk in stream:
                    chunks.append(chunk)
                    for object_ in objects.chunk(chunk) if request.stream else ():
                        call.notify("generate/update", GenerateUpdate(request_id=call.id, chunk=object_))
            call.cancellation.check()
        return objects.whole(Reply.of(chunks))

    def _tokenize(self, call: Call, request: TokenizeRequest) -> TokenizeResult:
        with self._pool.use(request.model, call.progress, cancellation=call.cancellation) as engine:
            tokens = request.encode(engine)
            shown = engine.tokenizer.token_bytes.shown
            pieces = list(map(shown, tokens)) if request.with_pieces else UNSET
            return TokenizeResult(tokens=tokens, pieces=pieces, count=len(tokens), context=engine.context)

    def _detokenize(self, call: Call, request: DetokenizeBody) -> DetokenizeResult:
        with self._pool.use(request.model, call.progress, cancellation=call.cancellation) as engine:
            check_token_ids(engine, request.tokens, "tokens")
            return DetokenizeResult(content=engine.tokenizer.decode(request.tokens))

    def _status(self, _call: Call, _params: NoParams) -> Status:
        memory = psutil.virtual_memory()
        return Status(
            models=list(self._pool.status()),
            requests=self._requests(),
            memory=Memory(
                process=psutil.Process().memory_info().rss,
                available=memory.available,
                total=memory.total,
                max_models=self._pool.max_bytes,
            ),
            devices=[
                DeviceInfo(name=str(device), kind=device.kind.value, vendor=device.vendor)
                for device in available_devices()
            ],
            power=_power_state(self._power),
        )


def _downloaded(fetch: Callable[[], DownloadedModel], cancellation: Cancellation) -> DownloadedModel:
    """Download in a thread of its own, so that who waits for it can be cancelled while the network is silent.

    Raises:
        CancelledError: the request was cancelled; the download ends with its next bytes.
        EdgeError: the download failed.
    """
    changed: Future[DownloadedModel] = Future()

    def fail(error: Exception) -> None:
        with suppress(InvalidStateError):
            changed.set_exception(error)

    def download(_run: Run[None]) -> None:
        try:
            found = fetch()
            with suppress(InvalidStateError):
                changed.set_result(found)
        except Exception as error:  # noqa: BLE001  who waits raises it
            fail(error)

    Run(download, "edge-run download").start()
    with cancellation.calling(lambda: fail(CancelledError("the request was cancelled"))):
        return changed.result()


def _power_state(power: Power) -> PowerState:
    """What the operating system says of the battery, and what follows from it."""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError, ValueError):  # a system without sensors, a sandbox
        battery = None
    return PowerState(
        on_battery=None if battery is None or battery.power_plugged is None else not battery.power_plugged,
        battery_percent=None if battery is None else float(battery.percent),
        mode=choose_power(power).value,
    )
