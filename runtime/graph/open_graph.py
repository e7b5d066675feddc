"""Opens a model's graph in the form that suits the device, using what the cache has of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import BundleError, InputError
from ...models.bundle import Bundle
from ...models.json_file import is_whole
from ...models.manifest import DeviceKind
from ...models.user_text import format_bytes
from ..devices.providers import CPU_PROVIDER
from ..images.image_processors import processor_of, suits_images
from ..kv.cache_scales import KVFormat
from ..measure.measurement_store import MeasurementStore, model_key
from ..prefill import PrefillMode
from .graph_choice import ChosenGraphs, FurtherGraph, TreeGraph, runs_trees_beside
from .graph_io import CacheMode, GraphForm, GraphIO
from .introspection import read_graph_io
from .model_metadata import ModelMetadata, metadata_of
from .packed_files import prepacked_graph
from .probe import ProbeResult
from .session import DecoderGraph, GraphSession, SessionConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..arguments.load_options import LoadOptions

_HELD_TWICE_BYTES: Final = 64 << 20
"""Weights of models that are not packed, below which a second graph may hold its own copy of them."""
_SMALL_MODEL_BYTES: Final = 64 << 20
"""Smaller models read a thousand tokens in a fraction of a second."""
_PROBES: Final = MeasurementStore("probes", 3, ProbeResult)


def open_graph(
    bundle: Bundle,
    config: SessionConfig,
    *,
    cache: bool,
    prefill: PrefillMode = PrefillMode.PLAIN,
    steering: LoadOptions | None = None,
) -> DecoderGraph:
    """Load the graph of a model.

    Args:
        bundle: the model.
        config: how to run it.
        cache: whether to keep on disk weights packed for this machine, the GPU's form of the graph, the result of
            probing it, and the comparison of a device with the CPU.
        prefill: which graph reads prompts, where the model can have one for them; see `prompt_graph_obstacle`.
        steering: which adapters and control vectors answers may ask for; None for none.

    Raises:
        BundleError: it is not a model that edge-run can decode with.
        DeviceError: the device cannot run the model, or runs it wrongly.
        InputError: the model cannot have such adapters or control vectors.
    """
    steers = steering is not None and bool(steering.lora or steering.control_vectors)
    if steers and config.device.provider != CPU_PROVIDER:
        what = f"adapters and control vectors work on the CPU alone, not on {config.device}"
        raise InputError(what, "add --device cpu")
    if config.device.kind is DeviceKind.NPU:
        from .static_variants import StaticGraphs  # noqa: PLC0415 -- as below

        static = StaticGraphs(bundle, config, cache=cache)
        _check(static, bundle, config, cache=cache)
        return static
    if bundle.embedding is not None and config.device.provider != CPU_PROVIDER:
        raise BundleError(
            f"{bundle.graph} has its embedding in {bundle.embedding.name}, which works on the CPU alone, "
            f"not on {config.device}",
            "add --device cpu",
        )
    metadata = metadata_of(bundle)
    # Files beside the graph may change how its inputs are read.
    key = model_key(bundle, config, bundle.config, bundle.genai)
    stored = _PROBES.load(key) if cache and metadata.operators is not None else None
    metadata = replace(metadata, probe_result=stored)
    graph: DecoderGraph
    if config.device.kind is DeviceKind.GPU:
        graph = open_gpu_form(bundle, config, metadata, cache=cache)
    else:
        graph = _open_on_cpu(bundle, config, metadata, prefill, steering if steers else None, cache=cache)
    if cache and graph.probe_result is not None and graph.probe_result != stored:
        _PROBES.save(key, graph.probe_result)
    if config.device.provider != CPU_PROVIDER:
        _check(graph, bundle, config, cache=cache)
    return graph


def prompt_graph_obstacle(
    bundle: Bundle, config: SessionConfig, graph_io: GraphIO, prefill: PrefillMode, *, cache: bool
) -> str | None:
    """Why a model does not have an int8 prompt graph beside its own, before any is made; None if it may.

    Args:
        bundle: the model.
        config: how its graph is run.
        graph_io: inputs and outputs of its graph.
        prefill: which graph is to read prompts.
        cache: whether anything may be kept in the cache folder.
    """
    small = prefill is PrefillMode.AUTO and bundle.weight_bytes < _SMALL_MODEL_BYTES
    found = {
        "not asked for": prefill is PrefillMode.PLAIN,
        f"runs on the CPU alone, not on {config.device}": config.device.provider != CPU_PROVIDER,
        f"runs with a float cache alone, not with --kv {config.kv}": config.kv is not KVFormat.FLOAT,
        "is not made of models with a graph for their embedding": bundle.embedding is not None,
        "needs a cache that is extended in place": graph_io.cache_mode is not CacheMode.IN_PLACE,
        "is kept in the cache folder, and --no-cache was given": not cache,
        f"is not needed by a model below {format_bytes(_SMALL_MODEL_BYTES)}": small,
    }
    return next((reason for reason, applies in found.items() if applies), None)


def joined_graph(bundle: Bundle) -> bytes | None:
    """The graph that takes token ids, of a model with a graph for its embedding; None for any other."""
    if bundle.embedding is None:
        return None
    # Importing protobuf takes 28 ms.
    from ...models.onnx_file.graph_editor import CannotRewriteError, with_embedding  # noqa: PLC0415 -- see above

    if bundle.vision is None:
        token: Any = bundle.genai.get("image_token_id")
        return with_embedding(bundle.graph, bundle.embedding, token if is_whole(token, 0) else -1)
    from ..images.image_graph import image_graph  # noqa: PLC0415 -- as above

    joined = with_embedding(bundle.graph, bundle.embedding, processor_of(bundle).token_id)
    try:
        return joined and image_graph(bundle.graph, bundle.hidden_size, None, joined)[0]
    except CannotRewriteError:
        return joined


def _open_on_cpu(
    bundle: Bundle,
    config: SessionConfig,
    metadata: ModelMetadata,
    prefill: PrefillMode,
    steering: LoadOptions | None,
    *,
    cache: bool,
) -> DecoderGraph:
    """Load the model's own graph, with the further graphs that it can have."""
    file = graph_to_load(bundle, config, cache=cache)
    own = GraphSession(file, config, metadata, model=joined_graph(bundle))
    further = _further_graphs(own, file, bundle, prefill, cache)
    if steering is None:
        return ChosenGraphs(own, further) if further else own
    from ..steering.steered_graph import SteeredGraph  # noqa: PLC0415 -- importing protobuf takes 28 ms

    steered = SteeredGraph(bundle, file, steering)
    graphs = ChosenGraphs(own, [steered, *further])
    graphs.bind_further(steered, own.arena(1))  # what is wrong with it shows now
    return graphs


