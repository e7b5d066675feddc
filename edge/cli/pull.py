"""`edge-run pull ID`: downloads a model from the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Annotated, Any

import typer

from ...models.hub.downloaded_model import DownloadedModel, HubId, parse_hub_id
from ...models.hub.local_store import Store
from ...models.user_text import format_bytes
from ...runtime.devices.providers import choose_device
from ..terminal.output import write_json, write_line
from .shared_options import AsJson, Debug, Offline


def pull(
    model: Annotated[
        str, typer.Argument(metavar="ID", help="org/name, org/name:variant or org/name:variant@revision.")
    ],
    device: Annotated[
        str, typer.Option(metavar="NAME", help="The device it will run on: auto, cpu, gpu or npu.")
    ] = "auto",
    offline: Offline = False,  # noqa: ARG001  its callback acts
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001  main reads it
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
    facts = describe(requested, found)
    if as_json:
        write_json(facts)
        return
    write_line(f"{found.id}: {format_bytes(found.bytes)}, commit {found.commit[:10]}")
    write_line(f"in {found.folder}")
    for older in facts["older"]:
        write_line(f"an older commit is still on disk; to remove it: edge-run models --remove {shlex.quote(older)}")
    write_line(f"to run it: {facts['command']}")


def describe(requested: HubId, found: DownloadedModel) -> dict[str, Any]:
    """A downloaded model as plain values."""
    # The command repeats the revision if one was given, and always names the variant that was downloaded.
    run = dataclasses.replace(requested, variant=found.variant or None)
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
