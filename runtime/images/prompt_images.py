"""Where the images of a prompt stand among its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ..decode import check_prompt_fits
from ..graph.bound_graph import NewTokens, PassImages
from ..graph.pass_inputs import BLOCKED
from ..text.messages import ChatPrompt, images_in
from .image_processor import Floats
from .image_tokens import TileTokens
from .vision_model import SeenImage, VisionModel

if TYPE_CHECKING:
    from ..options import GenerateOptions


class PromptImages:
    """The images of a prompt, whose tokens have features in place of embeddings.

    Token ids stay those of the image token. Where sequences are compared, `keyed` ids stand for them, which depend on
    the content of the image.

    Args:
        model: what sees them.
        images: the images in their order.
        token_ids: the prompt.

    Attributes:
        merged_tokens: number of tokens that are left out, as others stand for them (`lossy_image_tokens`).

    Raises:
        InputError: the prompt has another number of image tokens than its images have features.
    """

    def __init__(self, model: VisionModel, images: Sequence[SeenImage], token_ids: Sequence[int]) -> None:
        self._slots: Final = np.flatnonzero(np.asarray(token_ids, np.int64) == model.processor.token_id)
        self._ends: Final = np.cumsum([each.tokens for each in images])
        if not images or self._ends[-1] != self._slots.size:
            expected = sum(each.tokens for each in images)
            what = f"the prompt has {self._slots.size} image tokens, and its images have {expected}"
            raise InputError(what, "leave the text of image tokens out of messages")
        self._images: Final = tuple(images)
        self._keys: Final = np.concatenate([each.keys for each in images])
        self._bidirectional: Final = model.processor.bidirectional
        tiles = [tile for each in images for tile in each.by_tile]
        sizes = np.concatenate([tile.sizes for tile in tiles])
        self.merged_tokens: Final = int(sizes.sum()) - sizes.size
        self._weights: Final = np.zeros(len(token_ids), np.float32)
        """What is added to the attention that each token gets."""
        self._weights[self._slots] = np.log(sizes)
        moves = model.processor.has_axes or self.merged_tokens
        self._positions: Final = self._placed(tiles, len(token_ids)) if moves else None
        """Positions int64 `[axes, n]`, in time, rows and columns or one alone; None where they are the slots."""
        self._shift: Final = 0 if self._positions is None else int(self._positions[0, -1]) + 1 - len(token_ids)
        """How much larger the position of a token behind the prompt is than its slot."""
        if self.merged_tokens and not self._slots[0]:
            raise InputError("the prompt begins with an image", "leave out lossy_image_tokens")

    def _placed(self, tiles: Sequence[TileTokens], count: int) -> npt.NDArray[np.int64]:
        """The positions of `count` tokens: those of a text count on from the largest one before (M-RoPE, Qwen2-VL)."""
        counts = [tile.sizes.size for tile in tiles]
        starts = self._slots[np.cumsum(counts) - counts].tolist()
        steps = np.ones(count, np.int64)
        for start, tile, tokens in zip(starts, tiles, counts, strict=True):
            steps[start : start + tokens] = 0
            steps[start + tokens - 1] = tile.span
        positions = np.tile(np.cumsum(steps) - steps, (tiles[0].places.shape[0], 1))
        for start, tile, tokens in zip(starts, tiles, counts, strict=True):
            positions[:, start : start + tokens] += tile.places
        return positions

    def limited(self, options: GenerateOptions, prompt_ids: Sequence[int], context: int) -> GenerateOptions:
        """The options with no more new tokens than the context has positions: merged tokens have theirs, too.

        Raises:
            ContextError: none is left.
        """
        if self._shift <= 0:
            return options
        check_prompt_fits(prompt_ids, context - self._shift)
        left = context - self._shift - len(prompt_ids)
        return replace(options, max_tokens=min(left, options.max_tokens or left))

    def keyed(self, token_ids: Sequence[int]) -> list[int]:
        """The beginning of the prompt and what follows it, with keys in place of image tokens."""
        keyed = np.array(token_ids, np.int64)
        count = int(np.searchsorted(self._slots, keyed.size))
        keyed[self._slots[:count]] = self._keys[:count]
        found: list[int] = keyed.tolist()
        return found

    def whole(self, length: int) -> int:
        """The largest number of tokens up to `length` that cuts no image."""
        count = int(np.searchsorted(self._slots, length))
        begins = np.concatenate([[0], self._ends])
        image = int(np.searchsorted(begins, count, side="right")) - 1
        return length if count == begins[image] else int(self._slots[begins[image]])

    def pass_width(self, base: int, width: int) -> int:
        """Number of tokens to run in a pass after `base` cached ones, `width` or fewer: text up to an image, or parts
        of images; more where the tokens of an image attend to each other."""
        first = int(np.searchsorted(self._slots, base))
        if first == self._slots.size or (distance := int(self._slots[first]) - base) >= width:
            return width
        if distance:
            return distance
        if not self._bidirectional:
            return width
        image = int(np.searchsorted(self._ends, first, side="right"))
        return int(self._slots[self._ends[image] - 1]) + 1 - base

    def placed(self, new: NewTokens, base: int) -> NewTokens:
        """The tokens of a pass after `base` cached ones, with the features of images among them.

        Raises:
            EdgeError: the vision tower fails.
        """
        first, last = np.searchsorted(self._slots, (base, base + len(new.ids))).tolist()
        slots = self._slots[first:last]
        new = new._replace(tree_mask=self._mask(new, base, slots))
        positions = None if self._positions is None else self._continued(self._positions, new, base)
        if positions is not None and (first == last or len(positions) == 1):
            new, positions = new._replace(positions=positions[0]), None
        if first == last:
            return new
        parts, start = [], 0
        for image, stop in zip(self._images, self._ends.tolist(), strict=True):
            if first < stop and last > start:
                parts.append(image.features(max(first, start) - start, min(last, stop) - start))
            start = stop
        return new._replace(images=PassImages(slots - base, np.concatenate(parts, axis=1), positions))

    def _continued(self, positions: npt.NDArray[np.int64], new: NewTokens, base: int) -> npt.NDArray[np.int64]:
        """The positions of a pass, int64 `[axes, n]`: those of the prompt, and behind it what counts on from them."""
        known, stop = positions[:, base : base + len(new.ids)], base + len(new.ids)
        given = np.arange(base, stop) if new.positions is None else np.asarray(new.positions)
        return np.concatenate([known, np.tile(given[known.shape[1] :] + self._shift, (len(known), 1))], axis=1)

    def _mask(self, new: NewTokens, base: int, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | Floats | None:
        """Which tokens attend to which in a pass with image tokens in `slots`, with weights where it has any."""
        mask, count = new.tree_mask, len(new.ids)
        if self._bidirectional and mask is None and slots.size:
            places = np.full(count, -1)
            places[slots - base] = np.searchsorted(self._ends, np.searchsorted(self._slots, slots), side="right")
            together = (places[:, None] == places) & (places >= 0)
            mask = np.tri(count, dtype=np.bool_) | together
        if not self._weights[: base + count].any():
            return mask
        hidden = ~(np.tri(count, dtype=np.bool_) if mask is None else mask.astype(np.bool_))
        bias = np.zeros((count, base + count), np.float32)
        bias[:, : self._weights.size] += self._weights[: base + count]
        bias[:, base + count - hidden.shape[1] :][hidden] = BLOCKED
        return bias


def placed_images(
    vision: VisionModel | None, chat: ChatPrompt | None, token_ids: Sequence[int], options: GenerateOptions
) -> PromptImages | None:
    """The images of a conversation among the tokens of its prompt; None for none.

    Raises:
        InputError: the options cannot have any, or the prompt has other image tokens besides.
    """
    images = [] if chat is None else images_in(chat.messages)
    if not images or vision is None:
        return None
    readers = [each.name for each in options.strategies if each.has_reader]
    others = [*readers, *filter(None, (options.adapter, options.control, options.penalty_alpha and "penalty_alpha"))]
    if others:
        raise InputError(f"{others[0]} is not supported for prompts with images", "leave out one of them")
    return PromptImages(vision, [vision.see(each) for each in images], token_ids)
