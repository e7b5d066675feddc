"""A model with what the pool of models knows of it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from ...models.progress import Progress
from ...runtime.encoders.encoder import AnyModel
from ...runtime.engine import Engine, EngineActivity
from .offered_models import ModelEntry


class ModelState(msgspec.Struct, kw_only=True, frozen=True):
    """A model in memory, or one that is being loaded."""

    id: str
    loaded: bool
    users: Annotated[int, Meta(description="Requests and sessions that use it or wait for it.")]
    bytes: Annotated[int, Meta(description="Bytes of its graph and weights.")]
    cached_bytes: Annotated[int, Meta(description="Bytes of the KV caches of earlier answers.")]
    active: Annotated[int, Meta(description="Answers that are being generated.")]
    waiting: Annotated[int, Meta(description="Requests that wait for the end of others.")]
    passes: Annotated[int, Meta(description="Forward passes of answers since it was loaded, where answers share them.")]
    pass_texts: Annotated[int, Meta(description="Answers in these passes, counted in each.")]
    pass_tokens: Annotated[int, Meta(description="Tokens in these passes.")]
    load_s: float
    last_used: Annotated[float, Meta(description="Seconds since 1970.")]
    expires: Annotated[float | None, Meta(description="When it is unloaded if unused, in seconds since 1970.")]


@dataclass
class PooledModel:
    """A model with what the pool knows of it; the pool's lock guards it."""

    entry: ModelEntry
    engine: AnyModel | None = None
    attempt: Future[None] | None = None
    """The attempt to load it that is in progress; has why it failed."""
    closing: bool = False
    """Whether a thread closes its engine, which still takes memory."""
    waiting: int = 0
    """Number of threads that wait for it to be loaded."""
    users: int = 0
    """Number of uses, including the ones that are kept."""
    kept: int = 0
    """Number of uses without an end of their own."""
    bytes: int = 0
    """Its share of the budget."""
    load_s: float = 0.0
    last_used: float = 0.0
    idle_since: float = 0.0
    idle_s: float | None = None
    """Seconds after which it is unloaded if it is not in use; None for never."""
    listeners: dict[int, Progress] = field(default_factory=dict)
    """Receivers of progress by the thread that waits for the model or uses it."""

    @property
    def idle(self) -> bool:
        """Whether it is in memory and may be unloaded."""
        return self.engine is not None and not self.users and not self.waiting

    def left_s(self) -> float:
        """Seconds until it is unloaded if it is not used again."""
        return self.idle_since + (self.idle_s or 0.0) - time.monotonic()

    def status(self) -> ModelState:
        """What others may know of it."""
        now = self.engine.activity() if isinstance(self.engine, Engine) else EngineActivity(0, 0, 0)
        return ModelState(
            id=self.entry.id,
            loaded=self.engine is not None,
            users=self.users + self.waiting,
            bytes=self.bytes,
            cached_bytes=now.cached_bytes,
            active=now.active,
            waiting=now.waiting,
            passes=now.passes.passes,
            pass_texts=now.passes.texts,
            pass_tokens=now.passes.tokens,
            load_s=self.load_s,
            last_used=self.last_used,
            expires=None if self.idle_s is None else self.last_used + self.idle_s,
        )
