"""`edge-run pull ID`: download a model from the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Annotated, Any

import typer

from ...models.hub.local_store import Downloaded, Store, in_bytes
from ...models.hub.model_id import HubId, parse_hub_id
from ...runtime.devices.providers import choose_device
from .offline import Offline


def pull(
    model: Annotated[str, typer.Argument(metavar="ID", help="org/name, org/name:variant, org/name:variant@revision.")],
    variant: Annotated[
        str | None,
        typer.Option(help="q4, int8, fp16, fp32..., or a folder's name.", show_default="what suits the device best"),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="A branch, tag or commit.", show_default="the main branch")
    ] = None,
    device: Annotated[str, typer.Option(help="What it is to run on: auto, cpu, gpu, npu.")] = "auto",
    offline: Offline = False,  # noqa: ARG001  its callback acts
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,  # noqa: ARG001
) -> None:
    """Download a model, or bring it up to date, and say where it lies.

    Only the files that one graph needs are fetched. A download that broke off goes on where it stopped. Private and
    gated models need a log-in: hf auth login, or the environment variable HF_TOKEN.

    Example: edge-run pull onnx-community/Qwen2.5-0.5B-Instruct:q4
    """
    from ...models.hub.fetch import fetch_model

    named = parse_hub_id(model)
    named = dataclasses.replace(named, variant=variant or named.variant, revision=revision or named.revision)
    meant = parse_hub_id(str(named))  # what the options say is checked like what the name says
    found = fetch_model(meant, choose_device(device).kind, newest=True)
    facts = describe(meant, found)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))  # noqa: T201
        return
    typer.echo(f"{found.id}: {in_bytes(found.bytes)}, commit {found.commit[:10]}")
    typer.echo(f"in {found.folder}")
    for older in facts["older"]:
        typer.echo(f"an older commit is still here: edge-run models --remove {shlex.quote(older)}")
    typer.echo(f"run it: {facts['command']}")


def describe(asked: HubId, found: Downloaded) -> dict[str, Any]:
    """A downloaded model as plain values."""
    # Named in full where it was asked for in full; without a variant, what is here is what runs.
    run = dataclasses.replace(asked, variant=found.variant or None)
    siblings = [each for each in Store(found.repo).all_downloaded() if each.source == found.source]
    older = [f"{each.id}@{each.commit[:10]}" for each in siblings if each.commit != found.commit]
    return {
        "id": found.repo,
        "variant": found.variant,
        "commit": found.commit,
        "path": str(found.folder),
        "bytes": found.bytes,
        "files": {name: digest.bytes for name, digest in found.files.items()},
        "older": older,
        "command": f"edge-run {shlex.quote(str(run))}",
    }
