"""Images at `http:` and `https:` URLs in request bodies, fetched where `--allow-image-urls` allows it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from threading import Timer
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from ...models.json_file import shown
from ...runtime.images.decoding import data_url
from ..service.body_decoder import read_object
from ..service.request_error import invalid

_MAX_BYTES: Final = 10 << 20
"""Most bytes of all fetched images of a request, which are 14 million characters of its text then."""
_SECONDS: Final = 20.0
"""Time within which all images of a request have to be there."""
_MAX_REDIRECTS: Final = 3
_FETCHERS: Final = ThreadPoolExecutor(8, "edge-run image")
_RESOLVERS: Final = ThreadPoolExecutor(8, "edge-run host")
"""Threads that look up names of hosts, since a look-up itself has no time limit."""
_UNICAST, _TUNNELS = map(ipaddress.ip_network, ("2000::/3", "2002::/16"))


async def with_fetched_images(body: bytes) -> dict[str, Any]:
    """A request body with `data:` URLs in place of the web addresses of its images.

    Raises:
        RequestError: the body is not a JSON object, or an image cannot be fetched within the limits.
    """
    return await asyncio.get_running_loop().run_in_executor(_FETCHERS, _Fetcher().filled, body)


class _Fetcher:
    """Fetches the images of one request."""

    def __init__(self) -> None:
        self._deadline: Final = time.monotonic() + _SECONDS
        self._left = _MAX_BYTES

    def filled(self, body: bytes) -> dict[str, Any]:
        """As `with_fetched_images`."""
        whole = read_object(body)
        pending: list[Any] = [whole]
        while pending:
            each = pending.pop()
            match each:
                case {"type": "image_url", "image_url": {"url": str(url)} as image} if url.startswith("http"):
                    image["url"] = data_url(self._image(url))
                case {"type": "input_image", "image_url": str(url)} if url.startswith("http"):
                    each["image_url"] = data_url(self._image(url))
                case {"type": "image", "source": {"type": "url", "url": str(url)}}:
                    data = data_url(self._image(url)).partition(",")[2]
                    each["source"] = {"type": "base64", "media_type": "image/*", "data": data}
                case dict():
                    pending += each.values()
                case list():
                    pending += each
        return whole

    def _image(self, url: str) -> bytes:
        """What is at an address, after at most `_MAX_REDIRECTS` redirections.

        Raises:
            RequestError: it is not there, too large, too slow, or not at a public address.
        """
        target = url
        try:
            for _ in range(1 + _MAX_REDIRECTS):
                found = self._response(target)
                if isinstance(found, bytes):
                    self._left -= len(found)
                    return found
                target = urljoin(target, found)
            raise ValueError(f"it leads to more than {_MAX_REDIRECTS} redirections")
        except (OSError, HTTPException, ValueError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            if time.monotonic() >= self._deadline:
                reason = f"the images of a request take more than {_SECONDS:g} seconds"
            what = f"{shown(url)} cannot be fetched: {reason}"
            raise invalid("messages", what, "send the image itself, in base64") from error

    def _response(self, url: str) -> bytes | str:
        """The body of a response, or where it redirects to.

        Raises:
            OSError, HTTPException, ValueError: as said by the error.
        """
        parts = urlsplit(url)
        host, is_secure = parts.hostname, parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise ValueError("it is not an http or https URL of a host without a user's name")
        looked_up = _RESOLVERS.submit(_public_address, host, parts.port or (443 if is_secure else 80))
        family, address = looked_up.result(self._seconds())
        with closing(HTTPConnection(host)) as connection, socket.socket(family) as sock, sock.dup() as same:
            # The timeout of a socket begins again with every byte.
            timer = Timer(self._seconds(), _end, (same,))
            timer.start()
            try:
                sock.settimeout(self._seconds())
                sock.connect(address)
                trust = ssl.create_default_context() if is_secure else None
                connection.sock = trust.wrap_socket(sock, server_hostname=host) if trust else sock
                path = parts._replace(scheme="", netloc="", path=parts.path or "/", fragment="").geturl()
                connection.request("GET", path, headers={"Host": parts.netloc, "Accept": "image/*"})
                with connection.getresponse() as response:
                    if response.status in (301, 302, 303, 307, 308):
                        return response.headers.get("Location") or ""
                    if response.status != 200:
                        raise ValueError(f"the server answers {response.status}")
                    data = response.read(self._left + 1)
            finally:
                timer.cancel()
        self._seconds()
        if len(data) > self._left:
            raise ValueError(f"the images of a request have more than {_MAX_BYTES} bytes")
        return data

    def _seconds(self) -> float:
        """Seconds that are left.

        Raises:
            TimeoutError: none.
        """
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        return left


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _public_address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """An address of a host, which is checked here and connected to: asked for again, the name may stand for another one
    (DNS rebinding).

    Raises:
        OSError: the host is not known, or has no public address.
    """
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if is_public(str(address[0])):
            return family, address
    raise OSError("its address is not public")


def is_public(address: str) -> bool:
    """Whether an address is one of the internet, and not of this machine or its networks, also as part of another."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return (ip.version == 4 or (ip in _UNICAST and ip not in _TUNNELS)) and ip.is_global and not ip.is_multicast
