"""Finds the draft of a model and compares their vocabularies.

A draft proposes token ids, so the drafts of one with another vocabulary would be nonsense without any sign of an error.
Two vocabularies are the same if they have the same tokens under the same ids and the same merges. The padding of a
graph's vocabulary does not matter (there are graphs of 151936 and of 152064 tokens for the tokenizer of Qwen2.5). Any
other draft needs a map from its ids to the target's.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import BundleError
from .array_file import read_array
from .atomic import write_atomically
from .bundle import GRAPH_NAME, TARGET_IDS_NAME, Bundle, open_bundle
from .find import find_model
from .json_file import is_whole, read_json_object
from .manifest import MANIFEST_NAME, DraftPairing, HeadKind
from .onnx_file.wire import check_external_data
from .regular_file import MAX_TOKENIZER_BYTES, os_errors_as, read_regular

TOKENIZER_NAME: Final = "tokenizer.json"
_MAX_MAP_BYTES: Final = 16 << 20
"""Largest map of token ids: a million of 8 bytes, and as much again."""
_HINT: Final = "give a draft model made for this model, or --draft none"
_DAMAGED: Final = "restore it or export the model again"


@dataclass(frozen=True)
class DraftPair:
    """A draft, and the map from its token ids to the target's."""

    draft: Bundle
    target_ids: npt.NDArray[np.int32] | None
    """The target's id of each token of the draft's head, int32 `[V]`; None if the ids are the same."""
    head: HeadKind | None = None
    """Kind of a draft head, which reads the target's hidden states; `draft` is then the target's bundle with its graph.
    None for other drafts."""

    @property
    def name(self) -> str:
        """Name of the draft."""
        return self.draft.folder.name if self.head is None else f"{self.head} head"

    @cached_property
    def token_count(self) -> int:
        """Highest token id of the draft's tokenizer, plus 1."""
        return max(_read_vocabulary(self.draft).ids.values(), default=-1) + 1


def find_draft(target: Bundle, draft: str | os.PathLike[str] | None = "auto") -> DraftPair | None:
    """Find the draft model of a target; None if there is none.

    Args:
        target: the model that verifies the drafts.
        draft: a model folder or .onnx file; `auto` for the one that the target's manifest names, if it exists; None or
            `none` for no draft.

    Raises:
        BundleError: the draft is missing or damaged, or has another vocabulary.
    """
    if draft is None or draft == "none":
        return None
    named = target.manifest.draft if target.manifest is not None else None
    beside = Path(os.path.realpath(target.folder / named.path)) if named is not None else None
    if draft == "auto" and named is not None and named.graph:
        if named.head is None:  # a draft of the target's own layers, which earlier versions wrote
            return None
        graph, ids = target.folder / named.graph, target.folder / named.d2t
        for path in (graph, ids) if named.d2t else (graph,):
            if not path.is_file():
                raise BundleError(f"{path} is missing", "copy the whole model folder")
        check_external_data(graph)
        target_ids = _read_map(ids, offsets=named.d2t_offsets) if named.d2t else None
        bundle = dataclasses.replace(target, graph=graph, manifest=None)
        return DraftPair(bundle, target_ids, named.head)
    if draft == "auto":
        return pair(target, open_bundle(beside), named) if beside is not None and beside.is_dir() else None
    found = open_bundle(find_model(draft))
    is_named = Path(os.path.realpath(found.folder)) == beside and found.folder != target.folder
    return pair(target, found, named if is_named else None)


def pair(target: Bundle, draft: Bundle, named: DraftPairing | None = None) -> DraftPair:
    """Pair two models; `named` is the entry of the target's manifest about the draft, if any.

    Raises:
        BundleError: the vocabularies differ and there is no map, or the map is wrong.
    """
    name = named.d2t if named is not None and named.d2t else TARGET_IDS_NAME
    path = draft.file(name)
    if path is None and named is not None and named.d2t:
        raise BundleError(f"{draft.folder / name} is missing", "copy the whole model folder")
    target_ids = None if path is None else _read_map(path, offsets=named is not None and named.d2t_offsets)
    if _same_tokenizer_file(target, draft):
        return DraftPair(draft, target_ids)
    ours, theirs = _read_vocabulary(target), _read_vocabulary(draft)
    difference = theirs.difference(ours) if target_ids is None else theirs.difference_through(target_ids, ours)
    if difference:
        raise BundleError(f"the draft {draft.folder} has another vocabulary than {target.folder}: {difference}", _HINT)
    return DraftPair(draft, target_ids)


def vocabulary_difference(target: Path, draft: Path) -> str:
    """Describe where the tokenizer.json in the folder `draft` differs from the one in `target`; empty if it does not.

    Raises:
        BundleError: one of the files is missing or damaged.
    """
    ours, theirs = (Bundle(folder, folder / GRAPH_NAME, None) for folder in (target, draft))
    return "" if _same_tokenizer_file(ours, theirs) else _read_vocabulary(theirs).difference(_read_vocabulary(ours))


