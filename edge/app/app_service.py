"""What runs behind the page: its context, the OpenAI-compatible server, and their end."""

from __future__ import annotations

from typing import Final

from ..server.answer_service import AnswerService
from .app_access import AppAccess
from .app_context import AppContext
from .background_answers import BackgroundAnswers
from .change_events import ChangeEvents
from .models.model_services import ModelServices


class AppService:
    """The state of one running app.

    Args:
        context: the conversations, the models and the windows; the models are closed with the service.
        access: who is let in.
    """

    def __init__(self, context: AppContext, access: AppAccess) -> None:
        self.context: Final = context
        self.access: Final = access
        self.answers: Final = BackgroundAnswers(context)
        """Answers in conversations."""
        self.models: Final = ModelServices(context)
        """Downloads, exports, comparisons and exactness checks."""
        self._changes: Final = ChangeEvents(context, self.answers)
        self.requests: Final = AnswerService(context.pool, context.settings)
        """Requests of other programs to the OpenAI-compatible API."""

    @property
    def busy(self) -> bool:
        """Whether an answer is in progress."""
        return self.requests.busy or self.answers.busy

    def drain(self) -> None:
        """Begin no further answers, and end those in progress after their current pass, as interrupted."""
        self.requests.drain()
        self.requests.cancel_all()
        self.answers.interrupt_all()

    def cancel_all(self) -> None:
        """Let the windows go, which have been told how their answers ended."""
        self.context.events.close()

    def close(self) -> None:
        """End all answers, and unload all models."""
        self.drain()
        self.answers.close()
        self.context.events.close()
        self._changes.close()
        self.models.close()
        self.context.tools.close()
        self.requests.close()
