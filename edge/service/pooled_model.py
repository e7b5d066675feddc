"""One model of a pool: its engine, who uses it or waits for it, and its status."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from ...models.progress import Progress
from ...runtime.engine import Engine, EngineActivity
from .offered_models import ModelEntry


@dataclass(frozen=True)
class ModelStatus:
    """A model that is in memory, or is being loaded."""

    id: str
    loaded: bool
    """False while it is being loaded."""
    users: int
    """Number of requests and sessions that use it or wait for it."""
    bytes: int
    """Bytes of its graph and weights on disk, which are about those in memory."""
    cached_bytes: int
    """Bytes of the KV caches of earlier answers."""
    active: int
    """Number of answers that are being generated."""
    waiting: int
    """Number of requests that wait for the others' end."""
    load_s: float
    """Seconds that loading took, a download included; 0 while it lasts."""
    last_used: float
    """Time at which it was last in use, in seconds since 1970."""


@dataclass
class PooledModel:
    """A model with what the pool knows of it; the pool's lock guards it."""

    entry: ModelEntry
    engine: Engine | None = None
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
    used_at: int = 0
    """Number of the last use, counted over all models."""
    last_used: float = 0.0
    idle_since: float = 0.0
    listeners: dict[int, Progress] = field(default_factory=dict)
    """Receivers of progress by the thread that waits for the model or uses it."""

    @property
    def idle(self) -> bool:
        """Whether it is in memory and may be unloaded."""
        return self.engine is not None and not self.users and not self.waiting

    def status(self) -> ModelStatus:
        """What others may know of it."""
        now = EngineActivity(0, 0, 0) if self.engine is None else self.engine.activity()
        return ModelStatus(
            id=self.entry.id,
            loaded=self.engine is not None,
            users=self.users + self.waiting,
            bytes=self.bytes,
            cached_bytes=now.cached_bytes,
            active=now.active,
            waiting=now.waiting,
            load_s=self.load_s,
            last_used=self.last_used,
        )
