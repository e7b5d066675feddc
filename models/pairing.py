"""Which draft model goes with a model, and whether the two mean the same by their token ids.

A draft speaks in token ids, so one with another vocabulary would guess nonsense without a sign that anything is wrong.
Two vocabularies are the same if they have the same tokens under the same ids and the same merges; by how much a graph
pads its vocabulary (Qwen2.5 has graphs of 151936 and of 152064 for one tokenizer) does not matter. Everything else
needs a map from the draft's ids to the target's.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import BundleError
from .atomic import write_atomically
from .bundle import GRAPH_NAME, MAP_NAME, Bundle, open_bundle
from .find import find_model
from .json_file import is_whole, read_json_object
from .manifest import MANIFEST_NAME, DraftPairing
from .onnx_file.external_data import check_external_data

TOKENIZER_NAME: Final = "tokenizer.json"
_HINT: Final = "give a draft model made for this model, or --draft none"
_DAMAGED: Final = "restore it or export the model again"


@dataclass(frozen=True)
class DraftPair:
    """A draft model that speaks a target's ids."""

    draft: Bundle
    target_ids: npt.NDArray[np.int32] | None
    """int32 `[V]`, the target's id of each token of the draft's head; None if ids are the same."""
    own: bool = False
    """Whether the draft is the target itself without some of its parts, to be run on the target's weights and cache;
    `draft` then is the folder of both with that graph."""

    @property
    def name(self) -> str:
        """What the draft is called."""
        return f"{self.draft.graph.stem} of its own" if self.own else self.draft.folder.name

    @cached_property
    def token_count(self) -> int:
        """Ids that the draft's tokenizer uses: the highest, and one more."""
        return max(_read_vocabulary(self.draft).ids.values(), default=-1) + 1


def find_draft(target: Bundle, asked: str | os.PathLike[str] | None = "auto") -> DraftPair | None:
    """The draft model for a target, or None.

    Args:
        target: the model that will judge the guesses.
        asked: a model folder or .onnx file; `auto` for the one that the target's manifest names, if it is there; None
            or `none` for none.

    Raises:
        BundleError: it is not there, is damaged, or has another vocabulary.
    """
    if asked is None or asked == "none":
        return None
    named = target.manifest.draft if target.manifest is not None else None
    beside = (target.folder / named.path).resolve() if named is not None else None
    if asked == "auto" and named is not None and named.graph:
        return _own_draft(target, named)
    if asked == "auto":
        return pair(target, open_bundle(beside), named) if beside is not None and beside.is_dir() else None
    draft = open_bundle(find_model(asked))
    return pair(target, draft, named if draft.folder.resolve() == beside and draft.folder != target.folder else None)


def _own_draft(target: Bundle, named: DraftPairing) -> DraftPair:
    """The target without some of its parts.

    Raises:
        BundleError: the graph or the map of its ids is missing or damaged.
    """
    graph, ids = target.folder / named.graph, target.folder / named.d2t
    for path in (graph, ids) if named.d2t else (graph,):
        if not path.is_file():
            raise BundleError(f"{path} is missing", "copy the whole model folder")
    check_external_data(graph)
    target_ids = _read_map(ids, offsets=named.d2t_offsets) if named.d2t else None
    return DraftPair(dataclasses.replace(target, graph=graph, manifest=None), target_ids, own=True)


def pair(target: Bundle, draft: Bundle, named: DraftPairing | None = None) -> DraftPair:
    """Two models side by side; `named` is what the target's manifest says about the draft.

    Raises:
        BundleError: they have different vocabularies and no map, or a wrong one.
    """
    name = named.d2t if named is not None and named.d2t else MAP_NAME
    path = draft.file(name)
    if path is None and named is not None and named.d2t:
        raise BundleError(f"{draft.folder / name} is missing", "copy the whole model folder")
    target_ids = None if path is None else _read_map(path, offsets=named is not None and named.d2t_offsets)
    if _same_file(target, draft):
        return DraftPair(draft, target_ids)
    ours, theirs = _read_vocabulary(target), _read_vocabulary(draft)
    difference = theirs.difference(ours) if target_ids is None else theirs.difference_through(target_ids, ours)
    if difference:
        raise BundleError(f"the draft {draft.folder} has another vocabulary than {target.folder}: {difference}", _HINT)
    return DraftPair(draft, target_ids)


def vocabulary_difference(target: Path, draft: Path) -> str:
    """Where the tokens of a tokenizer.json in the folder `draft` are not those of the one in `target`, in a few words;
    empty if they are the same.

    Raises:
        BundleError: one of them is missing or damaged.
    """
    ours, theirs = (Bundle(folder, folder / GRAPH_NAME, None) for folder in (target, draft))
    return "" if _same_file(ours, theirs) else _read_vocabulary(theirs).difference(_read_vocabulary(ours))


