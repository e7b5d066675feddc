"""What of the documents goes into a prompt: whole ones that fit, or else the best passages."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

from ...errors import EdgeError, InputError
from ...models.atomic import write_atomically
from ...models.find import find_model
from ...models.progress import Progress, silent
from ...models.regular_file import os_errors_as
from ...models.user_folders import cache_folder, make_private_folder
from ...runtime.encoders.encoder import Encoder, load_encoder
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ...runtime.overflow import Overflow, answer_reserve
from ...runtime.prefill import never
from ..conversations.records import Passage, passage_entries, safe_file_name, with_passages
from ..service.offered_models import OfferedModels, capabilities_at
from .document_index import DocumentIndex, with_index

MAX_PASSAGES: Final = 8
"""Most passages, or whole documents, of a prompt."""
NO_MODEL: Final = "none"
"""Name of the embedding model where there is to be none."""
CHARACTERS_PER_TOKEN: Final = 8
"""More than tokens have in any language: longer documents are not tokenized in order to find out whether they fit."""
_RANK_OFFSET: Final = 60
_NAME: Final = 40
"""Most characters of the name of an attached file, which may have four bytes each."""
_NOTHING: Final = Passage("", 1, "")


def find_passages(
    engine: Engine,
    paths: Sequence[str | Path],
    question: str,
    options: GenerateOptions,
    progress: Progress = silent,
    cancelled: Callable[[], bool] = never,
    *,
    asked: str = "",
    earlier: int = 0,
    embedding_model: str | None = None,
) -> tuple[Passage, ...]:
    """Bring the indexes of documents up to date, and choose what answers a question.

    All documents are chosen whole if they are few and fit the context of the model beside the conversation, the
    question and room for the answer. Otherwise the passages that are ranked first are, as many as fit: by BM25 and,
    where there is an embedding model, by cosine similarity. Rankings, those of several folders too, are combined by
    reciprocal rank fusion. Where the overflow leaves out what is old, passages may take half of what the question
    leaves.

    Args:
        engine: the model, whose tokenizer counts.
        paths: folders and files; none if nothing is to be found.
        question: what the user asks.
        options: options of the answer, whose system message and tools take room too.
        progress: receives the progress of reading.
        cancelled: returns whether to stop.
        asked: the message with the question, if that is more.
        earlier: number of tokens of the conversation before the question.
        embedding_model: as for `passage_encoder`.

    Raises:
        CancelledError: `cancelled` returned True.
        InputError: a folder or file does not exist.
        EdgeError: an index cannot be read or written, or the embedding model cannot be loaded.

    Source: Cormack, Clarke and Buettcher 2009, Reciprocal Rank Fusion.
    """
    if not paths:
        return ()
    taken = engine.count_tokens(with_passages(asked or question, [_NOTHING]), options)
    free = engine.context - answer_reserve(engine.context, options.max_tokens) - taken
    stays = (options.overflow or engine.overflow or Overflow.ERROR) == Overflow.ERROR
    room = free - earlier if stays else max(free - earlier, free // 2)

    def found(index: DocumentIndex) -> tuple[list[Passage], list[Passage] | None]:
        index.update(progress, cancelled)
        whole = index.whole(max(room, 0) * CHARACTERS_PER_TOKEN, MAX_PASSAGES)
        return index.search(question, 2 * MAX_PASSAGES), whole

    rankings: list[list[Passage]] = []
    documents: list[Passage] | None = []
    for path in paths:
        ranking, whole = with_index(Path(path), found)
        rankings.append(ranking)
        documents = None if documents is None or whole is None else documents + whole
    if documents and len(documents) <= MAX_PASSAGES and len(fitting(engine, documents, room)) == len(documents):
        return tuple(documents)
    if room > 0 and (encoder := passage_encoder(embedding_model)) is not None:
        rankings += [_nearest(Path(path), encoder, question, progress, cancelled) for path in paths]
    return tuple(fitting(engine, fused(rankings), room)[:MAX_PASSAGES])


def _nearest(
    path: Path, encoder: Encoder, question: str, progress: Progress, cancelled: Callable[[], bool]
) -> list[Passage]:
    """The passages of a folder or file that are nearest to a question, the nearest first; its index gets vectors."""

    def found(index: DocumentIndex) -> list[Passage]:
        index.update(progress, cancelled)  # a damaged index has been made anew
        index.embed(encoder, progress, cancelled)
        return index.nearest(encoder, question, 2 * MAX_PASSAGES)

    return with_index(path, found)


def passage_encoder(wanted: str | None) -> Encoder | None:
    """The embedding model that finds passages by their meaning; it stays loaded.

    Args:
        wanted: its name or path, or `none`; None for the first encoder on this machine that makes vectors and can be
            loaded.

    Raises:
        EdgeError: the one that is named cannot be loaded.
    """
    if wanted is not None:
        return None if wanted == NO_MODEL else _loaded(find_model(wanted))
    for entry in OfferedModels([]).entries():
        if "embedding" in capabilities_at(Path(entry.source)):
            with suppress(EdgeError, OSError):
                return _loaded(Path(entry.source))
    return None


@lru_cache(1)
def _loaded(path: Path) -> Encoder:
    return load_encoder(path)


def attached_file(name: str, text: str) -> Path:
    """A file in the cache folder with the text of an attached one, so that it has an index.

    Raises:
        EdgeError: it cannot be written.
    """
    data, documents = text.encode(), cache_folder() / "documents"
    folder = documents / hashlib.sha256(data).hexdigest()[:32]
    path = folder / safe_file_name(name, "file")[-_NAME:]
    with os_errors_as(EdgeError, f"{path} cannot be written", "name another folder for indexes with EDGERUN_CACHE"):
        make_private_folder(documents)
        make_private_folder(folder)
        os.utime(folder)
        if not path.exists():
            write_atomically(path, data, private=True)
    return path


def document_paths(given: Sequence[str | Path]) -> tuple[str, ...]:
    """The absolute paths of folders and files that a user has named, perhaps from their home folder.

    Raises:
        InputError: one does not exist.
    """
    # Unlike Path.expanduser, this does not raise for an unknown user.
    paths = tuple(os.path.abspath(os.path.expanduser(path)) for path in given)
    if missing := [str(name) for name, path in zip(given, paths, strict=True) if not os.path.exists(path)]:
        raise InputError(f"the documents {missing[0]!r:.300} do not exist", "name a folder or a file")
    return paths


def fused(rankings: Sequence[Sequence[Passage]]) -> list[Passage]:
    """Combine rankings: the score of a passage is the sum of 1 / (60 + rank) over the rankings that have it."""
    scores: dict[Passage, float] = {}
    for ranking in rankings:
        for rank, passage in enumerate(ranking, 1):
            scores[passage] = scores.get(passage, 0.0) + 1 / (_RANK_OFFSET + rank)
    return sorted(scores, key=lambda each: -scores[each])


def fitting(engine: Engine, passages: Sequence[Passage], room: int) -> list[Passage]:
    """The passages that fit into a number of tokens, in their order; one that does not is passed over."""
    chosen = []
    for passage in passages:
        tokens = len(engine.tokenizer.encode(passage_entries([passage]), add_special_tokens=False))
        if tokens <= room:
            room -= tokens
            chosen.append(passage)
    return chosen
