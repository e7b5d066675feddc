"""The messages that a prompt was made of, from which other prompts of the conversation are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..kv.prefix_cache import shared_tokens
from .chat_template import Message

_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, eq=False)
class ChatPrompt:
    """A conversation, and how it becomes a prompt."""

    messages: Sequence[Message]
    encode: Callable[[Sequence[Message]], list[int]]
    """Gives the token ids of messages, with the tools and variables of the answer.

    Raises:
        TemplateError: the chat template refuses them.
    """

    def system(self) -> list[Message]:
        """The messages before the conversation proper, which always stay."""
        count = next(
            (index for index, message in enumerate(self.messages) if message.get("role") not in _SYSTEM_ROLES),
            len(self.messages),
        )
        return list(self.messages[:count])

    def beginning(self) -> list[int]:
        """Token ids of what every conversation with these system messages and tools begins with.

        Raises:
            TemplateError: the chat template refuses the system messages alone.
        """
        return self.before_user(self.system())

    def before_user(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of messages, up to the text of the user that follows them.

        Raises:
            TemplateError: the chat template refuses them.
        """
        first, second = (self.encode([*messages, {"role": "user", "content": text}]) for text in ("", "x"))
        return first[: shared_tokens(first, second)]
