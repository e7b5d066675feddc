"""`edge-run serve [MODEL ...]`: a server on this machine; and the options of all commands that offer several models."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ...errors import ContextError, InputError, TemplateError, missing_extra
from ...models.progress import Progress, ProgressDisplay
from ...models.regular_file import os_errors_as
from ...models.user_text import decode_text, parse_bytes, read_text
from ...runtime.arguments.argument_types import option
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.devices.providers import choose_device
from ...runtime.encoders.encoder import AnyModel, load_either
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ..service.model_pool import ModelPool
from ..service.request_error import RequestError
from ..service.running_servers import API_KEY_VARIABLE, announced
from ..service.text_bodies import ChatBody
from ..terminal.output import showing_tracebacks, write_error
from .shared_options import OptionsOf, takes_options

_log: Final = logging.getLogger("edgerun")
_MAX_KEY_BYTES: Final = 4096
_LOAD: Final = OptionsOf(LoadOptions(), without=("tokenizer", "learned"))


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
        self, models: Sequence[str] | None, options: LoadOptions, prepare: Callable[[Engine], None] = lambda _: None
    ) -> ModelPool:
        """Offer the models.

        Args:
            models: paths, names and hub ids.
            options: how each of them is loaded.
            prepare: called with every language model when it is loaded.

        Raises:
            BundleError: a path does not exist, or holds no model.
            InputError: the memory is not a size.
        """

        def open_model(path: str, progress: Progress) -> AnyModel:
            engine = load_either(path, options, progress=progress)
            if isinstance(engine, Engine):
                try:
                    prepare(engine)
                except BaseException:
                    engine.close()
                    raise
            return engine

        max_bytes = None if self.memory is None else parse_bytes(self.memory, "--memory")
        kind = choose_device(options.device).kind
        return ModelPool(models or [], open_model, idle_s=self.idle_unload, max_bytes=max_bytes, kind=kind)


POOL: Final = OptionsOf(PoolOptions())


@dataclass(frozen=True)
class ServeOptions:
    """Options of `edge-run serve`."""

    host: str = option(
        "127.0.0.1", "Address to listen at; one that other machines reach needs an API key.", metavar="ADDRESS"
    )
    port: int = option(8080, "Port to listen at; 0 for one that is free.", metavar="N", least=0, most=65535)
    api_key: str | None = option(
        None,
        "Key that clients have to send. Other users of this machine can see it in the list of processes, "
        f"unlike the environment variable {API_KEY_VARIABLE} and --api-key-file.",
        metavar="KEY",
    )
    api_key_file: Path | None = option(None, "A file that contains the key.", metavar="FILE")
    allow_host: list[str] | None = option(
        None, "A further name by which clients reach the server; may be repeated.", metavar="NAME"
    )
    allow_origin: list[str] | None = option(
        None, "A web origin (https://example.com) whose pages may use the server; may be repeated.", metavar="ORIGIN"
    )
    allow_image_urls: bool = option(False, "Fetch images at http and https URLs in requests, from public addresses.")
    prefix: list[Path] | None = option(
        None,
        "What many requests begin with: a text file with their system message, or a .json file with the body "
        "of a chat completion (messages, tools). Every model reads it when it is loaded, and its KV cache is kept "
        "on disk for the next start; may be repeated.",
        metavar="FILE",
    )
    max_body: str = option("32MiB", "Largest body of a request.", metavar="SIZE")
    drain: float = option(
        30.0, "How long running answers may go on when the server is asked to end.", metavar="SECONDS", least=0
    )


_SERVE: Final = OptionsOf(ServeOptions())


@takes_options(POOL, _SERVE, _LOAD, offline=True)
def serve(
    models: Models = None,
    **given: Any,
) -> None:
    """Serve models to every program that talks to OpenAI's API, until Ctrl-C or SIGTERM.

    Only programs of this machine reach the server, unless --host says otherwise. The guide is docs/server.md.

    Examples: edge-run serve my-model --port 8080; edge-run serve my-model --prefix instructions.txt
    """
    options, load = _SERVE.record(given), _LOAD.record(given)
    with missing_extra("the server", "serve"):
        from ..server.asgi_app import asgi_app
        from ..server.endpoints import RequestService
        from ..server.server_settings import ServerSettings
        from ..server.uvicorn_server import DrainingServer, bound_socket

    settings = ServerSettings(
        host=options.host,
        api_key=_api_key(options.api_key, options.api_key_file),
        allow_hosts=tuple(options.allow_host or ()),
        allow_origins=tuple(options.allow_origin or ()),
        allow_image_urls=options.allow_image_urls,
        max_body_bytes=parse_bytes(options.max_body, "--max-body"),
    )
    prepare = partial(_keep_prefixes, {path: _prefix(path) for path in options.prefix or ()})
    with POOL.record(given).open(models, load, prepare) as pool, bound_socket(options.host, options.port) as listening:
        if models:
            # What is wrong with the model that most requests will use is said now.
            with ProgressDisplay(transient=True) as progress:
                pool.load(None, progress)
        address, bound_port = listening.getsockname()[:2]
        names = ", ".join(entry.id for entry in pool.offered.entries())
        shown = f"[{address}]" if ":" in address else address
        base = f"http://{shown}:{bound_port}"
        service = RequestService(pool, settings)
        # A wildcard is not an address that others can ask.
        local = base.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        with showing_tracebacks(given["debug"]), announced(local):
            write_error(f"edge-run: serving {names} at {base}/v1 (Ctrl-C ends it)")
            write_error(f"edge-run: try: {_curl(base, settings.api_key, options.api_key_file)}")
            DrainingServer(asgi_app(service), service, options.drain).run([listening])


def _api_key(option: str | None, file: Path | None) -> str | None:
    """The API key of the options, or else of the environment.

    Raises:
        InputError: it is given twice, or the file cannot be read.
    """
    if file is None:
        return os.environ.get(API_KEY_VARIABLE) if option is None else option
    if option is not None:
        raise InputError("--api-key and --api-key-file are both given", "give one of them")
    unreadable = os_errors_as(InputError, f"{file} cannot be read", "give a file that contains the key")
    with unreadable, file.open("rb") as opened:
        data = opened.read(_MAX_KEY_BYTES + 1)
    if len(data) > _MAX_KEY_BYTES:
        raise InputError(f"{file} has more than {_MAX_KEY_BYTES} bytes", "give a file that contains only the key")
    return decode_text(data, str(file)).strip()


def _curl(base: str, key: str | None, file: Path | None) -> str:
    """A command that asks the server something."""
    # These quotes are understood by POSIX shells and by the Windows command prompt.
    body = r'"{\"messages\": [{\"role\": \"user\", \"content\": \"list all files\"}]}"'
    given = f"$(cat {shlex.quote(str(file))})" if file is not None else f"${API_KEY_VARIABLE}"
    header = "" if key is None else f' -H "Authorization: Bearer {given}"'
    return f'curl {base}/v1/chat/completions{header} -H "Content-Type: application/json" -d {body}'


def _prefix(path: Path) -> tuple[Any, GenerateOptions]:
    """What requests begin with, and the tools and template variables that a prompt depends on too.

    Args:
        path: the text of a system message or, where its name ends in `.json`, the body of a chat completion.

    Raises:
        InputError: it cannot be read, is blank, or is not such a body.
    """
    text = read_text(path, "give a text file with a system message, or a .json file with the body of a chat completion")
    if path.suffix.lower() != ".json":
        return [{"role": "system", "content": text}], GenerateOptions()
    try:
        request = ChatBody.parse(text)
    except RequestError as error:
        raise InputError(f"{path} is not the body of a chat completion: {error.what}", error.hint) from None
    options = request.options
    return request.messages, GenerateOptions(tools=options.tools, template_variables=options.template_variables)


def _keep_prefixes(prefixes: Mapping[Path, tuple[Any, GenerateOptions]], engine: Engine) -> None:
    """Read beginnings with a model, or take what an earlier process kept of them; those that do not fit are logged.

    Raises:
        EdgeError: the model failed, or loading it was cancelled.
    """
    for path, prefix in prefixes.items():
        try:
            engine.keep_prefix(*prefix)
        except (ContextError, TemplateError, InputError) as error:
            _log.warning("%s is not read in advance by %s: %s", path, engine.bundle.folder.name, error.what)
