"""The OpenAI-compatible server as an ASGI application, to be hosted by any ASGI server.

import edgerun.server

app = edgerun.server.app("my-model", api_key="...", allow_hosts=["llm.example.com"])
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import missing_extra

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["app"]


def app(
    models: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    *,
    api_key: str | None = None,
    allow_hosts: Sequence[str] = (),
    allow_origins: Sequence[str] = (),
    max_body: int = 32 << 20,
    max_requests: int = 256,
    request_timeout: float = 3600.0,
    idle_unload: float | None = None,
    memory: int | None = None,
    device: str = "auto",
    **load_options: Any,
) -> Starlette:
    """Return the application. Models are loaded when they are first asked for, and unloaded when its lifespan ends.

    The application checks who asks and limits what is asked. Limits of connections, such as clients that do not read,
    are the business of the server that hosts it; `edge-run serve` has them.

    Args:
        models: paths and hub ids of the models to offer; none for the bundled model and those on this machine.
        api_key: what clients send as `Authorization: Bearer`; None to let everyone in who reaches the application.
        allow_hosts: names by which clients reach it, besides localhost; `*` for any, where a proxy checks them.
        allow_origins: web origins whose pages may use it; `*` for all.
        max_body: largest body of a request, in bytes.
        max_requests: largest number of requests that are being answered or wait.
        request_timeout: seconds within which an answer has to be finished.
        idle_unload: seconds after which a model that is not used is unloaded; None for never.
        memory: bytes that the models in memory may take; None for no limit.
        device: as in `edgerun.load`.
        **load_options: further options of `edgerun.load`, such as `context`, `threads`, `draft` and `parallel`.

    Raises:
        BundleError: a path holds no model.
        InputError: an option is out of range, or the extra `serve` is missing.
    """
    with missing_extra("the server", "serve"):
        from .edge.server.asgi_app import asgi_app  # noqa: PLC0415
        from .edge.server.endpoints import RequestService  # noqa: PLC0415
        from .edge.server.server_settings import ServerSettings  # noqa: PLC0415
    from .edge.service.model_pool import ModelPool  # noqa: PLC0415
    from .runtime.devices.providers import choose_device  # noqa: PLC0415
    from .runtime.encoders.encoder import load_either  # noqa: PLC0415

    names = [models] if isinstance(models, str | os.PathLike) else list(models)
    settings = ServerSettings(
        api_key=api_key,
        allow_hosts=tuple(allow_hosts),
        allow_origins=tuple(allow_origins),
        max_body_bytes=max_body,
        max_requests=max_requests,
        request_timeout_s=request_timeout,
    )
    pool = ModelPool(
        [os.fspath(name) for name in names],
        lambda path, progress: load_either(path, progress=progress, device=device, **load_options),
        idle_s=idle_unload,
        max_bytes=memory,
        kind=choose_device(device).kind,
    )
    return asgi_app(RequestService(pool, settings))
