"""Requests to the Hugging Face Hub.

The hub library does the requests, log-ins, endpoints and redirects. Since release 1.0 it does not resume a file that an
earlier process left unfinished, so the file and the offset are given to it here. One request lists a repository with
the digest of every file; each file is one more request, and is compared with its digest.
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import EdgeError, HubError, InputError
from ...version import __version__
from ..bundle import digest_file
from ..file_system import remove
from ..manifest import FileDigest
from .downloaded_model import HubId
from .local_store import Listing, RepoFile, listing_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_TRUE: Final = frozenset({"1", "ON", "YES", "TRUE"})
_LOG_IN: Final = "hf auth login, or the environment variable HF_TOKEN"
_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO})
_LIBRARY: Final = "huggingface_hub"
_REQUEST_S: Final = 30.0
_CHUNK_BYTES: Final = 256 << 10
"""Bytes between two reports of progress. The library's own 10 MB are ten seconds of a slow connection, during which a
download could not be cancelled."""
_SILENCING: Final = threading.Lock()
_SETTINGS: Final[list[tuple[int, bool, int]]] = []
"""The library's settings before each block in which it is silent: of blocks that overlap, the last one to end restores
those before the first."""


class ConnectionFailedError(HubError):
    """The connection failed, so another attempt may succeed."""


class OfflineError(HubError):
    """The environment forbids requests to the hub."""


def is_offline() -> bool:
    """Return whether the environment forbids requests to the hub (`HF_HUB_OFFLINE`, which `--offline` sets)."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def require_online() -> None:
    """Raise where the environment forbids requests to the hub.

    Raises:
        OfflineError: it does.
    """
    if is_offline():
        what = "edge-run cannot reach the hub: it was told to stay offline"
        raise OfflineError(what, "start it without --offline and HF_HUB_OFFLINE")


def endpoint() -> str:
    """Return the hub's address; `HF_ENDPOINT` overrides it."""
    from huggingface_hub import constants  # noqa: PLC0415  importing it takes a third of a second

    return (os.environ.get("HF_ENDPOINT") or str(constants.ENDPOINT)).rstrip("/")


