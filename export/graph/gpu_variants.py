"""Writes the GPU forms of a bundle's graph beside it, over the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...errors import ExportError
from ...models.atomic import write_atomically
from ...models.bundle import GRAPH_NAME, Bundle
from ...models.manifest import DeviceKind, VariantFile
from ...models.onnx_file.graph_editor import CannotRewriteError
from ...models.progress import Progress
from ...runtime.devices.device_check import compare_with_cpu
from ...runtime.devices.providers import cpu_device
from ...runtime.gpu_graph.rewriting import FORMS, gpu_graph
from ...runtime.graph.model_metadata import metadata_of
from ...runtime.graph.session import GraphSession, SessionConfig
from ..bundle_content import change_manifest, read_manifest

_STAGE: Final = "writing GPU graphs"


def write_gpu_variants(folder: Path, progress: Progress) -> list[str]:
    """Write the form of each provider into a bundle, compare it with the bundle's graph, and list it in the manifest.

    Args:
        folder: a complete bundle.
        progress: receives the stage.

    Returns:
        Notes for the user: forms that the model does not have, with the reason.

    Raises:
        ExportError: the model has no form at all, or a form computes something else.
        OSError: the disk refused a write.
    """
    manifest = read_manifest(folder)
    bundle = Bundle(folder, folder / GRAPH_NAME, manifest)
    forms = [
        (provider, form, plain)
        for provider, form in FORMS.items()
        for plain in ((False, True) if form.has_plain_form else (False,))
    ]
    others = [each for each in manifest.variants if each.device is not DeviceKind.GPU]
    variants, notes = list(others), []
    for number, (provider, form, plain) in enumerate(forms):
        progress(_STAGE, number / len(forms))
        try:
            model = gpu_graph(bundle.graph, form, plain=plain)
        except CannotRewriteError as error:
            notes.append(f"no graph was written for {provider}: {error}")
            continue
        file = folder / f"model_{form.suffix}{'_plain' if plain else ''}.onnx"
        write_atomically(file, model)
        config = SessionConfig(cpu_device())
        check = compare_with_cpu(GraphSession(file, config, metadata_of(bundle)), bundle, config)
        if not check.plain_correct or not check.tree_correct:
            differences = " and ".join(f"{each:.2g}" for each in (check.plain, check.tree) if each is not None)
            raise ExportError(
                f"{file.name} computes something else than {GRAPH_NAME}: logits differ by {differences} of their "
                "standard deviation",
                "leave --device gpu out",
            )
        variants.append(VariantFile(DeviceKind.GPU, file.name, form.precision, providers=(provider,), plain=plain))
    if variants == others:
        raise ExportError(f"no GPU graph can be made of this model: {notes[0]}", "leave --device gpu out")
    change_manifest(folder, [each.file for each in variants], variants=tuple(variants))
    progress(_STAGE, 1.0)
    return notes