def name_draft(target: str | os.PathLike[str], draft: str | os.PathLike[str]) -> None:
    """Name a draft in its target's manifest.

    Raises:
        BundleError: one of the folders is not a bundle, or the vocabularies do not match.
        OSError: the manifest cannot be written.
    """
    bundle = open_bundle(Path(target))
    if bundle.manifest is None:
        raise BundleError(f"{bundle.folder} has no {MANIFEST_NAME}", "export the model again")
    found = pair(bundle, open_bundle(Path(draft)))
    relative = Path(os.path.relpath(found.draft.folder.resolve(), bundle.folder.resolve())).as_posix()
    named = DraftPairing(relative, TARGET_IDS_NAME if found.target_ids is not None else "")
    manifest = dataclasses.replace(bundle.manifest, draft=named)
    write_atomically(bundle.folder / MANIFEST_NAME, manifest.to_json().encode())


@dataclass(frozen=True)
class _Vocabulary:
    ids: dict[str, int]
    """Id by token, added tokens included."""
    merges: list[tuple[str, ...]]

    def difference(self, target: _Vocabulary) -> str:
        """Describe where this vocabulary differs from the target's; empty if it does not."""
        if self.ids == target.ids:
            return "" if self.merges == target.merges else "its tokens are the same, but not its merges"
        own, other = _by_id(self.ids), _by_id(target.ids)
        if (count := max(own, default=-1)) != (wanted := max(other, default=-1)):
            return f"its highest token id is {count}, not {wanted}"
        at = min(number for _, number in self.ids.items() ^ target.ids.items())
        return f"id {at} is {_shown(own.get(at))}, not {_shown(other.get(at))}"

    def difference_through(self, target_ids: npt.NDArray[np.int32], target: _Vocabulary) -> str:
        """Describe where a map leads to other tokens or lacks ids; empty if it is right.

        With the target's own vocabulary any map is right: then the draft's head is trimmed and nothing else.
        """
        if self.ids == target.ids:
            return ""
        own, other = _by_id(self.ids), _by_id(target.ids)
        if beyond := [token for token in own if token >= target_ids.size]:
            return f"{beyond[0]} and others of its ids are not in the map to the target's, which has {target_ids.size}"
        for token, mapped in enumerate(target_ids.tolist()):
            if own.get(token) != other.get(mapped):
                return f"id {token}, {_shown(own.get(token))}, is mapped to {_shown(other.get(mapped))}"
        return ""


def _by_id(ids: dict[str, int]) -> dict[int, str]:
    return {number: token for token, number in ids.items()}


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token[:40])


def _same_tokenizer_file(target: Bundle, draft: Bundle) -> bool:
    """Return whether the tokenizers are equal byte for byte: the usual case, which needs no parsing."""
    own, other = (bundle.file(TOKENIZER_NAME) for bundle in (target, draft))
    if own is None or other is None:
        return False
    try:
        return own.stat().st_size == other.stat().st_size and (
            read_regular(own, MAX_TOKENIZER_BYTES) == read_regular(other, MAX_TOKENIZER_BYTES)
        )
    except OSError as error:
        raise BundleError(f"{error.filename} cannot be read: {error.strerror}", "check its permissions") from error


def _read_vocabulary(bundle: Bundle) -> _Vocabulary:
    path = bundle.file(TOKENIZER_NAME)
    if path is None:
        hint = f"put the model's {TOKENIZER_NAME} beside the graph"
        raise BundleError(f"{bundle.folder} holds no {TOKENIZER_NAME}", hint)
    data = read_json_object(path, BundleError, _DAMAGED, max_bytes=MAX_TOKENIZER_BYTES)
    try:
        model = data["model"]
        listed = model["vocab"]  # ids by token (BPE, WordPiece), or tokens in order (Unigram)
        ids = dict(listed) if isinstance(listed, dict) else {entry[0]: number for number, entry in enumerate(listed)}
        ids.update({token["content"]: token["id"] for token in data.get("added_tokens") or ()})
        if not all(is_whole(number, 0) for number in ids.values()):
            raise ValueError("an id is not a number")
        # Older programs write "a b", newer ones ["a", "b"].
        merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model.get("merges") or ()]
        return _Vocabulary(ids, merges)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(f"{path} cannot be read: its vocabulary has an unknown format", _DAMAGED) from error


def _read_map(path: Path, *, offsets: bool) -> npt.NDArray[np.int32]:
    """Read the target's ids from an .npy file of integers `[V]`."""
    try:
        with os_errors_as(BundleError, f"{path} cannot be read", "check its permissions"):
            stored = read_array(path, _MAX_MAP_BYTES)
    except ValueError as error:
        raise BundleError(f"{path} cannot be read: it is not an .npy file of numbers", _DAMAGED) from error
    if stored.ndim != 1 or stored.dtype.kind not in "iu" or not stored.size:
        raise BundleError(f"{path} cannot be read: it does not hold a list of integers", _DAMAGED)
    ids = stored.astype(np.int64)
    if offsets:
        ids += np.arange(ids.size)
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max or np.unique(ids).size < ids.size:
        raise BundleError(f"{path} cannot be used: its token ids must be distinct and at least 0", _DAMAGED)
    return ids.astype(np.int32)