def list_repository(id_: HubId) -> Listing:
    """List a repository at the commit that the id's revision refers to now.

    Raises:
        HubError: the hub cannot be reached, or its answer is not valid.
        InputError: the repository or revision does not exist, or access is denied.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    with _library_errors_explained(id_, "the list of files"), _library_silenced():
        api = HfApi(endpoint=endpoint(), library_name="edge-run", library_version=__version__)
        try:
            info = api.model_info(id_.repo, revision=id_.revision, files_metadata=True, timeout=_REQUEST_S)
            files = []
            for each in info.siblings or ():
                sha256 = each.lfs["sha256"] if isinstance(each.lfs, dict) else getattr(each.lfs, "sha256", None)
                files.append({"path": each.rfilename, "bytes": each.size, "sha256": sha256, "git_oid": each.blob_id})
            commit = str(info.sha)
        except HfHubHTTPError:  # some kinds of it are ValueErrors too
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _invalid_answer() from error
    listing = listing_of(id_.repo, commit, files)
    if len(commit) != 40 or not set(commit) <= set("0123456789abcdef") or (files and not listing.files):
        raise _invalid_answer()
    return listing


def search_models(words: str, limit: int) -> list[dict[str, Any]]:
    """Repositories of language models with ONNX files whose names contain the words, most downloaded first.

    Returns:
        For each its `repo`, its `downloads` in the last 30 days, and the `bytes` of all of its files, in all variants;
        None where the hub does not say.

    Raises:
        OfflineError: the environment forbids requests to the hub.
        HubError: the hub cannot be reached, or its answer is not valid.
    """
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # noqa: PLC0415

    require_online()
    asked: dict[str, Any] = {"search": words, "filter": ["onnx", "text-generation"], "sort": "downloads"}
    asked |= {"limit": limit, "expand": ["downloads", "usedStorage"]}
    with _library_silenced():
        headers = build_hf_headers(library_name="edge-run", library_version=__version__)
        try:
            # The library's own function repeats a request that fails for 23 s.
            url = f"{endpoint()}/api/models"
            response = get_session().get(url, params=asked, headers=headers, timeout=_REQUEST_S)
            hf_raise_for_status(response)
            return [
                {"repo": each["id"], "downloads": each["downloads"], "bytes": each.get("usedStorage")}
                for each in response.json()
            ]
        except HfHubHTTPError as error:
            hint = "try again in a while"
            raise HubError(f"the hub refused the search (status {error.response.status_code})", hint) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _invalid_answer() from error
        except _transport_errors() as error:
            what = f"{endpoint()} cannot be searched: {_reason(error)}"
            raise ConnectionFailedError(what, "check the connection and try again") from error


def _invalid_answer() -> HubError:
    return HubError(f"{endpoint()} does not answer like the hub", "check HF_ENDPOINT, the proxy and the network log-in")


def download(listing: Listing, file: RepoFile, path: Path, progress: Callable[[int], None]) -> None:
    """Download a file to `path`, resuming after the bytes that are there.

    Args:
        listing: the repository.
        file: one of its files.
        path: destination; after an error it keeps the bytes that were received.
        progress: receives the number of new bytes, which is negative if received bytes were discarded.

    Raises:
        ConnectionFailedError: the hub cannot be reached, or the connection ended.
        HubError: the hub refuses the file, or the disk is full.
        InputError: access to the file is denied.
    """
    from huggingface_hub import constants, hf_hub_url  # noqa: PLC0415
    from huggingface_hub.file_download import http_get  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # noqa: PLC0415

    if file.bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise HubError(
            f"{file.path} of {listing.repo} is too large for a plain download",
            f"download it with: hf download {listing.repo}",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    url = hf_hub_url(listing.repo, file.path, revision=listing.commit, endpoint=endpoint())
    with (
        _CountingFile(path, progress) as target,
        _library_errors_explained(HubId(listing.repo), file.path),
        _library_silenced(),
    ):
        headers = build_hf_headers(library_name="edge-run", library_version=__version__)
        # The offset for resuming counts uncompressed bytes.
        headers["Accept-Encoding"] = "identity"
        if target.tell() > file.bytes:
            target.raw.truncate(0)
            target.seek(0)
        http_get(
            url,
            target,
            resume_size=target.tell(),
            headers=headers,
            expected_size=file.bytes,
            displayed_filename=file.path,
        )


def check_download(listing: Listing, file: RepoFile, path: Path) -> FileDigest:
    """Compare a downloaded file with the digest of the repository's list, and delete it if it differs.

    Raises:
        HubError: the file differs.
    """
    digest = digest_file(path)
    matches = digest.bytes == file.bytes
    if matches and file.sha256 is not None:
        matches = digest.sha256 == file.sha256
    elif matches and file.git_oid is not None:
        blob = f"blob {file.bytes}\0".encode() + path.read_bytes()
        matches = hashlib.sha1(blob, usedforsecurity=False).hexdigest() == file.git_oid
    if matches:
        return digest
    remove(path)
    raise HubError(
        f"{file.path} of {listing.repo} is damaged after the download: its checksum differs",
        "run the command again; if that does not help, a proxy or network device changes files",
    )


class _CountingFile(io.BufferedWriter):
    """A file opened for appending that reports the number of written bytes."""

    def __init__(self, path: Path, progress: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._progress = progress

    def write(self, data: Buffer, /) -> int:
        written = super().write(data)
        self._progress(written)
        return written

    def truncate(self, size: int | None = None, /) -> int:
        self.flush()
        size = self.tell() if size is None else size
        self._progress(size - self.seek(0, os.SEEK_END))
        return super().truncate(size)


@contextmanager
def _library_silenced() -> Iterator[None]:
    """Disable the library's progress bars, log messages and telemetry during the block; files come in small pieces.

    edge-run shows its own progress bar and errors; the telemetry would send the name of the calling program.
    """
    from huggingface_hub import constants  # noqa: PLC0415
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars  # noqa: PLC0415

    logger, bars = logging.getLogger(_LIBRARY), f"{_LIBRARY}.http_get"
    decided = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None  # by the environment, which takes precedence
    with _SILENCING:
        _SETTINGS.append((logger.level, constants.HF_HUB_DISABLE_TELEMETRY, constants.DOWNLOAD_CHUNK_SIZE))
        logger.setLevel(logging.ERROR)
        constants.HF_HUB_DISABLE_TELEMETRY = True
        constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, _CHUNK_BYTES)
        if not decided:
            disable_progress_bars(bars)
    try:
        yield
    finally:
        with _SILENCING:
            level, constants.HF_HUB_DISABLE_TELEMETRY, constants.DOWNLOAD_CHUNK_SIZE = _SETTINGS.pop()
            logger.setLevel(level)
            if not decided and not _SETTINGS:
                enable_progress_bars(bars)


@contextmanager
def _library_errors_explained(id_: HubId, what: str) -> Iterator[None]:
    """Convert the library's errors to edge-run's."""
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    try:
        yield
    except HfHubHTTPError as error:
        raise _refusal(id_, what, error) from error
    except _transport_errors() as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            hint = "make room, or set HF_HOME to a folder on another disk"
            raise HubError(f"{what} of {id_.repo} cannot be written: {error.strerror}", hint) from error
        hint = "check the connection and run the command again; it resumes where it stopped"
        raise ConnectionFailedError(
            f"{what} of {id_.repo} cannot be downloaded from {endpoint()}: {_reason(error)}", hint
        ) from error


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return the types of network errors, of whichever HTTP library the hub library uses."""
    libraries = [sys.modules.get(name) for name in ("httpx2", "httpx")]
    found = (getattr(library, name, None) for library in libraries for name in ("HTTPError", "InvalidURL"))
    return OSError, *(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))


