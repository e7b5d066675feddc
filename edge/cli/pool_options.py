"""Command-line options of the commands that offer several models to other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ...models.user_text import parse_bytes
from ...runtime.arguments.load_options import LoadOptions

if TYPE_CHECKING:
    from ...models.progress import Progress
    from ...runtime.engine import Engine
    from ..service.kept_prefixes import KeptPrefix
    from ..service.model_pool import ModelPool


@dataclass(frozen=True)
class PoolOptions:
    """Which models are offered; they are loaded when they are first used."""

    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Models to offer; the first one answers requests that name none.",
            show_default="the bundled model and those that edge-run models lists",
        ),
    ] = None
    idle_unload: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="Unload a model that is unused for this long.", show_default="never"
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory for the weights of loaded models, such as 8GB.", show_default="no limit"
        ),
    ] = None

    def open(self, options: LoadOptions, prefixes: Sequence[KeptPrefix] = ()) -> ModelPool:
        """Offer the models.

        Args:
            options: how each of them is loaded.
            prefixes: what requests begin with: every model reads it when it is loaded.

        Raises:
            BundleError: a path does not exist, or holds no model.
            InputError: the memory is not a size.
        """
        # Other commands need neither.
        from ...runtime.devices.providers import choose_device
        from ...runtime.engine_loading import load
        from ..service.model_pool import ModelPool

        def open_model(path: str, progress: Progress) -> Engine:
            engine = load(path, options, progress=progress)
            if prefixes:
                from ..service.kept_prefixes import keep_prefixes

                try:
                    keep_prefixes(engine, prefixes)
                except BaseException:
                    engine.close()
                    raise
            return engine

        max_bytes = None if self.memory is None else parse_bytes(self.memory, "--memory")
        kind = choose_device(options.device).kind
        return ModelPool(self.models or [], open_model, idle_s=self.idle_unload, max_bytes=max_bytes, kind=kind)
