"""`edge-run models`, `pull`, `ps` and `stop`: the models on this machine, on its disk and in memory."""

from __future__ import annotations

import shlex
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ...errors import EdgeError, InputError
from ...models.find import BUNDLED_MODEL, exported_models, named_models
from ...models.hub.downloaded_model import DownloadedModel, HubId, parse_hub_id
from ...models.hub.local_store import Store, models_root, stores
from ...models.user_text import format_bytes
from ...runtime.devices.providers import choose_device
from ..service.offered_models import capabilities_at
from ..service.running_servers import ask, running_servers
from ..terminal.output import SafeConsole, write_error, write_json, write_line
from .shared_options import AsJson, takes_options

_COMMIT_SHOWN = 10


@takes_options()
def models(
    remove: Annotated[
        str | None, typer.Option(metavar="ID", help="Remove a downloaded model, or one variant or commit of it.")
    ] = None,
    as_json: AsJson = False,
    **_given: Any,
) -> None:
    """List the bundled model, exported ones, and those downloaded from the Hugging Face Hub, or remove one of these.

    Example: edge-run models --remove onnx-community/Qwen2.5-0.5B-Instruct:q4
    """
    if remove is not None:
        if remove == BUNDLED_MODEL:
            raise InputError(
                f"{remove} comes with edge-run and cannot be removed", "name a model that edge-run pull downloaded"
            )
        if (exported := exported_models().get(remove)) is not None:
            raise InputError(f"{remove} was not downloaded but exported", f"remove its folder yourself: {exported}")
        _remove(parse_hub_id(remove), as_json=as_json)
        return
    facts = describe()
    if as_json:
        write_json(facts)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("model", "commit", "size", "last used", "for"):
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    for model in facts["models"]:
        table.add_row(*_shown(model))
    SafeConsole().print(table)
    if not any(model["commit"] for model in facts["models"]):
        write_line("no downloaded models yet; to get one: edge-run pull onnx-community/Qwen2.5-0.5B-Instruct")


def describe() -> dict[str, Any]:
    """The models on this machine as plain values."""
    found: list[dict[str, Any]] = []
    for name, folder in named_models().items():
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        found.append(_entry(name, "", "", size, None, str(folder)))
    for store in stores():
        for model in store.all_downloaded():
            used = datetime.fromtimestamp(model.last_used).astimezone().isoformat(timespec="seconds")
            found.append(_entry(model.repo, model.variant, model.commit, model.bytes, used, str(model.folder)))
        if unfinished := store.unfinished_bytes():
            found.append({**_entry(store.repo, "", "", unfinished, None, str(store.folder)), "unfinished": True})
    return {"folder": str(models_root()), "models": found}


def _entry(repo: str, variant: str, commit: str, size: int, last_used: str | None, path: str) -> dict[str, Any]:
    return {
        "id": repo,
        "variant": variant,
        "commit": commit,
        "bytes": size,
        "last_used": last_used,
        "path": path,
        "capabilities": capabilities_at(Path(path)),
        "unfinished": False,
    }


def _shown(model: dict[str, Any]) -> tuple[str, ...]:
    name = f"{model['id']}:{model['variant']}" if model["variant"] else str(model["id"])
    if model["unfinished"]:
        return name, "unfinished", format_bytes(model["bytes"])
    used = model["last_used"]
    when = "" if used is None else str(used)[:16].replace("T", " ")
    commit = model["commit"][:_COMMIT_SHOWN] or ("bundled" if name == BUNDLED_MODEL else "exported")
    return name, commit, format_bytes(model["bytes"]), when, ", ".join(model["capabilities"])


def _remove(named: HubId, *, as_json: bool) -> None:
    """Remove the models that an id names.

    Raises:
        InputError: the id names no downloaded model.
        HubError: the files cannot be removed.
    """
    store = Store(named.repo)
    here = store.all_downloaded()
    whole = named.variant is None and named.revision is None
    matching = [model for model in here if _matches(store, named, model)]
    if not (matching or (whole and store.folder.is_dir())):
        names = ", ".join(f"{model.id}@{model.commit[:_COMMIT_SHOWN]}" for model in here)
        raise InputError(
            f"{named} is not downloaded", f"downloaded are: {names}" if names else "edge-run models lists what is"
        )
    freed = store.remove(None if whole or len(matching) == len(here) else matching)
    if as_json:
        removed = [{"id": model.repo, "variant": model.variant, "commit": model.commit} for model in matching]
        write_json({"removed": removed, "bytes": freed})
        return
    for model in matching:
        write_line(f"removed {model.id}, commit {model.commit[:_COMMIT_SHOWN]}")
    write_line(f"{format_bytes(freed)} freed")


