"""Downloads models from the Hugging Face Hub.

A downloaded model is opened without a request: a run needs no network, and what an id refers to changes only with
`edge-run pull`. Only the files that one graph needs are downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

from ...errors import BundleError
from ..bundle import GRAPH_NAME, SENTENCE_POOLING, SENTENCE_PROMPTS, TOKENIZER_AND_CONFIG_FILES
from ..file_system import remove
from ..graph_files import genai_decoder
from ..manifest import MANIFEST_NAME, DeviceKind, Manifest
from ..onnx_file.wire import external_files
from ..regular_file import MAX_JSON_BYTES, read_regular
from ..variants import GENAI_CONFIG, GraphFiles, choose_graph, variant_of
from . import client as hub_client
from .downloaded_model import CHECKPOINT, DownloadedModel, HubId, is_safe_path
from .downloads import DownloadProgress, PartialDownloads, locked_for_download
from .local_store import Listing, Store, library_folder, listing_of

_TEXT_FILES: Final = (
    *TOKENIZER_AND_CONFIG_FILES,
    GENAI_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    SENTENCE_POOLING,
    SENTENCE_PROMPTS,
    "2_Dense/config.json",
)
_CHECKPOINT_FILES: Final = (*_TEXT_FILES, "model.safetensors.index.json")
_GGUF_VARIANT: Final = re.compile(r"(?i)[-_.]((?:IQ|TQ|Q)\d[A-Z0-9_]*|BF16|F16|F32|MXFP4)$")
_GGUF_PART: Final = re.compile(r"-\d{5}-of-\d{5}$")


def fetch_model(
    id_: HubId, kind: DeviceKind = DeviceKind.CPU, *, newest: bool = False, progress: DownloadProgress | None = None
) -> DownloadedModel:
    """Return the model folder of an id, downloaded if necessary.

    Args:
        id_: id of a repository with ONNX graphs.
        kind: kind of device that the model will run on; decides the variant if the id names none.
        newest: whether to ask the hub which commit the revision refers to now, and to replace damaged files.
        progress: receives the name of what is downloaded, the bytes that are here and the bytes in total; None shows
            them in the terminal. What it raises ends the download, which a later one resumes. Where another download
            of the repository is waited for, they are those of its files, under the repository's name.

    Raises:
        BundleError: the repository holds no such graph, or the downloaded files are damaged.
        HubError: the hub cannot be reached or refuses, or edge-run is offline and the model is not downloaded.
        InputError: the repository or revision does not exist, or access is denied.
    """
    newest = newest and not hub_client.is_offline()
    listing = _listing(id_, newest=newest, progress=progress)
    _require_graph(id_, listing)
    store = Store(id_.repo)
    files = set(listing.files)
    if id_.variant is None and not newest:
        here = {each.source for each in store.all_downloaded() if each.commit == listing.commit}
        here = {source for source in here if source.endswith(".onnx")}
        here |= {source.replace("decoder_with_past_model", "decoder_model") for source in here}
        if here:  # of a repository with downloaded graphs, one of them is meant
            files = {file for file in files if file in here or not file.endswith(".onnx")}
    chosen = choose_graph(files, id_.variant, kind=kind, named=listing.decoders, where=id_.repo)
    return _model_folder(
        store,
        listing,
        chosen.graph,
        variant_of(listing.files, chosen.graph, listing.decoders),
        lambda downloads: _graph_files(downloads, chosen),
        repair=newest,
        progress=progress,
    )


def fetch_checkpoint(id_: HubId, *, progress: DownloadProgress | None = None) -> Path:
    """Return the source of an export: a folder with safetensors, a GGUF file, or a folder with an ONNX graph.

    A variant names a GGUF file (`Q4_K_M`) or an ONNX graph. Without a variant safetensors are preferred, because they
    have the original precision.

    Args:
        id_: id of a repository.
        progress: as for `fetch_model`.

    Raises:
        EdgeError: as for `fetch_model`.
    """
    listing = _listing(id_, newest=False, progress=progress)
    store = Store(id_.repo)
    weights = _safetensors(listing)
    if id_.variant is None and weights:
        files = {name: name for name in (*weights, *_CHECKPOINT_FILES) if name in listing.files}
        return _model_folder(store, listing, CHECKPOINT, "checkpoint", lambda _: files, progress=progress).path
    gguf = _gguf_files(listing)
    if gguf and (id_.variant is not None or not _has_graphs(listing)):
        variant, path = _choose_gguf(id_, gguf)
        wanted = {PurePosixPath(path).name: path}
        return _model_folder(store, listing, path, variant, lambda _: wanted, progress=progress).path
    return fetch_model(id_, progress=progress).path


def _listing(id_: HubId, *, newest: bool, progress: DownloadProgress | None) -> Listing:
    """Return the repository's files: as stored, or as the hub lists them now."""
    store = Store(id_.repo)
    commit = store.commit_of(id_.revision)
    known = store.listing(commit) if commit is not None else None
    if known is not None and not newest:
        return known
    if hub_client.is_offline():
        if (known := known or _library_listing(id_)) is not None:
            return known
        raise hub_client.OfflineError(
            f"{id_} is not downloaded, and edge-run is offline",
            f"run edge-run pull {id_} with a connection first",
        )
    listing = hub_client.list_repository(id_)
    with locked_for_download(store, listing, progress):
        listing = replace(listing, decoders=_decoders(store, listing))
        store.save_listing(listing, id_.revision)
    return listing


