"""Methods about sessions: conversations with a KV cache of their own, which can be saved."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta

from ...models.find import path_of_user
from ...runtime.conversation import Session
from ...runtime.engine import Engine
from ...runtime.result import Reply
from ...runtime.scheduling.request_run import Cancellation
from ...runtime.text.messages import json_messages
from ..service.generation_fields import generate_options
from ..service.model_pool import ModelPool
from ..service.request_error import ErrorCode, RequestError
from . import protocol
from .connection import Call

MAX_SESSIONS: Final = 32


class SessionMethods:
    """Answers requests about sessions.

    An open session keeps its model in memory.

    Args:
        pool: the models.
    """

    def __init__(self, pool: ModelPool) -> None:
        self._pool: Final = pool
        self._lock: Final = threading.Lock()
        self._sessions: Final[dict[str, _OpenSession | None]] = {}
        """The sessions by id; None for one that is being opened."""
        self._numbers: Final = count(1)

    def session_new(
        self,
        call: Call,
        model: protocol.ModelName = None,
        system: Annotated[str | None, Meta(description="The system message.")] = None,
    ) -> protocol.SessionInfo:
        """A new conversation."""
        return self._open(call, model, lambda engine: engine.session(system=system))

    def session_restore(self, call: Call, path: str, model: protocol.ModelName = None) -> protocol.SessionInfo:
        """A conversation that session/save wrote."""
        file = _file(path)
        return self._open(call, model, lambda engine: engine.session(resume=file))

    def _open(self, call: Call, name: str | None, begin: Callable[[Engine], Session]) -> protocol.SessionInfo:
        model = self._pool.offered.find(name).id
        with self._lock:
            if len(self._sessions) >= MAX_SESSIONS:
                raise RequestError(
                    f"{MAX_SESSIONS} sessions are open, which is the limit", "close one", code=ErrorCode.BUSY
                )
            id_ = f"session-{next(self._numbers)}"
            self._sessions[id_] = None
        try:
            with ExitStack() as opening:
                use = self._pool.use(model, call.progress, cancellation=call.cancellation, kept=True)
                engine = opening.enter_context(use)
                session = opening.enter_context(begin(engine))
                call.cancellation.check()
                self._sessions[id_] = _OpenSession(model, session, opening.pop_all())
        except BaseException:
            del self._sessions[id_]
            raise
        messages = msgspec.convert(json_messages(session.messages), list[protocol.SessionMessage])
        return protocol.SessionInfo(session_id=id_, model=model, context=engine.context, messages=messages)

    def session_prompt(self, call: Call, body: protocol.SessionPromptParams) -> protocol.PromptResult:
        """What the user says in a conversation."""
        options = generate_options(body, {"max_tokens": body.max_tokens})
        with (
            self._use(body.session_id) as (session, stop),
            self._pool.use(session.model, call.progress, cancellation=call.cancellation),
        ):
            chunks = []
            stream = session.session.stream(msgspec.to_builtins(body.prompt), options)
            with call.cancellation.reading(stream), stop.calling(stream.cancel):
                for chunk in stream:
                    chunks.append(chunk)
                    if chunk.text or chunk.reasoning:
                        update = protocol.SessionUpdate(
                            session_id=body.session_id,
                            request_id=call.id,
                            text=chunk.text,
                            reasoning=chunk.reasoning or UNSET,
                        )
                        call.notify("session/update", update)
            call.cancellation.check()
        reply = Reply.of(chunks)
        stats = reply.stats
        return protocol.PromptResult(
            text=reply.text,
            finish_reason=reply.finish_reason.value,
            usage=protocol.Usage(
                prompt_tokens=stats.prompt_tokens,
                completion_tokens=stats.completion_tokens,
                total_tokens=stats.prompt_tokens + stats.completion_tokens,
                cached_tokens=stats.reused_tokens,
            ),
            timing=protocol.Timing(
                first_token_s=stats.first_token_s,
                total_s=stats.total_s,
                tokens_per_second=stats.decode_tokens_per_second,
            ),
            reasoning=reply.reasoning or UNSET,
        )

    def session_cancel(self, _call: Call, session_id: protocol.SessionId) -> protocol.CancelResult:
        """An open conversation."""
        return protocol.CancelResult(cancelled=self._find(session_id).cancel())

    def session_save(self, _call: Call, session_id: protocol.SessionId, path: str) -> protocol.SaveResult:
        """Where to write a conversation; an older file of that name is replaced."""
        file = _file(path)
        if not file.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder does not exist", str(file.parent))
        with self._use(session_id) as (session, _):
            session.session.save(file)
            return protocol.SaveResult(path=str(file.absolute()), bytes=file.stat().st_size)

    def session_close(self, _call: Call, session_id: protocol.SessionId) -> protocol.Done:
        """An open conversation."""
        session = self._find(session_id)
        self._sessions.pop(session_id, None)
        session.cancel()
        with session.in_use:
            session.opened.close()
        return protocol.Done()

    @contextmanager
    def _use(self, id_: str) -> Iterator[tuple[_OpenSession, Cancellation]]:
        """Use a session, and keep other requests out; closing the session, or `cancel`, cancels the `Cancellation`.

        Raises:
            RequestError: there is no such session, or another request uses it.
        """
        session = self._find(id_)
        if not session.in_use.acquire(blocking=False):
            what, hint = "the session is in use by another request", "wait for its response, or cancel it"
            raise RequestError(what, hint, code=ErrorCode.BUSY)
        try:
            stop = session.stop = Cancellation()
            self._find(id_)  # what closes it removes it, and then cancels the use that has begun
            yield session, stop
        finally:
            session.stop = None
            session.in_use.release()

    def _find(self, id_: str) -> _OpenSession:
        session = self._sessions.get(id_)
        if session is None:
            what, hint = f"there is no session {id_!r:.100}", "open one with session/new or session/restore"
            raise RequestError(what, hint, code=protocol.ProtocolCode.SESSION_NOT_FOUND, param="session_id")
        return session


class _OpenSession:
    """A session, of which one request makes use at a time."""

    def __init__(self, model: str, session: Session, opened: ExitStack) -> None:
        self.model: Final = model
        self.session: Final = session
        self.opened: Final = opened
        """Ends the session, and the use of its model."""
        self.in_use: Final = threading.Lock()
        self.stop: Cancellation | None = None
        """Cancels the request that uses the session."""

    def cancel(self) -> bool:
        """Cancel the answer of the session; returns whether there was one."""
        stop = self.stop
        if stop is not None:
            stop.cancel()
        return stop is not None


def _file(path: str) -> Path:
    return path_of_user(path, "give the path of a file")
