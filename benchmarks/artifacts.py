"""Models for benchmarks, made once and kept in a working folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from checkpoints import write_checkpoint
from edgerun.export import ExportRecipe, WeightFormat, export_checkpoint, upgrade_model
from shapes import Shape


def checkpoint(work: Path, shape: Shape, tokenizer: Path | None = None) -> Path:
    """A checkpoint of the shape with random weights, and the tokenizer of a folder or a byte-level one."""
    return made_once(
        work / _name(shape, tokenizer) / "checkpoint",
        lambda folder: write_checkpoint(shape, folder, tokenizer=tokenizer),
    )


def bundle(work: Path, shape: Shape, block: int, tokenizer: Path | None = None) -> Path:
    """Its edge-run bundle, with 4-bit weights in blocks of `block`."""

    def make(folder: Path) -> None:
        recipe = ExportRecipe(WeightFormat(4, block), context=shape.context)
        export_checkpoint(checkpoint(work, shape, tokenizer), folder, recipe)

    return made_once(work / _name(shape, tokenizer) / f"edge-run-int4-{block}", make)


def _name(shape: Shape, tokenizer: Path | None) -> str:
    return shape.name if tokenizer is None else f"{shape.name}-tokenizer-{tokenizer.resolve().name}"


def with_context(shape: Shape, tokens: int) -> Shape:
    """The shape, and where its models serve fewer tokens, one of another name that serves so many."""
    return shape if tokens <= shape.context else replace(shape, name=f"{shape.name}-{tokens}", context=tokens)


def upgraded(model: Path, recipe: ExportRecipe) -> Path:
    """The upgrade of a foreign ONNX model, in a folder beside it."""
    return made_once(
        model.with_name(f"{model.name}-upgraded-{recipe.body or 'as-stored'}".replace("/", "-")),
        lambda folder: upgrade_model(model, folder, recipe),
    )


def made_once(target: Path, make: Callable[[Path], object]) -> Path:
    """Make the folder or file `target` if it does not exist.

    It is made under another name first, so that an interrupted run leaves no partial one.
    """
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)
        make(part)
        part.rename(target)
    return target