def _library_listing(id_: HubId) -> Listing | None:
    """List the files of a repository in the hub library's cache, where other programs may have put them."""
    folder = library_folder(id_.repo)
    try:
        ref = folder / "refs" / (id_.revision or "main")
        commit = read_regular(ref, MAX_JSON_BYTES).decode("ascii").strip() if ref.is_file() else id_.revision or ""
        snapshot = folder / "snapshots" / commit
        if not re.fullmatch("[0-9a-f]{40}", commit):
            return None
        files = []
        for path in filter(Path.is_file, snapshot.rglob("*")):
            # The name of a blob is the SHA-256 of a large file, or the git object id of a small one.
            blob, digits = path.resolve().name, {"git_oid": 40, "sha256": 64}
            digests = {name: blob if re.fullmatch(f"[0-9a-f]{{{n}}}", blob) else None for name, n in digits.items()}
            files.append({"path": path.relative_to(snapshot).as_posix(), "bytes": path.stat().st_size, **digests})
    except (OSError, ValueError):
        return None
    return listing_of(id_.repo, commit, files) if files else None


def _decoders(store: Store, listing: Listing) -> dict[str, str]:
    """Return the decoder's file name by folder, for each `genai_config.json` with several graphs beside it."""
    folders = [PurePosixPath(path).parent for path in listing.files if path.endswith(".onnx")]
    paths = [str(folder / GENAI_CONFIG) for folder in dict.fromkeys(folders) if folders.count(folder) > 1]
    downloads = PartialDownloads(store, listing, lambda _done, _total: None)
    named = {}
    for path in paths:
        if path in listing.files:
            decoder = genai_decoder(downloads.get([path])[path][0], f"tell the authors of {listing.repo}")
            if isinstance(decoder.get("filename"), str):
                named[str(PurePosixPath(path).parent)] = decoder["filename"]
    return named


def _model_folder(
    store: Store,
    listing: Listing,
    source: str,
    variant: str,
    wanted: Callable[[PartialDownloads], Mapping[str, str]],
    *,
    repair: bool = False,
    progress: DownloadProgress | None = None,
) -> DownloadedModel:
    """Return the model folder for a file of a repository; `wanted` gives its files, by their path in the folder."""
    name = DownloadedModel.name(listing.repo, variant)
    found = store.downloaded(listing.commit, source)
    if found is None or (repair and _is_damaged(found)):
        with locked_for_download(store, listing, progress) as report:
            # Another thread or process may have downloaded it meanwhile.
            found = store.downloaded(listing.commit, source)
            if found is not None and repair and _is_damaged(found):
                remove(found.folder)
                found = None
            if found is None:
                downloads = PartialDownloads(store, listing, partial(report, name))
                names = wanted(downloads)
                files = downloads.get(names.values())
                found = store.assemble(
                    listing.commit, source, variant, {name: files[path] for name, path in names.items()}
                )
    found.verify()
    if progress is not None:
        progress(name, found.bytes, found.bytes)
    return found


def _is_damaged(model: DownloadedModel) -> bool:
    try:
        model.verify()
    except BundleError:
        return True
    return False


