"""What runs behind the page: answers, models, the OpenAI-compatible server, and what tells the windows of changes."""

from __future__ import annotations

import logging
import threading
from typing import Final

from ...errors import EdgeError
from ..conversations.records import Change, ChangeKind, MessageState, as_object
from ..server.endpoint import RequestService
from .app_access import AppAccess
from .app_context import AppContext
from .generations import Generations
from .models.model_endpoints import ModelServices

_log: Final = logging.getLogger(__name__)
_POLL_S: Final = 1.0
"""Seconds between two looks for what other processes have written."""


class ChangeEvents:
    """Publishes changes of the store while windows listen.

    Args:
        context: the store and the windows.
        generations: messages in progress, whose text is newer than the store's.
    """

    def __init__(self, context: AppContext, generations: Generations) -> None:
        self._context: Final = context
        self._generations: Final = generations
        self._ending: Final = threading.Event()
        self._end_listening: Final = context.store.listen(self._publish)
        self._thread: Final = threading.Thread(target=self._watch, name="edge-run changes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the publishing."""
        self._end_listening()
        self._ending.set()
        self._thread.join()

    def _publish(self, change: Change) -> None:
        """Publish a change of this process, in the thread that made it."""
        if not self._context.events.listening:
            return
        try:
            self._publish_change(change)
        except EdgeError as error:
            # What is gone already is published by the change that removed it.
            _log.info("a change was not published: %s", error)

    def _publish_change(self, change: Change) -> None:
        store, events = self._context.store, self._context.events
        match change.kind:
            case ChangeKind.CONVERSATION if change.conversation_id is not None:
                events.publish("conversation", conversation=as_object(store.conversation(change.conversation_id)))
            case ChangeKind.CONVERSATION_DELETED:
                events.publish("conversation_deleted", id=change.conversation_id)
            case ChangeKind.MESSAGE if change.message_id is not None:
                message = store.message(change.message_id)
                live = self._generations.live(message.id)
                if live is None or message.state is not MessageState.WRITING:
                    events.publish("message", message=as_object(message))
                else:
                    with live.snapshot(message) as (shown, _):
                        events.publish("message", message=shown)
            case ChangeKind.MESSAGE_DELETED:
                events.publish("message_deleted", id=change.message_id, conversation=change.conversation_id)
            case _:
                events.publish("settings")

    def _watch(self) -> None:
        """Look for what other processes have written, in a thread of its own."""
        while not self._ending.wait(_POLL_S):
            try:
                if self._context.events.listening and self._context.store.changed_elsewhere():
                    self._context.events.publish("reload")
            except EdgeError as error:
                _log.info("the store cannot be watched: %s", error)


class AppService:
    """The state of one running app.

    Args:
        context: the conversations, the models and the windows; the models are closed with the service.
        access: who is let in.
    """

    def __init__(self, context: AppContext, access: AppAccess) -> None:
        self.context: Final = context
        self.access: Final = access
        self.generations: Final = Generations(context)
        """Messages of conversations that are generated."""
        self.models: Final = ModelServices(context)
        """Downloads, exports, comparisons and exactness checks."""
        self._changes: Final = ChangeEvents(context, self.generations)
        self.requests: Final = RequestService(context.pool, context.settings)
        """Requests of other programs to the OpenAI-compatible API."""

    @property
    def busy(self) -> bool:
        """Whether an answer is in progress."""
        return self.requests.busy or self.generations.busy

    def drain(self) -> None:
        """Begin no further answers, and end those in progress after their current pass, as interrupted."""
        self.requests.drain()
        self.requests.cancel_all()
        self.generations.interrupt_all()

    def cancel_all(self) -> None:
        """Let the windows go, which have been told how their answers ended."""
        self.context.events.close()

    def close(self) -> None:
        """End all answers, and unload all models."""
        self.drain()
        self.generations.close()
        self.context.events.close()
        self._changes.close()
        self.models.close()
        self.context.tools.close()
        self.requests.close()