def _reason(error: BaseException) -> str:
    """Return the operating system's message at the bottom of a chain of errors, or else the first error's."""
    bottom: BaseException | None = error
    message = ""
    while bottom is not None:
        if isinstance(bottom, OSError) and bottom.strerror:
            message = bottom.strerror
        bottom = bottom.__cause__ or bottom.__context__
    return message or str(error).split("\n")[0][:200] or type(error).__name__


def _refusal(id_: HubId, what: str, error: Any) -> EdgeError:
    """Convert an error answer (https://huggingface.co/docs/hub/api)."""
    status = error.response.status_code
    code = error.response.headers.get("X-Error-Code", "")
    by_code = {
        "GatedRepo": InputError(
            f"{id_.repo} requires that you accept its terms",
            f"accept them at {endpoint()}/{id_.repo}, then log in: {_LOG_IN}",
        ),
        "RevisionNotFound": InputError(
            f"{id_.repo} has no revision {id_.revision}", f"leave @{id_.revision} out for the newest"
        ),
        "EntryNotFound": HubError(f"{id_.repo} lists {what} but does not contain it", "run the command again"),
    }
    if code in by_code:
        return by_code[code]
    if status in (401, 403, 404):
        hint = f"check the name; a private model needs a log-in with access to it: {_LOG_IN}"
        return InputError(f"{id_.repo} is neither a model on the hub nor a file or folder on this machine", hint)
    if status == 429:
        hint = f"wait a little; a log-in raises the limit: {_LOG_IN}"
        return HubError("the hub received too many requests from this address", hint)
    hint = (
        "run the command again in a while; it resumes where it stopped"
        if status >= 500
        else "check the name and the revision"
    )
    return HubError(f"the hub refused {what} of {id_.repo} (status {status})", hint)