def _further_graphs(
    base: GraphSession, file: Path, bundle: Bundle, prefill: PrefillMode, cache: bool
) -> list[FurtherGraph]:
    """The further graphs that the model's own graph on the CPU can have, loaded from `file`."""
    further = list(_image_graphs(base, (file, None), bundle))
    if bundle.embedding is not None:
        return further
    if prompt_graph_obstacle(bundle, base.config, base.graph_io, prefill, cache=cache) is None:
        from ..int8_prompts.prompt_graph import PromptGraph  # noqa: PLC0415 -- most commands need none

        # Its cache works as in the graph it was made from. Rounding to 8 bits would hide that from a probe.
        further.append(PromptGraph(bundle, base, prefill))
    if _may_run_long_contexts(base, file, bundle):
        # The module imports runtime.measure, which imports this one.
        from ..long_context.long_graph import LEAST_CONTEXT, LongContextGraph  # noqa: PLC0415 -- see above

        if bundle.context is None or bundle.context > LEAST_CONTEXT:
            further.append(LongContextGraph(bundle, file, base, cache=cache))
    return further


def _image_graphs(base: GraphSession, form: GraphForm, bundle: Bundle) -> Iterator[FurtherGraph]:
    """The graph for passes with images that a model can have, made from the form of its graph that `base` runs."""
    if not suits_images(bundle, base.graph_io):
        return
    from ..images.image_graph import FEATURES, ImageGraph  # noqa: PLC0415 -- most models need none

    processor = processor_of(bundle)
    # Attention in both directions was computed wrongly on WebGPU, and is not checked as that of text is.
    is_right = base.config.device.kind is DeviceKind.CPU or not processor.bidirectional
    if is_right and (bundle.embedding is None or FEATURES in base.optional_inputs):
        yield ImageGraph(form, bundle.hidden_size, processor)


