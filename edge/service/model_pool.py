"""Models in memory: loaded on demand, unloaded when unused or when memory is needed.

A model is loaded in a thread of its own, so that whoever waits for it can be cancelled, and by one such thread however
many requests ask for it. What nobody waits for any more is not loaded to its end, or is unloaded right after.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, TypeAlias

from ...errors import CancelledError
from ...models.manifest import DeviceKind
from ...models.progress import Progress, silent
from ...models.user_text import format_bytes
from ...runtime.encoders.encoder import AnyModel
from ...runtime.engine import Engine
from ...runtime.scheduling.request_run import Cancellation
from .offered_models import ModelEntry, OfferedModels
from .pooled_model import ModelState, PooledModel
from .request_error import ErrorCode, RequestError, invalid

OpenModel: TypeAlias = Callable[[str, Progress], AnyModel]
"""Loads the model at a path; the engine reports what its answers wait for to the given `Progress`."""

_LOADING: Final = "loading the model"


def _waited_s(seconds: float | None) -> float | None:
    """Seconds as threads can wait for them; None for never, and for so many that no thread can wait for them."""
    return None if seconds is None or seconds >= threading.TIMEOUT_MAX else seconds


class ModelPool(AbstractContextManager["ModelPool"]):
    """Loads models when they are first used, and unloads models that are not in use.

    Args:
        models: paths and hub ids of the models that are offered; empty for the bundled model and those on disk.
        open_model: loads a model.
        idle_s: seconds after which a model that is not in use is unloaded; None for never.
        max_bytes: maximum size of all models in memory by their files; models that are not in use are unloaded for
            others, the least recently used first. None for no limit.
        kind: kind of device that the models run on.

    Raises:
        BundleError: a path does not exist, or holds no model.
    """

    def __init__(
        self,
        models: Sequence[str],
        open_model: OpenModel,
        *,
        idle_s: float | None = None,
        max_bytes: int | None = None,
        kind: DeviceKind = DeviceKind.CPU,
    ) -> None:
        self.max_bytes: Final = max_bytes
        self.kind: Final = kind
        self.offered: Final = OfferedModels(models, kind)
        self._open_model: Final = open_model
        self._idle_s: Final = _waited_s(idle_s)
        self._changed: Final = threading.Condition()
        """Guards all that follows, and is notified of every change."""
        self._models: Final[dict[str, PooledModel]] = {}
        self._threads: Final[set[threading.Thread]] = set()
        self._timer: threading.Thread | None = None
        self._closed = False

    def find(self, name: str | None) -> ModelEntry:
        """Return the model of a name: one that is offered, or in memory while its files are gone.

        Raises:
            RequestError: there is no such model, or several have the name.
        """
        try:
            return self.offered.find(name)
        except RequestError:
            with self._changed:
                model = self._models.get((name or "").removesuffix(":latest"))
                if model is None or model.engine is None:
                    raise
                return model.entry

    @contextmanager
    def use(self, name: str | None, progress: Progress = silent, **how: Any) -> Iterator[Engine]:
        """Use a language model; arguments and errors as for `use_any`.

        Raises:
            RequestError: the model is an encoder.
        """
        with self.use_any(name, progress, **how) as model:
            if not isinstance(model, Engine):
                what = f"{self.offered.find(name).id} is an encoder, which makes vectors or scores of texts and no text"
                raise invalid("model", what, "choose a language model")
            yield model

    @contextmanager
    def use_any(
        self,
        name: str | None,
        progress: Progress = silent,
        *,
        cancellation: Cancellation | None = None,
        kept: bool = False,
        keep_s: float | None = None,
    ) -> Iterator[AnyModel]:
        """Load a model if necessary, and keep it in memory for the length of the `with` block.

        Args:
            name: what the request names; None for the first model.
            progress: receives the progress of loading, and unless the use is `kept`, of what answers wait for that
                this thread reads.
            cancellation: ends the waiting.
            kept: whether the use has no end of its own, like an open session. A model that has no room beside such
                ones is refused instead of waiting for them.
            keep_s: seconds for which the model stays in memory afterwards; None for what was said since it was loaded.

        Raises:
            RequestError: there is no such model, it does not fit the memory budget, or the pool is closed.
            CancelledError: the request was cancelled while it waited.
            EdgeError: the model cannot be loaded.
        """
        entry = self.find(name)
        token = cancellation or Cancellation()
        reader = threading.get_ident()
        with token.calling(self._notify), self._changed:
            model = self._models.setdefault(entry.id, PooledModel(entry, idle_s=self._idle_s))
            model.waiting += 1
            model.listeners[reader] = progress
            try:
                engine = self._loaded(model, token)
                model.users += 1
                model.kept += kept
            finally:
                model.waiting -= 1
                model.listeners.pop(reader, None)
                self._touch(model)
            if not kept:  # else the thread will not stay with it
                model.listeners[reader] = progress
        try:
            yield engine
        finally:
            with self._changed:
                if not kept:
                    model.listeners.pop(reader, None)
                model.users -= 1
                model.kept -= kept
                self._touch(model, keep_s)

    def keep(self, name: str | None, keep_s: float) -> None:
        """Say how long a model in memory stays there if it is not used again; others are not loaded for it.

        Raises:
            RequestError: there is no such model.
        """
        with self._changed:
            model = self._models.get(self.find(name).id)
            if model is not None and (model.engine is not None or model.waiting):
                self._touch(model, keep_s)

    def load(
        self, name: str | None, progress: Progress = silent, *, cancellation: Cancellation | None = None
    ) -> ModelState:
        """Load a model, and return its status; arguments and errors as for `use_any`."""
        entry = self.find(name)
        with self.use_any(entry.id, progress, cancellation=cancellation), self._changed:
            return self._models[entry.id].status()

    def unload(self, name: str | None) -> bool:
        """Unload a model; returns whether it was in memory.

        Raises:
            RequestError: there is no such model, or it is in use.
        """
        entry = self.find(name)
        with self._changed:
            model = self._models.get(entry.id)
            if model is None or (model.engine is None and not model.waiting):
                return False
            if not model.idle:
                users = model.users + model.waiting
                by = "a request or session" if users == 1 else f"{users} requests or sessions"
                what = f"{entry.id} is in use by {by}"
                raise RequestError(what, "cancel or close them first", code=ErrorCode.BUSY, param="model")
            self._unload(model)
        return True

    def sizes_of(self, name: str) -> tuple[int, int] | None:
        """The context in tokens of a model in memory, and the bytes of its KV cache for each; None if it is not."""
        with self._changed:
            model = self._models.get(name)
            engine = None if model is None else model.engine
            return (engine.context, engine.graph_io.cache_bytes_per_token) if isinstance(engine, Engine) else None

    def status(self) -> tuple[ModelState, ...]:
        """The models that are in memory or being loaded, the least recently used first."""
        with self._changed:
            models = sorted(self._models.values(), key=lambda model: model.idle_since)
            return tuple(model.status() for model in models if model.engine is not None or model.attempt is not None)

    def close(self) -> None:
        """End all answers and unload all models; calling it again does nothing. Waits for a load in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            engines = [model.engine for model in self._models.values() if model.engine is not None]
            threads = list(self._threads)
        for engine in engines:
            engine.close()
        for thread in threads:
            thread.join()
        with self._changed:
            self._changed.wait_for(lambda: not any(model.closing for model in self._models.values()))
            for model in self._models.values():
                model.engine, model.bytes = None, 0

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _loaded(self, model: PooledModel, token: Cancellation) -> AnyModel:
        """Wait for the engine of a model, which a thread loads if none does; the lock is held."""
        attempt: Future[None] | None = None
        while True:
            token.check()
            if self._closed:
                raise RequestError("the models are unloaded, because the program is ending", code=ErrorCode.BUSY)
            if model.engine is not None:
                return model.engine
            if attempt is not None and attempt.done():
                with suppress(CancelledError):
                    attempt.result()
            if model.attempt is None and not model.closing:
                model.attempt = Future()
                self._start(self._load, model, model.attempt)
            attempt = model.attempt or attempt
            self._changed.wait()

    def _load(self, model: PooledModel, attempt: Future[None]) -> None:
        """Load a model, in a thread of its own."""
        started = time.monotonic()
        engine: AnyModel | None = None
        failure: Exception | None = None

        def progress(stage: str, fraction: float) -> None:
            with self._changed:
                if model.attempt is attempt:
                    self._check_wanted(model)
                    listeners = list(model.listeners.values())
                else:  # an answer waits, in the thread that reads it
                    listeners = [model.listeners.get(threading.get_ident(), silent)]
            for listener in listeners:
                listener(stage, fraction)

        try:
            progress(_LOADING, 0.0)
            path = self.offered.resolve(model.entry)
            self._make_room(model, self.offered.file_bytes(path))
            engine = self._open_model(str(path), progress)
            progress(_LOADING, 1.0)
        except Exception as error:  # noqa: BLE001  those who wait for the model raise it
            failure = error
        with self._changed:
            if engine is not None and (self._closed or not model.waiting):
                failure = CancelledError("nobody waits for the model any more")
            model.attempt = None
            self._threads.discard(threading.current_thread())
            self._changed.notify_all()
            if failure is None:
                model.engine, model.load_s = engine, time.monotonic() - started
            else:
                attempt.set_exception(failure)
                self._close_engine(model, engine)

    def _make_room(self, model: PooledModel, needed: int) -> None:
        """Wait until a model fits the budget, and unload models that are not in use for it.

        Raises:
            RequestError: it does not fit, or not beside models of which no end of their use is in sight.
            CancelledError: nobody waits for the model any more.
        """
        with self._changed:
            while True:
                self._check_wanted(model)
                others = [other for other in self._models.values() if other is not model]
                if self._fits(needed, others):
                    model.bytes = needed
                    return
                if not self._fits(needed, kept := [other for other in others if other.kept]):
                    raise self._no_room(model, needed, kept)
                if self._fits(needed, [other for other in others if not other.idle]):
                    self._unload(min((other for other in others if other.idle), key=lambda other: other.idle_since))
                else:
                    self._changed.wait()

    def _fits(self, needed: int, others: Sequence[PooledModel]) -> bool:
        return self.max_bytes is None or needed + sum(other.bytes for other in others) <= self.max_bytes

    def _no_room(self, model: PooledModel, needed: int, kept: Sequence[PooledModel]) -> RequestError:
        limit = format_bytes(self.max_bytes or 0)
        what = f"{model.entry.id} takes {format_bytes(needed)} of memory, and models may take {limit}"
        if not self._fits(needed, []):
            hint = "choose a smaller model, or raise the limit"
            return RequestError(what, hint, code=ErrorCode.MODEL, param="model")
        held = ", ".join(f"{other.entry.id} ({format_bytes(other.bytes)})" for other in kept)
        what += f", of which open sessions hold {held}"
        return RequestError(what, "close sessions", code=ErrorCode.BUSY, param="model")

    def _check_wanted(self, model: PooledModel) -> None:
        """Raise if nobody waits for a model that is being loaded, so that loading ends; the lock is held."""
        if self._closed or not model.waiting:
            raise CancelledError("nobody waits for the model any more")

    def _unload(self, model: PooledModel) -> None:
        """Unload a model that is not in use; the lock is held, except while the engine closes."""
        engine, model.engine, model.idle_s = model.engine, None, self._idle_s
        self._close_engine(model, engine)

    def _close_engine(self, model: PooledModel, engine: AnyModel | None) -> None:
        """Close an engine of a model, which takes no room afterwards; the lock is held, except meanwhile.

        Closing waits for what the engine does in the background, for which other models must not wait.
        """
        model.closing = True
        self._changed.release()
        try:
            if engine is not None:
                engine.close()
        finally:
            self._changed.acquire()
            model.closing, model.bytes = False, 0
            self._changed.notify_all()

    def _unload_unused(self) -> None:
        """Unload models that are not in use any longer, in a thread of its own."""
        with self._changed:
            while not self._closed:
                idle = [model for model in self._models.values() if model.idle and model.idle_s is not None]
                first = min(idle, key=PooledModel.left_s, default=None)
                left_s = None if first is None else first.left_s()
                if first is not None and left_s is not None and left_s <= 0:
                    self._unload(first)
                else:
                    self._changed.wait(left_s)

    def _touch(self, model: PooledModel, keep_s: float | None = None) -> None:
        """Note that the use of a model begins or ends now, and how long it then stays; the lock is held."""
        if keep_s is not None:
            model.idle_s = _waited_s(keep_s)
        model.last_used, model.idle_since = time.time(), time.monotonic()
        if model.idle_s is not None and self._timer is None:
            self._timer = self._start(self._unload_unused)
        self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _start(self, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, name="edge-run models", daemon=True)
        self._threads.add(thread)
        thread.start()
        return thread
