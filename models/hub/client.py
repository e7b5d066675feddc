"""What is asked of the Hugging Face Hub: what a repository holds, and its files.

Requests, log-ins, endpoints and redirects are the hub library's. What it does not do is go on with a file where an
earlier process broke off (since its release 1.0 none does), so the file to write to and where to go on from are given
to it here. One request lists a repository with the digest of every file; after that a file is one request, and is
checked against its digest.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import EdgeError, HubError, InputError
from ...version import __version__
from ..bundle import digest_file
from ..manifest import FileDigest
from .local_store import Listing, RepoFile, listing_of
from .model_id import HubId

if TYPE_CHECKING:
    from typing import IO

_TRUE: Final = frozenset({"1", "ON", "YES", "TRUE"})
_LOG_IN: Final = "hf auth login, or the environment variable HF_TOKEN"
_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO})
_LIBRARY: Final = "huggingface_hub"
_REQUEST_S: Final = 30.0


class BrokenOffError(HubError):
    """The connection failed, so that another try may succeed."""


def is_offline() -> bool:
    """Whether the environment forbids asking the hub (`HF_HUB_OFFLINE`, which `--offline` sets)."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def endpoint() -> str:
    """The hub's address; `HF_ENDPOINT` names another."""
    from huggingface_hub import constants  # noqa: PLC0415  it takes a third of a second, and most runs need no hub

    return (os.environ.get("HF_ENDPOINT") or str(constants.ENDPOINT)).rstrip("/")


def list_repository(id_: HubId) -> Listing:
    """The repository at the commit that the id's revision stands at now.

    Raises:
        HubError: the hub cannot be reached or does not answer as it should.
        InputError: there is no such repository or revision, or it may not be read.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    with _told_in_a_line(id_, "the list of files"), _quiet_library():
        api = HfApi(endpoint=endpoint(), library_name="edge-run", library_version=__version__)
        try:
            info = api.model_info(id_.repo, revision=id_.revision, files_metadata=True, timeout=_REQUEST_S)
            files = [_repo_file(sibling) for sibling in info.siblings or ()]
            commit = str(info.sha)
        except HfHubHTTPError:  # some kinds of it are ValueErrors too
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _no_hub() from error
    listing = listing_of(id_.repo, commit, files)
    if len(commit) != 40 or not set(commit) <= set("0123456789abcdef") or (files and not listing.files):
        raise _no_hub()
    return listing


def _no_hub() -> HubError:
    return HubError(
        f"{endpoint()} does not answer as the hub does", "check HF_ENDPOINT and what is between it and here"
    )


def _repo_file(sibling: Any) -> RepoFile:
    lfs = sibling.lfs
    sha256 = lfs["sha256"] if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    return RepoFile(sibling.rfilename, sibling.size, sha256, sibling.blob_id)


def download(listing: Listing, file: RepoFile, path: Path, progress: Callable[[int], None]) -> None:
    """Download a file to `path`, going on after what is there already.

    Args:
        listing: of the repository.
        file: one of its files.
        path: where to; on an error it keeps what came.
        progress: called with the number of bytes that came, which is negative if some have to be given up.

    Raises:
        BrokenOffError: the hub cannot be reached, or the download broke off.
        HubError: the hub does not give the file, or the disk is full.
        InputError: the file may not be read.
    """
    from huggingface_hub import constants, hf_hub_url  # noqa: PLC0415
    from huggingface_hub.file_download import http_get  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # noqa: PLC0415

    if file.bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise HubError(
            f"{file.path} of {listing.repo} is larger than the hub sends at once",
            f"fetch it with: hf download {listing.repo}",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    url = hf_hub_url(listing.repo, file.path, revision=listing.commit, endpoint=endpoint())
    with path.open("ab") as target, _told_in_a_line(HubId(listing.repo), file.path), _quiet_library():
        headers = build_hf_headers(library_name="edge-run", library_version=__version__)
        # A size that was counted before compression could not be gone on from.
        headers["Accept-Encoding"] = "identity"
        if target.tell() > file.bytes:
            target.truncate(0)
            target.seek(0)
        counted: Any = _Counted(target, progress)
        http_get(
            url,
            counted,
            resume_size=target.tell(),
            headers=headers,
            expected_size=file.bytes,
            displayed_filename=file.path,
        )


def check_download(listing: Listing, file: RepoFile, path: Path) -> FileDigest:
    """Compare a downloaded file with the digest that the hub gives for it; one that differs is deleted.

    Raises:
        HubError: it differs.
    """
    digest = digest_file(path)
    if digest.bytes == file.bytes and _is_content(path, digest, file):
        return digest
    path.unlink()
    raise HubError(
        f"{file.path} of {listing.repo} came damaged: its checksum is not the hub's",
        "run the command again; if that does not help, something between the hub and here changes files",
    )


def _is_content(path: Path, digest: FileDigest, file: RepoFile) -> bool:
    if file.sha256 is not None:
        return digest.sha256 == file.sha256
    if file.git_oid is None:
        return True
    git = hashlib.sha1(f"blob {file.bytes}\0".encode(), usedforsecurity=False)
    git.update(path.read_bytes())
    return git.hexdigest() == file.git_oid


class _Counted:
    """A file opened for appending that tells how many bytes are written to it."""

    def __init__(self, file: IO[bytes], progress: Callable[[int], None]) -> None:
        self._file = file
        self._progress = progress

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        self._progress(written)
        return written

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        size = self._file.tell() if size is None else size
        self._progress(size - self._file.seek(0, os.SEEK_END))
        return self._file.truncate(size)


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Keep the library to what is asked of it.

    Its bars and log lines would stand beside the one bar and the one line that there are to be, and with its telemetry
    on it asks for and sends along what program it is started by.
    """
    from huggingface_hub import constants  # noqa: PLC0415
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars  # noqa: PLC0415

    logger, bars = logging.getLogger(_LIBRARY), f"{_LIBRARY}.http_get"
    level, telemetry_off = logger.level, constants.HF_HUB_DISABLE_TELEMETRY
    logger.setLevel(logging.ERROR)
    constants.HF_HUB_DISABLE_TELEMETRY = True
    decided = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None  # by the environment, which cannot be overruled
    if not decided:
        disable_progress_bars(bars)
    try:
        yield
    finally:
        logger.setLevel(level)
        constants.HF_HUB_DISABLE_TELEMETRY = telemetry_off
        if not decided:
            enable_progress_bars(bars)


