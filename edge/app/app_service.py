"""What runs behind the page: its context, the OpenAI-compatible server, and their end."""

from __future__ import annotations

from typing import Final

from ..server.answer_service import AnswerService
from .app_access import AppAccess
from .app_context import AppContext


class AppService:
    """The state of one running app.

    Args:
        context: the models and the events; the models are closed with the service.
        access: who is let in.
    """

    def __init__(self, context: AppContext, access: AppAccess) -> None:
        self.context: Final = context
        self.access: Final = access
        self.requests: Final = AnswerService(context.pool, context.settings)
        """Requests of other programs to the OpenAI-compatible API."""

    @property
    def busy(self) -> bool:
        """Whether an answer is in progress."""
        return self.requests.busy

    def drain(self) -> None:
        """Begin no further answers, and let the windows go."""
        self.requests.drain()
        self.context.events.close()

    def cancel_all(self) -> None:
        """End all answers after their current pass."""
        self.requests.cancel_all()

    def close(self) -> None:
        """End all answers, and unload all models."""
        self.drain()
        self.requests.close()