def _may_run_long_contexts(base: GraphSession, file: Path, bundle: Bundle) -> bool:
    """Whether a graph for long contexts may run beside a model's own.

    It maps the weights that were packed for this machine. Without those it would hold a second copy of all weights,
    which only a small model can afford.
    """
    config, graph_io = base.config, base.graph_io
    is_float_on_cpu = config.device.provider == CPU_PROVIDER and config.kv is KVFormat.FLOAT
    if not is_float_on_cpu or graph_io.cache_mode is not CacheMode.IN_PLACE or not graph_io.supports_wide_passes:
        return False
    return file.parent != bundle.graph.parent or bundle.weight_bytes < _HELD_TWICE_BYTES


def _check(graph: DecoderGraph, bundle: Bundle, config: SessionConfig, *, cache: bool) -> None:
    """Compare a device with the CPU; see `check_device`. A graph that only the comparison needed is released."""
    from ..devices.device_check import check_device  # noqa: PLC0415 -- as below

    check_device(graph, bundle, config, cache=cache)
    if isinstance(graph, ChosenGraphs):
        for further in graph.further:
            graph.release(further.name)


def open_gpu_form(bundle: Bundle, config: SessionConfig, metadata: ModelMetadata, *, cache: bool) -> DecoderGraph:
    """Load the form of a model's graph that a GPU takes, and beside it the one without a bias if that is faster.

    Args:
        bundle: the model.
        config: how to run it.
        metadata: what the files beside its graph say.
        cache: whether to keep forms that are made here on disk.

    Raises:
        BundleError: it is not a model that edge-run can decode with.
        DeviceError: the device cannot run the model.
    """
    # What other devices take would add a fifth to the time in which the package is imported: protobuf, for one.
    from ..gpu_graph.rewriting import has_plain_form, variant_for  # noqa: PLC0415 -- see above

    def form(*, plain: bool = False) -> GraphForm:
        variant = variant_for(bundle, config, cache=cache, plain=plain)
        return (variant, None) if isinstance(variant, Path) else (bundle.graph, variant)

    def load(form: GraphForm) -> GraphSession:
        return GraphSession(form[0], config, metadata, model=form[1])

    trees = form()
    # The positions of text behind an image have three axes in some models, and the plain form takes no positions.
    if has_plain_form(config) and (bundle.vision is None or not processor_of(bundle).has_axes):
        plain, tree_io = form(plain=True), read_graph_io(*trees, metadata)
        if runs_trees_beside(read_graph_io(*plain, metadata), tree_io):
            base = load(plain)
            # The form is looked up again for the first tree: until then, one with its weights inside would take memory.
            further = [*_image_graphs(base, plain, bundle), TreeGraph(lambda: load(form()))]
            return ChosenGraphs(base, further, tree_io)
    base = load(trees)
    images = list(_image_graphs(base, trees, bundle))
    return ChosenGraphs(base, images) if images else base


def graph_to_load(bundle: Bundle, config: SessionConfig, *, cache: bool) -> Path:
    """The file to load for a model's graph: its prepacked copy on the CPU if caching is on, else the original."""
    prepack = cache and config.device.kind is DeviceKind.CPU and bundle.embedding is None
    return prepacked_graph(bundle) if prepack else bundle.graph
