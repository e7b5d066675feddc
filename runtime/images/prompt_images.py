"""Where the images of a prompt stand among its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ..graph.bound_graph import NewTokens, PassImages
from ..text.messages import ChatPrompt, images_in
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

    Raises:
        InputError: the prompt has another number of image tokens than its images have features.
    """

    def __init__(self, model: VisionModel, images: Sequence[SeenImage], token_ids: Sequence[int]) -> None:
        self._slots: Final = np.flatnonzero(np.asarray(token_ids, np.int64) == model.token_id)
        self._ends: Final = np.cumsum([each.tokens for each in images])
        if not images or self._ends[-1] != self._slots.size:
            expected = sum(each.tokens for each in images)
            what = f"the prompt has {self._slots.size} image tokens, and its images have {expected}"
            raise InputError(what, "leave the text of image tokens out of messages")
        self._images: Final = tuple(images)
        self._keys: Final = np.concatenate([each.keys for each in images])
        self._bidirectional: Final = model.processor.bidirectional
        self._positions: Final = self._three_axes(len(token_ids))
        """Positions int64 `[3, n]` in time, rows and columns; None where they are the slots."""

    def _three_axes(self, count: int) -> npt.NDArray[np.int64] | None:
        """The positions of `count` tokens: those of a text count on from the largest one before (M-RoPE, Qwen2-VL)."""
        if self._images[0].grid is None:
            return None
        steps, first = np.ones(count, np.int64), 0
        grids = [each.grid or (1, 1) for each in self._images]
        starts = [int(self._slots[end - each.tokens]) for end, each in zip(self._ends, self._images, strict=True)]
        for start, (rows, columns) in zip(starts, grids, strict=True):
            steps[start : start + rows * columns] = 0
            steps[start + rows * columns - 1] = max(rows, columns)
        positions = np.tile(np.cumsum(steps) - steps, (3, 1))
        for start, (rows, columns) in zip(starts, grids, strict=True):
            span, first = slice(start, start + rows * columns), int(positions[0, start])
            positions[:, span] = first
            positions[1:, span] += np.indices((rows, columns)).reshape(2, -1)
        return positions

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
        positions = None if self._positions is None else self._positions[:, base : base + len(new.ids)]
        if first == last:
            return new if self._positions is None else self._shifted(new, base, self._positions)
        parts, start = [], 0
        for image, stop in zip(self._images, self._ends.tolist(), strict=True):
            if first < stop and last > start:
                parts.append(image.features(max(first, start) - start, min(last, stop) - start))
            start = stop
        slots = self._slots[first:last]
        mask = new.tree_mask
        if self._bidirectional and mask is None:
            places = np.full(len(new.ids), -1)
            places[slots - base] = np.searchsorted(self._ends, np.arange(first, last), side="right")
            together = (places[:, None] == places) & (places >= 0)
            mask = np.tri(len(new.ids), dtype=np.bool_) | together
        return new._replace(tree_mask=mask, images=PassImages(slots - base, np.concatenate(parts, axis=1), positions))

    @staticmethod
    def _shifted(new: NewTokens, base: int, positions: npt.NDArray[np.int64]) -> NewTokens:
        """A pass over text with the positions that it has behind images."""
        count = positions.shape[1]
        # The last token of the prompt is text, and what follows counts on from it.
        shift = int(positions[0, min(base, count - 1)]) - min(base, count - 1)
        given = np.arange(base, base + len(new.ids)) if new.positions is None else np.asarray(new.positions)
        return new._replace(positions=given + shift) if shift else new


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