def _graph_files(downloads: PartialDownloads, chosen: GraphFiles) -> dict[str, str]:
    """Return the files that one graph needs, by their path in the model folder."""
    listing = downloads.listing
    folder = PurePosixPath(chosen.graph).parent
    graphs = [path for path in (chosen.graph, chosen.prefill, chosen.embedding, chosen.vision) if path]
    downloads.check_room(
        path
        for path in listing.files
        if any(path == graph or path.startswith((f"{graph}_data", f"{graph}.data")) for graph in graphs)
    )
    wanted = {PurePosixPath(path).name: path for path in graphs}
    for graph, (file, _) in downloads.get(graphs).items():
        try:
            data = external_files(file)
        except BundleError as error:
            raise BundleError(f"{graph} of {listing.repo} is not an ONNX model", "name another variant") from error
        for name in data:
            path = str(folder / name)
            if not is_safe_path(name):
                raise BundleError(f"{graph} of {listing.repo} keeps weights in {name!r}", "do not use this model")
            if path not in listing.files:
                raise BundleError(f"{listing.repo} lacks {path}, where {graph} keeps weights", "tell its authors")
            wanted[name] = path
    for name in _TEXT_FILES:
        places = [str(place / name) for place in (folder, *folder.parents)]
        if nearest := [place for place in places if place in listing.files]:
            wanted[name] = nearest[0]
    manifest = str(folder / MANIFEST_NAME)
    if PurePosixPath(chosen.graph).name == GRAPH_NAME and manifest in listing.files:
        wanted |= _named_by_manifest(downloads, manifest)
    return wanted


def _named_by_manifest(downloads: PartialDownloads, path: str) -> dict[str, str]:
    """Return the files that a bundle's manifest names, and the files of its draft if that lies inside."""
    folder = PurePosixPath(path).parent
    manifest = Manifest.from_json(downloads.get([path])[path][0].read_bytes(), f"{path} of {downloads.listing.repo}")
    names = [MANIFEST_NAME, *manifest.files]
    wanted = {name: str(folder / name) for name in names if is_safe_path(name)}
    if manifest.draft is not None and not manifest.draft.graph and is_safe_path(manifest.draft.path):
        draft = folder / manifest.draft.path
        for each in map(PurePosixPath, downloads.listing.files):
            if draft in each.parents:
                wanted[str(each.relative_to(folder))] = str(each)
    return {name: file for name, file in wanted.items() if file in downloads.listing.files}


def _require_graph(id_: HubId, listing: Listing) -> None:
    """Check that a repository has ONNX graphs.

    Raises:
        BundleError: it has none; the hint shows how to export its weights.
    """
    if _has_graphs(listing):
        return
    what = f"{id_.repo} holds no .onnx file"
    if gguf := _gguf_files(listing):
        names = ", ".join(sorted(gguf))
        meant = id_.variant if id_.variant is not None else "Q4_K_M" if "Q4_K_M" in gguf else min(gguf)
        hint = f"export its GGUF weights: edge-run export {replace(id_, variant=meant)} OUT (there are {names})"
        raise BundleError(what, hint)
    if _safetensors(listing):
        raise BundleError(what, f"export its checkpoint: edge-run export {replace(id_, variant=None)} OUT")
    raise BundleError(what, "and no safetensors or GGUF weights to export; look for another repository of this model")


def _has_graphs(listing: Listing) -> bool:
    return any(path.endswith(".onnx") for path in listing.files)


def _safetensors(listing: Listing) -> list[str]:
    """List the weights of a checkpoint at the repository's root, by transformers' naming."""
    return [path for path in listing.files if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", path)]


def _gguf_files(listing: Listing) -> dict[str, str]:
    """Return GGUF files by variant: the format of their weights, or else their names."""
    # Vision towers (mmproj) are left out.
    paths = [path for path in sorted(listing.files) if path.endswith(".gguf") and "mmproj" not in path.lower()]
    found: dict[str, str] = {}
    for path in paths:
        stem = PurePosixPath(path).stem
        match = _GGUF_VARIANT.search(_GGUF_PART.sub("", stem))
        name = match[1].upper() if match else stem
        found[stem if name in found else name] = path
    return found


def _choose_gguf(id_: HubId, gguf: Mapping[str, str]) -> tuple[str, str]:
    """Return variant and path of the GGUF file that the id's variant names, or of the only one.

    Raises:
        BundleError: no file or several files match, or the file is one of several pieces.
    """
    wanted = (id_.variant or "").lower()
    exact = [name for name in gguf if wanted in (name.lower(), gguf[name].lower())]
    meant = exact or [name for name in gguf if wanted in PurePosixPath(gguf[name]).name.lower()]
    if len(meant) != 1:
        what = f"{id_.repo} has no GGUF file {id_.variant}" if not meant else f"{id_.repo} has several GGUF files"
        raise BundleError(what, f"name one: {id_.repo}:NAME, of {', '.join(sorted(meant or gguf))}")
    path = gguf[meant[0]]
    if _GGUF_PART.search(PurePosixPath(path).stem):
        raise BundleError(f"{path} of {id_.repo} is one of several pieces", "name a variant that is one file")
    return meant[0], path
