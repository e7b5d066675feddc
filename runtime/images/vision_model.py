"""The vision tower of a model, and the images that it has seen."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import BundleError, InputError
from ...models.bundle import Bundle
from ..devices.providers import cpu_device
from ..graph.graph_choice import IMAGES, ChosenGraphs
from ..graph.ort import ORT_ERRORS, run_failure
from ..graph.session import DecoderGraph, SessionConfig, graph_values, load_graph
from ..scheduling.idle_thread import IdleThread
from ..scheduling.request_queue import RequestQueue
from .decoding import decode_image
from .foreign_tower import tower_inputs
from .image_processor import Floats, ProcessedImage
from .image_processors import processor_of
from .image_tokens import tokens_of

_log: Final = logging.getLogger(__name__)
KEPT_BYTES: Final = 256 << 20
"""Most bytes of images and features that are kept, besides those of the latest image."""


class VisionModel:
    """The vision tower of a model, which is loaded for the first image whose features are needed, or before, while the
    engine is idle, where an image is attached to a message that is still being written.

    Several threads may use it at a time.

    Args:
        bundle: the model, which has a vision graph.
        config: how to run it.
        queue: the request queue of the engine.
        load_decoder: loads the graph that takes features.
        cache: whether a tower with 8-bit products may be kept on disk.
        share: share of the tokens of an image that stay; see `image_tokens`.

    Raises:
        BundleError: config.json names a family that is not known, or lacks the image token.
    """

    def __init__(
        self,
        bundle: Bundle,
        config: SessionConfig,
        queue: RequestQueue,
        load_decoder: Callable[[], object],
        *,
        cache: bool,
        share: float,
    ) -> None:
        self.processor: Final = processor_of(bundle)
        assert bundle.vision is not None  # noqa: S101  see open_vision
        self._graph: Final = bundle.vision
        self.share: Final = share
        self._bundle: Final = bundle
        self._cache: Final = cache
        self._config: Final = config
        self._queue: Final = queue
        self._load_decoder = load_decoder
        self._session: Any = None
        self._loading: Final = Lock()
        self._preloading: IdleThread | None = None
        self._seen: Final[OrderedDict[bytes, SeenImage]] = OrderedDict()
        self._lock: Final = Lock()

    def see(self, data: bytes) -> SeenImage:
        """An encoded image as the model sees it, the same object for the same bytes while it is kept.

        Raises:
            InputError: it cannot be decoded.
        """
        # Slots of merged tokens, which prefixes on disk may hold too, are not those of all of them.
        digest = hashlib.sha256(data + (b"" if self.share == 1 else str(self.share).encode())).digest()
        with self._lock:
            if (known := self._seen.get(digest)) is not None:
                self._seen.move_to_end(digest)
                return known
        image = self.processor.process(decode_image(data))
        made = SeenImage(self, digest, image)
        with self._lock:
            if self._preloading is None:
                if self._bundle.manifest is None and self.processor.bidirectional:
                    lack = "tokens of an image attend to earlier ones alone in this export, so answers are worse"
                    _log.warning("%s: %s; export the checkpoint with edge-run export", self._bundle.folder.name, lack)
                self._preloading = IdleThread(self._queue, lambda _: self._preload(image.tiles[0]), "edge-run images")
                self._preloading.start()
            self._seen[digest] = made
            kept = sum(each.nbytes for each in self._seen.values())
            while kept > KEPT_BYTES and len(self._seen) > 1:
                kept -= self._seen.popitem(last=False)[1].nbytes
        return made

    def features(self, tile: npt.NDArray[np.uint8]) -> Floats:
        """The features of a tile, float32 `[1 + layers, tokens, hidden]`; those after the first are for layers.

        Raises:
            EdgeError: the graph cannot be loaded, or fails.
        """
        inputs = self.processor.inputs(tile)
        session, is_foreign = self._tower(inputs), self._bundle.manifest is None
        if is_foreign:
            inputs = tower_inputs(inputs, graph_values(session.get_inputs()), self._bundle)
        try:
            features: Floats = session.run(None, inputs)[0]
        except ORT_ERRORS as error:
            raise run_failure("the vision tower", error) from error
        return features.astype(np.float32).reshape(1, -1, features.shape[-1]) if is_foreign else features

    def close(self) -> None:
        """Abandon work in the background, and let the graphs and the images go."""
        if self._preloading is not None:
            self._preloading.close()
        self._session, self._load_decoder = None, lambda: None
        self._seen.clear()

    def _preload(self, tile: npt.NDArray[np.uint8]) -> None:
        self._tower(self.processor.inputs(tile))
        self._load_decoder()

    def _tower(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Any:
        """The session of the tower, of the one with 8-bit products where there is one; loaded now if it is not.

        Args:
            inputs: those of a tile, with which 8-bit products are checked.

        Raises:
            EdgeError: it cannot be loaded.
        """
        with self._loading:
            if self._session is None:
                graph = None
                if self._cache and self._bundle.manifest is not None:
                    # Importing protobuf takes 28 ms.
                    from ..int8_prompts.int8_graph_files import int8_tower_path  # noqa: PLC0415 -- see above

                    graph = int8_tower_path(self._bundle, inputs, self._config)
                self._session = load_graph(graph or self._graph, self._config)[0]
            return self._session


def open_vision(
    bundle: Bundle, config: SessionConfig, graph: DecoderGraph, queue: RequestQueue, cache: bool, share: float
) -> VisionModel | None:
    """The vision tower of a model, beside its loaded graph; None for a model that reads text alone.

    It runs on the CPU also where the graph does not: only a GPU's attention over text is checked.

    Raises:
        BundleError: as for `VisionModel`.
        InputError: tokens are to be merged, which graphs of other exporters and devices do not weigh.
    """
    if not isinstance(graph, ChosenGraphs):
        return None
    decoder = next((each for each in graph.further if each.name == IMAGES), None)
    if decoder is None:
        return None
    if share < 1 and (bundle.manifest is None or config.device != cpu_device()):
        hint = "leave it out, or export the model's checkpoint and run it there"
        raise InputError("lossy_image_tokens is for exports of edge-run on the CPU", hint)
    # Idle threads must not spin beside the threads of the model's own graph.
    config = replace(config, device=cpu_device(), shares_cores=True, kv_scales=None)
    load_decoder = partial(graph.bind_further, decoder, graph.arena(1))
    return VisionModel(bundle, config, queue, load_decoder, cache=cache, share=share)


class SeenImage:
    """An image as a model sees it; the tower runs for the tiles whose features are asked for.

    Args:
        model: the model.
        digest: SHA-256 of the encoded image, and of what else its slots depend on.
        image: the image, resized and cut.

    Attributes:
        text: what stands for it in a prompt.
        by_tile: its tokens, tile by tile.
        tokens: number of them.
        keys: what stands for its tokens where sequences are compared: int64 `[tokens]`, all negative.
    """

    def __init__(self, model: VisionModel, digest: bytes, image: ProcessedImage) -> None:
        self.text, self.by_tile = tokens_of(image, model.processor.slot, model.share)
        self._ends: Final = np.cumsum([each.sizes.size for each in self.by_tile]).tolist()
        self.tokens: Final[int] = self._ends[-1]
        first = int.from_bytes(digest[:8]) >> 2  # 62 bits, so that the sums below stay in 64
        self.keys: Final[npt.NDArray[np.int64]] = -1 - (first + np.arange(self.tokens, dtype=np.int64))
        self._model: Final = model
        self._tiles: Final[list[npt.NDArray[Any]]] = list(image.tiles)
        """The tiles, uint8, in whose places their features stand once they are known, float32."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tiles and features."""
        return sum(each.nbytes for each in self._tiles)

    def features(self, start: int, stop: int) -> Floats:
        """Features float32 `[1 + layers, stop - start, hidden]` of some of its tokens.

        Raises:
            EdgeError: the vision tower fails.
        """
        first, last = bisect_right(self._ends, start), bisect_right(self._ends, stop - 1)
        for index in range(first, last + 1):
            if (tile := self._tiles[index]).dtype == np.uint8:
                features = self._model.features(tile)
                count, tokens = features.shape[1], self.by_tile[index].groups.size
                if count != tokens:
                    what = f"the vision tower gives {count} features of an image that has {tokens} tokens"
                    raise BundleError(what, "put the model's preprocessor_config.json and config.json beside it")
                self._tiles[index] = self.by_tile[index].merged(features)
        joined: Floats = np.concatenate(self._tiles[first : last + 1], axis=1)
        before = self._ends[first - 1] if first else 0
        return joined[:, start - before : stop - before]