def _matches(store: Store, named: HubId, model: DownloadedModel) -> bool:
    if named.variant is not None and named.variant.lower() != model.variant.lower():
        return False
    if named.revision is None:
        return True
    return model.commit == store.commit_of(named.revision) or (
        len(named.revision) >= 7 and model.commit.startswith(named.revision)
    )


@takes_options(offline=True)
def pull(
    model: Annotated[
        str, typer.Argument(metavar="ID", help="org/name, org/name:variant or org/name:variant@revision.")
    ],
    device: Annotated[
        str, typer.Option(metavar="NAME", help="The device it will run on: auto, cpu, gpu or npu.")
    ] = "auto",
    as_json: AsJson = False,
    **_given: Any,
) -> None:
    """Download a model or update it, and print its folder.

    A variant says which weights: q4, int8, fp16, fp32 ..., or a folder of the repository; without one, what suits the
    device best is chosen. A revision is a branch, a tag or a commit.

    Only the files that one graph needs are downloaded. An interrupted download continues where it stopped. Private and
    gated models need a login: hf auth login, or the environment variable HF_TOKEN.

    Example: edge-run pull onnx-community/Qwen2.5-0.5B-Instruct:q4
    """
    from ...models.hub.fetch import fetch_model

    requested = parse_hub_id(model)
    found = fetch_model(requested, choose_device(device).kind, newest=True)
    # The command repeats the revision if one was given, and always names the variant that was downloaded.
    run = replace(requested, variant=found.variant or None)
    siblings = [each for each in Store(found.repo).all_downloaded() if each.source == found.source]
    older = [f"{each.id}@{each.commit[:10]}" for each in siblings if each.commit != found.commit]
    facts: dict[str, Any] = {
        "id": found.repo,
        "variant": found.variant,
        "commit": found.commit,
        "path": str(found.folder),
        "bytes": found.bytes,
        "files": {name: digest.bytes for name, digest in found.files.items()},
        "older": older,
        "command": f"edge-run {shlex.quote(str(run))}",
    }
    if as_json:
        write_json(facts)
        return
    write_line(f"{found.id}: {format_bytes(found.bytes)}, commit {found.commit[:10]}")
    write_line(f"in {found.folder}")
    for each in older:
        write_line(f"an older commit is still on disk; to remove it: edge-run models --remove {shlex.quote(each)}")
    write_line(f"to run it: {facts['command']}")


@takes_options()
def ps(as_json: AsJson = False, **_given: Any) -> None:
    """List the models that running servers and apps have in memory: their size, context, and how long they stay.

    These are the edge-run serve and edge-run app of this user on this machine. One that has an API key is asked with
    the key in the environment variable EDGERUN_API_KEY.

    Example: edge-run ps
    """
    servers = running_servers()
    if as_json:
        write_json({"servers": servers})
        return
    table = Table("model", "size", "context", "until", "server", box=None, pad_edge=False)
    for server in servers:
        if server["problem"] is not None:
            write_error(f"edge-run: {server['url']}: {server['problem']}")
        for model in server["models"]:
            context, size = str(model["context_length"] or "-"), format_bytes(model["size"])
            table.add_row(model["name"], size, context, _time_left(model["expires_at"]), server["url"])
    if table.row_count:
        SafeConsole().print(table)
    else:
        write_line("no model is in memory" if servers else "no server runs; to start one: edge-run serve or app")


@takes_options()
def stop(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A name that edge-run ps lists.", show_default="all")
    ] = None,
    **_given: Any,
) -> None:
    """Unload a model from the memory of running servers and apps, when the answers in progress have ended.

    They load it again for the next request.

    Example: edge-run stop my-model
    """
    names = [(server["url"], each["name"]) for server in running_servers() for each in server["models"]]
    chosen = [(url, name) for url, name in names if model is None or name == model.removesuffix(":latest")]
    if not chosen:
        what = "no model is in memory" if model is None else f"{model} is not in memory"
        raise InputError(what, "edge-run ps lists what is, and which servers do not tell")
    for url, name in chosen:
        try:
            ask(f"{url}/api/generate", {"model": name, "keep_alive": 0, "stream": False})
        except (OSError, ValueError) as error:
            raise EdgeError(f"{url} does not unload {name}: {error}", "end that server, or try again") from error
        write_line(f"{name} is unloaded once no answer uses it ({url})")


def _time_left(expires_at: str) -> str:
    """How long a model stays in memory if nobody uses it again."""
    left = datetime.fromisoformat(expires_at) - datetime.now(UTC)
    # Ollama's API has a date in the 24th century for models that stay.
    return "forever" if left.days > 10_000 else f"{max(left.total_seconds(), 0) / 60:.0f} min"
