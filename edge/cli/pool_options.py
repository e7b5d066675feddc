"""Command-line options of the commands that offer several models to other programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ...models.user_text import parse_bytes
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


def open_pool(
    models: Sequence[str],
    options: LoadOptions,
    idle_unload: float | None,
    memory: str | None,
    prefixes: Sequence[KeptPrefix] = (),
) -> ModelPool:
    """Offer models; they are loaded when they are first used.

    Args:
        models: the models, the first of which answers requests that name none; empty for the bundled model and those on
            this machine.
        options: how each of them is loaded.
        idle_unload: seconds after which an unused one is unloaded; None for never.
        memory: size of the weights that are in memory together; None for no limit.
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

    max_bytes = None if memory is None else parse_bytes(memory, "--memory")
    kind = choose_device(options.device).kind
    return ModelPool(models, open_model, idle_s=idle_unload, max_bytes=max_bytes, kind=kind)