@contextmanager
def _told_in_a_line(id_: HubId, what: str) -> Iterator[None]:
    """Turn the library's errors into ours."""
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    try:
        yield
    except HfHubHTTPError as error:
        raise _refusal(id_, what, error) from error
    except _transport_errors() as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            hint = "make room, or set HF_HOME to a folder on another disk"
            raise HubError(f"{what} of {id_.repo} cannot be written: {error.strerror}", hint) from error
        hint = "check the connection and run the command again: what came is kept"
        raise BrokenOffError(f"{what} of {id_.repo} cannot be had from {endpoint()}: {_reason(error)}", hint) from error


def _transport_errors() -> tuple[type[Exception], ...]:
    """What fails below the hub's own answers, in whichever HTTP library the hub library came with."""
    libraries = [sys.modules.get(name) for name in ("httpx2", "httpx")]
    found = (getattr(library, name, None) for library in libraries for name in ("HTTPError", "InvalidURL"))
    return OSError, *(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))


def _reason(error: BaseException) -> str:
    """The system's own words at the bottom of a chain of errors, else the first one's."""
    bottom: BaseException | None = error
    words = ""
    while bottom is not None:
        if isinstance(bottom, OSError) and bottom.strerror:
            words = bottom.strerror
        bottom = bottom.__cause__ or bottom.__context__
    return words or str(error).split("\n")[0][:200] or type(error).__name__


def _refusal(id_: HubId, what: str, error: Any) -> EdgeError:
    """The line for an answer that is an error (https://huggingface.co/docs/hub/api)."""
    status = error.response.status_code
    code = error.response.headers.get("X-Error-Code", "")
    by_code = {
        "GatedRepo": InputError(
            f"{id_.repo} is given only to those who accept its terms",
            f"accept them at {endpoint()}/{id_.repo}, then log in: {_LOG_IN}",
        ),
        "RevisionNotFound": InputError(
            f"{id_.repo} has no revision {id_.revision}", f"leave @{id_.revision} out for the newest"
        ),
        "EntryNotFound": HubError(f"{id_.repo} lacks {what} that it lists", "run the command again"),
    }
    if code in by_code:
        return by_code[code]
    if status in (401, 403, 404):
        hint = f"check the name; a private model needs a log-in that may read it: {_LOG_IN}"
        return InputError(f"there is no model {id_.repo} on the hub, nor a file or folder of that name here", hint)
    if status == 429:
        hint = f"wait a little; a log-in raises the limit: {_LOG_IN}"
        return HubError("the hub has had too many requests from here", hint)
    hint = "run the command again in a while: what came is kept" if status >= 500 else "check the name and the revision"
    return HubError(f"the hub does not give {what} of {id_.repo} (status {status})", hint)
