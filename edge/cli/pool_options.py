"""Command-line options of the commands that offer several models to other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ...models.byte_sizes import parse_bytes
from ...runtime.arguments.load_options import LoadOptions

if TYPE_CHECKING:
    from ...models.progress import Progress
    from ...runtime.engine import Engine
    from ..service.kept_prefixes import KeptPrefix
    from ..service.model_pool import ModelPool

OfferedModels = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Models to offer; the first one answers requests that name none.",
        show_default="the bundled model and those that edge-run models lists",
    ),
]
IdleUnload = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", min=0, help="Unload a model that is unused for this long.", show_default="never"),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory for the weights of loaded models, such as 8GB.", show_default="no limit"),
]


@dataclass(frozen=True)
class PoolOptions:
    """Which models a command offers, how they are opened, and how long they stay in memory; see `ModelPool`."""

    models: Sequence[str]
    each: LoadOptions
    """How each of them is opened."""
    idle_unload: float | None = None
    memory: str | None = None
    prefixes: Sequence[KeptPrefix] = ()
    """What requests begin with: every model reads it when it is loaded."""

    def open(self) -> ModelPool:
        """Offer the models; they are loaded when they are first used.

        Raises:
            BundleError: a path does not exist, or holds no model.
            InputError: the memory is not a size.
        """
        # Other commands need neither.
        from ...runtime.devices.providers import choose_device
        from ...runtime.engine_loading import load
        from ..service.model_pool import ModelPool

        def open_model(path: str, progress: Progress) -> Engine:
            engine = load(path, self.each, progress=progress)
            if self.prefixes:
                from ..service.kept_prefixes import keep_prefixes

                try:
                    keep_prefixes(engine, self.prefixes)
                except BaseException:
                    engine.close()
                    raise
            return engine

        max_bytes = None if self.memory is None else parse_bytes(self.memory, "--memory")
        kind = choose_device(self.each.device).kind
        return ModelPool(self.models, open_model, idle_s=self.idle_unload, max_bytes=max_bytes, kind=kind)