def name_draft(target: str | os.PathLike[str], draft: str | os.PathLike[str]) -> None:
    """Write into a bundle's manifest that `draft`, which must fit it, is its draft model.

    Raises:
        BundleError: one of the folders is no bundle, or the draft does not fit.
        OSError: the manifest cannot be written.
    """
    bundle = open_bundle(Path(target))
    if bundle.manifest is None:
        raise BundleError(f"{bundle.folder} has no {MANIFEST_NAME}", "export the model again")
    found = pair(bundle, open_bundle(Path(draft)))
    relative = Path(os.path.relpath(found.draft.folder.resolve(), bundle.folder.resolve())).as_posix()
    named = DraftPairing(relative, MAP_NAME if found.target_ids is not None else "")
    manifest = dataclasses.replace(bundle.manifest, draft=named)
    write_atomically(bundle.folder / MANIFEST_NAME, manifest.to_json().encode())


@dataclass(frozen=True)
class _Vocabulary:
    ids: dict[str, int]
    """By token; added tokens included."""
    merges: list[tuple[str, ...]]

    def difference(self, target: _Vocabulary) -> str:
        """Where this vocabulary is not the target's; empty if it is the same."""
        if self.ids == target.ids:
            return "" if self.merges == target.merges else "its tokens are the same, but not its merges"
        own, other = _by_id(self.ids), _by_id(target.ids)
        if (count := max(own, default=-1)) != (wanted := max(other, default=-1)):
            return f"its highest token id is {count}, not {wanted}"
        at = min(number for _, number in self.ids.items() ^ target.ids.items())
        return f"id {at} is {_shown(own.get(at))}, not {_shown(other.get(at))}"

    def difference_through(self, target_ids: npt.NDArray[np.int32], target: _Vocabulary) -> str:
        """Where a map is wrong: its tokens are not all the target's ids say, or some of the vocabulary have none.

        With the target's own vocabulary any map will do: then the head is trimmed and nothing else.
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


def _same_file(target: Bundle, draft: Bundle) -> bool:
    """Whether both have the same tokenizer, byte for byte: the usual case, in which nothing need be parsed."""
    files = [bundle.file(TOKENIZER_NAME) for bundle in (target, draft)]
    if files[0] is None or files[1] is None:
        return False
    try:
        return files[0].stat().st_size == files[1].stat().st_size and files[0].read_bytes() == files[1].read_bytes()
    except OSError as error:
        raise BundleError(f"{error.filename} cannot be read: {error.strerror}", "check its permissions") from error


def _read_vocabulary(bundle: Bundle) -> _Vocabulary:
    path = bundle.file(TOKENIZER_NAME)
    if path is None:
        hint = f"put the model's {TOKENIZER_NAME} beside the graph"
        raise BundleError(f"{bundle.folder} holds no {TOKENIZER_NAME}", hint)
    data = read_json_object(path, BundleError, _DAMAGED)
    try:
        return _vocabulary(data)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(f"{path} cannot be read: it holds no vocabulary that edge-run knows", _DAMAGED) from error


def _vocabulary(data: dict[str, Any]) -> _Vocabulary:
    """The vocabulary of a parsed tokenizer.json: ids by token (BPE, WordPiece), or tokens in order (Unigram)."""
    model = data["model"]
    listed = model["vocab"]
    ids = dict(listed) if isinstance(listed, dict) else {entry[0]: number for number, entry in enumerate(listed)}
    ids.update({token["content"]: token["id"] for token in data.get("added_tokens") or ()})
    if not all(is_whole(number, 0) for number in ids.values()):
        raise ValueError("an id is not a number")
    # Written as "a b" by older programs and as ["a", "b"] by newer ones.
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model.get("merges") or ()]
    return _Vocabulary(ids, merges)


def _read_map(path: Path, *, offsets: bool) -> npt.NDArray[np.int32]:
    """The target's ids from an .npy file of whole numbers `[V]`."""
    try:
        with path.open("rb") as file:
            stored = np.load(file, allow_pickle=False)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}", "check its permissions") from error
    except (ValueError, EOFError) as error:
        raise BundleError(f"{path} cannot be read: it is not an .npy file of numbers", _DAMAGED) from error
    if not isinstance(stored, np.ndarray) or stored.ndim != 1 or stored.dtype.kind not in "iu" or not stored.size:
        raise BundleError(f"{path} cannot be read: it does not hold a list of whole numbers", _DAMAGED)
    ids = stored.astype(np.int64)
    if offsets:
        ids += np.arange(ids.size)
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max or np.unique(ids).size < ids.size:
        raise BundleError(f"{path} is no map: its ids are not all different and at least 0", _DAMAGED)
    return ids.astype(np.int32)
