"""Methods about models and single answers: list, pull, load, generate, tokenize, status."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, Final

import psutil
from msgspec import UNSET

from ...models.graph_variant import DeviceKind
from ...models.hub.downloaded_model import DownloadedModel, parse_hub_id
from ...models.hub.fetch import fetch_model
from ...runtime.devices.power import Power, choose_power
from ...runtime.devices.providers import available_devices
from ...runtime.result import Reply
from ..service.body_decoder import decode_body
from ..service.cancellation import Cancellation, CancelledError
from ..service.chat_body import ChatRequest
from ..service.model_pool import ModelPool
from ..service.openai_objects import ChatCompletionObjects, new_id
from ..service.request_error import ErrorCode, RequestError
from ..service.strict_json import RequestLimits
from ..service.token_bodies import DetokenizeRequest, TokenizeRequest
from .connection import Call, Handler
from .protocol import (
    DetokenizeResult,
    DeviceInfo,
    GenerateUpdate,
    Memory,
    ModelInfo,
    ModelList,
    ModelParams,
    ModelState,
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
        self._limits: Final = RequestLimits()

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

    def _list(self, _call: Call, params: bytes) -> ModelList:
        decode_body(params, NoParams)
        loaded = {status.id for status in self._pool.status() if status.loaded}
        return ModelList(
            models=[
                ModelInfo(id=entry.id, loaded=entry.id in loaded, owner=entry.owner, created=entry.created)
                for entry in self._pool.names()
            ]
        )

    def _pull(self, call: Call, params: bytes) -> PullResult:
        id_ = parse_hub_id(decode_body(params, PullParams).id)

        def progress(stage: str, done: int, total: int) -> None:
            call.cancellation.check()
            call.progress_bytes(stage, done, total)

        download = _Download(lambda: fetch_model(id_, self._kind, newest=True, progress=progress))
        found = download.wait(call.cancellation)
        offered = any(found.id in (entry.id, *entry.aliases) for entry in self._pool.names())
        return PullResult(id=found.id, commit=found.commit, path=str(found.folder), bytes=found.bytes, offered=offered)

    def _load(self, call: Call, params: bytes) -> ModelState:
        name = decode_body(params, ModelParams).model
        status = self._pool.load(name, call.progress, cancellation=call.cancellation)
        return ModelState(**vars(status))

    def _unload(self, _call: Call, params: bytes) -> UnloadResult:
        return UnloadResult(unloaded=self._pool.unload(decode_body(params, ModelParams).model))

    def _generate(self, call: Call, params: bytes) -> Mapping[str, Any]:
        request = ChatRequest.parse(params, self._limits)
        model = self._pool.find(request.model).id
        objects = ChatCompletionObjects(request, model, int(time.time()), new_id("chatcmpl-"))
        with self._pool.use(model, call.progress, cancellation=call.cancellation) as engine:
            request.check_context(engine.context)
            chunks = []
            stream = engine.stream(request.messages, request.options)
            with closing(stream), call.cancellation.calling(stream.cancel):
                for chunk in stream:
                    chunks.append(chunk)
                    for object_ in objects.chunk(chunk) if request.stream else ():
                        call.notify("generate/update", GenerateUpdate(request_id=call.id, chunk=object_))
            call.cancellation.check()
        return objects.whole(Reply.of(chunks))

    def _tokenize(self, call: Call, params: bytes) -> TokenizeResult:
        request = TokenizeRequest.parse(params, self._limits)
        with self._pool.use(request.model, call.progress, cancellation=call.cancellation) as engine:
            if request.messages is not None:
                tokens = engine.model.encode_request(request.messages, request.options)
            else:
                tokens = engine.tokenizer.encode(request.text or "", add_special_tokens=request.add_special)
            return TokenizeResult(
                tokens=tokens,
                pieces=[engine.tokenizer.token_bytes.shown(token) for token in tokens]
                if request.with_pieces
                else UNSET,
                count=len(tokens),
                context=engine.context,
            )

    def _detokenize(self, call: Call, params: bytes) -> DetokenizeResult:
        request = DetokenizeRequest.parse(params, self._limits)
        with self._pool.use(request.model, call.progress, cancellation=call.cancellation) as engine:
            vocab_size = engine.graph_io.vocab_size
            if (largest := max(request.tokens, default=0)) >= vocab_size:
                place = f"tokens[{request.tokens.index(largest)}]"
                hint = f"the model has {vocab_size} tokens"
                raise RequestError(f"{place} is {largest}", hint, code=ErrorCode.INVALID_VALUE, param=place)
            return DetokenizeResult(content=engine.tokenizer.decode(list(request.tokens)))

    def _status(self, _call: Call, params: bytes) -> Status:
        decode_body(params, NoParams)
        memory = psutil.virtual_memory()
        return Status(
            models=[ModelState(**vars(status)) for status in self._pool.status()],
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


class _Download:
    """A download in a thread of its own, so that who waits for it can be cancelled while the network is silent."""

    def __init__(self, fetch: Callable[[], DownloadedModel]) -> None:
        self._fetch = fetch
        self._changed = threading.Event()
        self._result: DownloadedModel | Exception | None = None

    def wait(self, cancellation: Cancellation) -> DownloadedModel:
        """Download.

        Raises:
            CancelledError: the request was cancelled; the download ends with its next bytes.
            EdgeError: the download failed.
        """
        threading.Thread(target=self._run, name="edge-run download", daemon=True).start()
        with cancellation.calling(self._changed.set):
            self._changed.wait()
        cancellation.check()
        if isinstance(self._result, Exception):
            raise self._result
        if self._result is None:
            raise CancelledError("the download ended")
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._fetch()
        except Exception as error:  # noqa: BLE001  who waits raises it
            self._result = error
        self._changed.set()


def _power_state(power: Power) -> PowerState:
    """What the operating system says of the battery, and what follows from it."""
    sensor = getattr(psutil, "sensors_battery", None)  # some systems have none
    try:
        battery = None if sensor is None else sensor()
    except (OSError, RuntimeError, ValueError):  # a sandbox
        battery = None
    plugged = None if battery is None else battery.power_plugged
    return PowerState(
        on_battery=None if plugged is None else not plugged,
        battery_percent=None if battery is None else float(battery.percent),
        mode=choose_power(power).value,
    )
