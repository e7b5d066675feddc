"""Command-line options of the commands that offer several models to other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...models.user_text import parse_bytes
from ...runtime.arguments.argument_types import option
from ...runtime.arguments.load_options import LoadOptions
from .shared_options import OptionsOf

if TYPE_CHECKING:
    from ...models.progress import Progress
    from ...runtime.encoders.encoder import AnyModel
    from ..service.kept_prefixes import KeptPrefix
    from ..service.model_pool import ModelPool


Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Models to offer; the first one answers requests that name none.",
        show_default="the bundled model and those that edge-run models lists",
    ),
]


@dataclass(frozen=True)
class PoolOptions:
    """Which models stay in memory; they are loaded when they are first used."""

    idle_unload: float | None = option(
        None, "Unload a model that is unused for this long.", metavar="SECONDS", least=0, unset="never"
    )
    memory: str | None = option(
        None, "Memory for the weights of loaded models, such as 8GB.", metavar="SIZE", unset="no limit"
    )

    def open(
        self, models: Sequence[str] | None, options: LoadOptions, prefixes: Sequence[KeptPrefix] = ()
    ) -> ModelPool:
        """Offer the models.

        Args:
            models: paths, names and hub ids.
            options: how each of them is loaded.
            prefixes: what requests begin with: every model reads it when it is loaded.

        Raises:
            BundleError: a path does not exist, or holds no model.
            InputError: the memory is not a size.
        """
        # Other commands need neither.
        from ...runtime.devices.providers import choose_device
        from ...runtime.encoders.encoder import load_either
        from ...runtime.engine import Engine
        from ..service.model_pool import ModelPool

        def open_model(path: str, progress: Progress) -> AnyModel:
            engine = load_either(path, options, progress=progress)
            if prefixes and isinstance(engine, Engine):
                from ..service.kept_prefixes import keep_prefixes

                try:
                    keep_prefixes(engine, prefixes)
                except BaseException:
                    engine.close()
                    raise
            return engine

        max_bytes = None if self.memory is None else parse_bytes(self.memory, "--memory")
        kind = choose_device(options.device).kind
        return ModelPool(models or [], open_model, idle_s=self.idle_unload, max_bytes=max_bytes, kind=kind)


POOL: Final = OptionsOf(PoolOptions())
